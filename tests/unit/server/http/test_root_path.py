"""`root_path`: a server below a path of a proxy's, which leaves the path on requests or not."""

from __future__ import annotations

import pytest

from srm.server.config import ServerConfig
from tests.unit.server.conftest import Served

ROOT = "/api/srm"


async def test_requests_come_with_the_path_or_without(served: Served) -> None:
    async with served(root_path=ROOT) as http:
        for path in ("/health", "/v1/models", "/openapi.json", "/docs", "/", "/dashboard/app.js"):
            plain, below = await http.get(path), await http.get(ROOT + path)
            assert plain.status_code == below.status_code != 404
            assert plain.content == below.content
        assert (await http.get(ROOT)).status_code == 200
        completion = await http.post(f"{ROOT}/v1/completions", json={"prompt": 5.5})
        assert completion.json()["error"]["param"] == "prompt"
        for path in ("/api/srm2/health", "/api/health", ROOT + ROOT + "/health"):
            assert (await http.get(path)).status_code == 404
        document = (await http.get("/openapi.json")).json()
        assert document["servers"] == [{"url": ROOT}]


async def test_without_one_nothing_is_taken_off(served: Served) -> None:
    async with served() as http:
        assert (await http.get(f"{ROOT}/health")).status_code == 404
        assert "servers" not in (await http.get("/openapi.json")).json()


@pytest.mark.parametrize("path", ["srm", "/", "/srm/", "//srm", "/a b", "/a?b", "/ü"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="root_path must be empty or a path"):
        ServerConfig(root_path=path)
