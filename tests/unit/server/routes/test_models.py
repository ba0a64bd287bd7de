"""What the served model is called, and by which names it is not found."""

from __future__ import annotations

import pytest

from srm.server.dialects.completions.models import Models
from srm.server.errors import ModelNotFound
from tests.kit.serving import error_of
from tests.unit.server.conftest import Served


def test_only_its_own_name_is_taken() -> None:
    models = Models("tiny", 128)
    models.check(None)
    models.check("tiny")
    for name in ("", "Tiny", "tiny/", "other"):
        with pytest.raises(ModelNotFound, match="this server has 'tiny'") as missing:
            models.check(name)
        assert missing.value.param == "model"


async def test_a_name_may_have_slashes(served: Served) -> None:
    async with served(served_model_name="some/one/tiny") as http:
        for path in ("some/one/tiny", "some%2Fone%2Ftiny"):  # OpenAI's SDK sends the second
            assert (await http.get(f"/v1/models/{path}")).json()["id"] == "some/one/tiny"
        assert error_of(await http.get("/v1/models/some/one"), 404)["code"] == "model_not_found"
