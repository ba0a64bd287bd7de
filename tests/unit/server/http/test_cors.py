"""Pages in browsers use a server only if they are its own, or of `cors_origins`; programs go on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from hashlib import sha256
from itertools import product
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from engine.errors import SRMError
from server import errors
from server.config import ServerConfig
from server.http.auth import Auth
from server.http.bodies import read_body
from server.http.cors import Cors, is_loopback
from server.http.draining import Draining
from server.http.keys import ApiKey, Keys
from server.http.request_middleware import RequestMiddleware
from server.routes.app import OPERATIONS

KEY = "somebody-0123456789abcdef"
NO_KEYS, KEYS = Keys([]), Keys([ApiKey("bob", sha256(KEY.encode()).digest())])
OWN = "http://127.0.0.1:8000"
STRANGER = "https://stranger.example"


def ask(
    method: str = "POST",
    path: str = "/v1/completions",
    keys: Keys = NO_KEYS,
    port: int = 8000,
    host: str = "127.0.0.1",
    cors_origins: tuple[str, ...] = (),
    headers: Mapping[str, str] = MappingProxyType({}),
    **named: str,
) -> httpx.Response:
    """The reply of a server that listens on `host`, behind which everything is answered."""
    config = ServerConfig(host=host, admin_port=9000, cors_origins=cors_origins)

    async def passed(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("passed")(scope, receive, send)

    guard = Auth(passed, config, keys, lambda: 1, Draining())
    app = RequestMiddleware(Cors(guard, cors_origins, OPERATIONS) if cors_origins else guard)

    async def sent() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1234))
        async with httpx.AsyncClient(
            transport=transport, base_url=f"http://127.0.0.1:{port}"
        ) as client:
            return await client.request(method, path, headers={**headers, **named})

    return asyncio.run(sent())


STRANGERS = (STRANGER, "null", "http://localhost:3000", OWN + "0", "http://[")


@pytest.mark.parametrize("port", [8000, 9000])
def test_a_web_page_of_another_origin_cannot_use_the_server(port: int) -> None:
    routes = {(one.method, one.path) for one in OPERATIONS} - {
        *(("GET", path) for path in ("/health", "/ready", "/ping")),
        ("POST", "/ping"),
    }
    asked = [*((*route, STRANGER) for route in routes), *(("POST", "/", one) for one in STRANGERS)]
    for method, path, origin in asked:
        error = refused(ask(method, path, port=port, origin=origin))
        assert "cors_origins" in error["message"]
    for origin in ("null", "junk", "http://", ""):  # it is not that of an empty host
        refused(ask(origin=origin, Host=""))


def refused(reply: httpx.Response) -> Any:
    assert reply.status_code == 403, reply.request.url
    error = reply.json()["error"]
    assert error["code"] == "not_permitted"
    return error


def test_programs_and_the_servers_own_page_go_on() -> None:
    assert ask().status_code == 200
    assert ask(origin=OWN).status_code == 200
    assert ask(origin="https://srm.example", host="0.0.0.0", Host="srm.example").is_success
    assert ask(path="/health", method="GET", origin=STRANGER).status_code == 200


def test_origins_that_are_named_may_ask() -> None:
    for allowed in ("*", STRANGER):
        assert ask(cors_origins=(allowed,), origin=STRANGER).status_code == 200
    assert ask(cors_origins=(STRANGER,), origin="https://other.example").status_code == 403
    extension = "chrome-extension://abcdefgh"
    assert ask(cors_origins=(extension,), origin=extension).status_code == 200


REBOUND = ("evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "[", "srm")


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/"])
def test_a_name_that_was_given_our_address_is_not_ours(path: str) -> None:
    """DNS rebinding: the page's origin and `Host` are the same then."""
    listening = (("127.0.0.1", 8000), ("localhost", 8000), ("::1", 8000), ("0.0.0.0", 9000))
    for name, (host, port) in product(REBOUND, listening):
        refused(ask("GET", path, host=host, port=port, origin=f"http://{name}", Host=name))


def test_a_host_name_is_this_machines_alone_if_all_its_addresses_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = {
        "MyBox": ["127.0.1.1", "::1"],
        "both": ["127.0.0.1", "10.0.0.5"],
        "LOCALHOST": ["127.0.0.1"],
    }

    def look_up(name: str, _port: None) -> list[tuple[object, ...]]:
        if name not in addresses:
            raise socket.gaierror
        return [(0, 0, 0, "", (address, 0)) for address in addresses[name]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert all(map(is_loopback, ["MyBox", "LOCALHOST", "127.9.9.9", "::ffff:127.0.0.1"]))
    assert not any(map(is_loopback, ["both", "nowhere", "", "0.0.0.0"]))
    assert ask("GET", "/v1/models", host="MyBox", Host="mybox").status_code == 200
    assert ask("GET", "/v1/models", host="MyBox", Host="evil.example").status_code == 403


def test_names_that_a_server_has() -> None:
    for name in ("", "localhost", "LOCALHOST:1", "127.3.2.1:8000", "[::1]:8000", "10.0.0.5",
                 "a.localhost:8000", "host.docker.internal:8000"):  # fmt: skip
        assert ask("GET", "/v1/models", Host=name).status_code == 200
    assert ask(cors_origins=("https://srm.example",), Host="srm.example").status_code == 200
    assert ask(host="0.0.0.0", Host="srm.example").status_code == 200
    bearer = {"authorization": f"Bearer {KEY}"}
    assert ask(keys=KEYS, Host="srm.example", headers=bearer).status_code == 200


def test_pages_of_named_origins_may_use_every_method_that_a_route_has() -> None:
    def preflight(asked: str) -> httpx.Response:
        headers = {"origin": STRANGER, "access-control-request-method": asked}
        return ask("OPTIONS", "/v1/files/a", cors_origins=(STRANGER,), headers=headers)

    for method in ("GET", "POST", "DELETE"):
        reply = preflight(method)
        assert reply.status_code == 200
        assert method in reply.headers["access-control-allow-methods"].split(", ")
    assert preflight("PUT").status_code == 400


FORMS = (
    *("text/plain", "text/plain;charset=UTF-8", "Multipart/Form-Data; boundary=b"),
    "application/x-www-form-urlencoded",
)


async def test_a_forms_content_type_is_no_json() -> None:
    """Those a page may send to any server, without asking it first."""
    app = FastAPI(exception_handlers={SRMError: errors.srm_error})

    @app.post("/")
    async def route(request: Request) -> Response:
        return Response(await read_body(request, 10))

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=OWN) as client:
        for kind in FORMS:
            reply = await client.post("/", content=b"{}", headers={"content-type": kind})
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (415, "unsupported_media_type")
            assert error["param"] == "content-type"
            assert reply.headers["x-should-retry"] == "false"
        for headers in ({"content-type": "application/json; charset=utf-8"}, {}):
            assert (await client.post("/", content=b"{}", headers=headers)).status_code == 200
        assert (await client.post("/", content=b"x" * 11)).status_code == 413
