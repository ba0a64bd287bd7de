"""Who may ask for what changes the server: the operator's key, or a program on this machine."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from engine.errors import InvalidRequest
from server.config import ServerConfig
from server.http.auth import Auth
from server.http.draining import Draining
from server.http.keys import ApiKey, Keys, key_to_send
from server.http.request_middleware import RequestMiddleware
from server.routes.admin import resolved

ADMIN, OTHER = "operator-0123456789abcdef", "somebody-0123456789abcdef"
NO_KEYS = Keys([])
KEYS = Keys(
    [ApiKey("admin-1", sha256(ADMIN.encode()).digest()),
     ApiKey("bob", sha256(OTHER.encode()).digest())]
)  # fmt: skip
WEIGHTS = "/v1/admin/weights"


def guarded(keys: Keys, admin_port: int = 0) -> ASGIApp:
    config = ServerConfig(admin_port=admin_port)
    return RequestMiddleware(Auth(PlainTextResponse("passed"), config, keys, lambda: 1, Draining()))


async def status(
    app: ASGIApp, address: str, key: str = "", port: int = 8000, header: str = "x-request-id"
) -> int:
    """Of a POST from that address."""
    headers = {header: "a"} | ({"authorization": f"Bearer {key}"} if key else {})
    transport = httpx.ASGITransport(app, client=(address, 1234))
    async with httpx.AsyncClient(
        transport=transport, base_url=f"http://127.0.0.1:{port}"
    ) as client:
        reply = await client.post(WEIGHTS, headers=headers)
    if reply.status_code != 200:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    if reply.status_code == 403:
        assert reply.json()["error"]["code"] == "not_permitted"
        assert reply.json()["error"]["type"] == "permission_error"
        assert reply.headers["x-should-retry"] == "false"
    return reply.status_code


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"])
async def test_without_keys_it_is_who_asks_from_this_machine_at_the_admin_port(
    address: str,
) -> None:
    assert await status(guarded(NO_KEYS, admin_port=9000), address, port=9000) == 200


async def test_without_keys_whoever_comes_through_a_proxy_may_not() -> None:
    """One on this machine that adds no header: it is the peer, and says nothing of its own."""
    assert await status(guarded(NO_KEYS), "127.0.0.1") == 403
    assert await status(guarded(NO_KEYS, admin_port=9000), "127.0.0.1") == 404


@pytest.mark.parametrize("address", ["10.0.0.5", "0.0.0.0", "::ffff:10.0.0.5", "fe80::1", ""])
async def test_without_keys_nobody_else_may(address: str) -> None:
    assert await status(guarded(NO_KEYS), address) == 403
    assert await status(guarded(NO_KEYS, admin_port=9000), address, port=9000) == 403


@pytest.mark.parametrize("header", ["origin", "forwarded", "x-forwarded-for"])
async def test_a_page_or_a_proxy_on_this_machine_is_not_the_operator(header: str) -> None:
    app = guarded(NO_KEYS, admin_port=9000)
    assert await status(app, "127.0.0.1", port=9000, header=header) == 403


async def test_with_keys_it_takes_the_operators() -> None:
    app = guarded(KEYS)
    assert await status(app, "10.0.0.5", ADMIN) == 200
    assert await status(app, "127.0.0.1", OTHER) == 403
    assert await status(app, "127.0.0.1") == 401


@pytest.mark.parametrize(("keys", "key"), [(NO_KEYS, ""), (KEYS, ADMIN)])
async def test_with_an_admin_port_it_is_there_alone(keys: Keys, key: str) -> None:
    app = guarded(keys, admin_port=9000)
    assert await status(app, "127.0.0.1", key, port=8000) == 404
    assert await status(app, "127.0.0.1", key, port=9000) == 200


async def test_an_admin_port_replaces_no_key() -> None:
    assert await status(guarded(KEYS, admin_port=9000), "127.0.0.1", port=9000) == 401
    assert await status(guarded(NO_KEYS, admin_port=9000), "10.0.0.5", port=9000) == 403


def test_the_command_sends_the_operators_key_if_it_has_it() -> None:
    assert key_to_send({}, "admin") is None
    assert key_to_send({"SRM_API_KEYS": f"bob {OTHER},admin {ADMIN}"}, "admin") == ADMIN
    assert key_to_send({"SRM_API_KEYS": f"{OTHER},bob {ADMIN}"}, "admin") == OTHER


def test_a_path_leads_into_the_folder_of_weights(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "weights", tmp_path / "secret"
    (allowed / "a").mkdir(parents=True)
    outside.mkdir()
    (allowed / "link").symlink_to(outside)
    (allowed / "good").symlink_to(allowed / "a")
    for path in ("a", "./a", "b/../a", "good", str(allowed / "a")):
        assert resolved(path, str(allowed)) == allowed / "a"
    for path in ("..", "../secret", "a/../../secret", "link", "link/x", str(outside), "/",
                 str(allowed / ".." / "secret"), str(allowed) + "-more"):  # fmt: skip
        with pytest.raises(InvalidRequest, match="weights_dir") as refused:
            resolved(path, str(allowed))
        assert refused.value.param == "path"
    assert resolved(str(allowed / "link"), "") == outside


@pytest.mark.parametrize("path", ["a\0b", "x" * 5_000, "relative"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolved(path, "")
    assert refused.value.param == "path"
