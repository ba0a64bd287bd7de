"""What the served model is called, and by which names it is not found."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from engine.client.client import EngineClient
from engine.errors import ModelNotFound
from server.config import ServerConfig
from server.routes.app import create_app
from server.routes.models import Models
from server.text.text import Text


def test_only_its_own_name_is_taken() -> None:
    models = Models("tiny", 128)
    models.check(None)
    models.check("tiny")
    for name in ("", "Tiny", "tiny/", "other"):
        with pytest.raises(ModelNotFound, match="this server has 'tiny'") as missing:
            models.check(name)
        assert missing.value.param == "model"


async def test_a_name_may_have_slashes(text_model: Path) -> None:
    config = ServerConfig(served_model_name="some/one/tiny")
    app = create_app(config, EngineClient("tcp://127.0.0.1:1"), Text(text_model))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost/v1/models"
    ) as client:
        for path in ("some/one/tiny", "some%2Fone%2Ftiny"):  # OpenAI's SDK sends the second
            assert (await client.get(path)).json()["id"] == "some/one/tiny"
        missing = await client.get("some/one")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
