"""Who may ask for what: the operator, programs, and pages of the server's own or named origins."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from hashlib import sha256
from itertools import product
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from srm.server.config import ServerConfig
from srm.server.http.auth import TOO_MANY_CONNECTIONS, Auth
from srm.server.http.cors import Cors, is_loopback
from srm.server.http.draining import Draining
from srm.server.http.keys import ApiKey, Keys
from srm.server.http.request_log import CURRENT
from srm.server.http.request_middleware import RequestMiddleware
from srm.server.routes.app import OPERATIONS
from srm.server.wiring import ServerWiring
from tests.kit.serving import COMPLETIONS, error_of

ADMIN, BOB = "operator-0123456789abcdef", "somebody-0123456789abcdef"
NO_KEYS = Keys([])
OWNERS = {"admin-1": ADMIN, "bob": BOB}
KEYS = Keys([ApiKey(name, sha256(key.encode()).digest()) for name, key in OWNERS.items()])
HERE, ELSEWHERE = "127.0.0.1", "10.0.0.5"
SITE = "sec-fetch-site"
OWN, STRANGER = "http://127.0.0.1:8000", "https://stranger.example"
EXTENSION = "chrome-extension://abcdefgh"


async def ask(
    method: str = "POST",
    path: str = COMPLETIONS,
    *,
    port: int = 8000,
    address: str = HERE,
    key: str = "",
    headers: Mapping[str, str] = MappingProxyType({}),
    keys: Keys = NO_KEYS,
    is_full: bool = False,
    **settings: Any,
) -> httpx.Response:
    """The reply of a server of these settings to `address`, behind which all is answered. One that
    `is_full` has too many connections, and holds as many bytes of bodies as it may."""
    config = ServerWiring(**{"admin_port": 9000, **settings})
    guard = Auth(_read, config, keys, lambda: 1, Draining())
    guard.intake.held_bytes = (config.max_waiting_bytes + 1) * is_full
    origins = config.cors_origins
    app = RequestMiddleware(Cors(guard, origins, OPERATIONS) if origins else guard)

    async def connected(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {TOO_MANY_CONNECTIONS: is_full}}, receive, send)

    transport = httpx.ASGITransport(connected, client=(address, 1234))
    bearer = {"authorization": f"Bearer {key}"} if key else {}
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(transport=transport, base_url=url) as client:
        body = b"{}" if is_full else b""
        return await client.request(method, path, headers={**headers, **bearer}, content=body)


async def _read(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await PlainTextResponse("passed")(scope, receive, send)


def refused(reply: httpx.Response) -> str:
    error = error_of(reply, 403)
    assert (error["code"], error["type"]) == ("not_permitted", "permission_error")
    return str(error["message"])


Asked = dict[str, Any]
TRAINERS = ("/pause", "/update_weights", "/abort_request", "/flush_cache")
FOR_TRAINERS: Asked = {"keys": KEYS, "trainer_routes": True, "weights_dir": "/w", "admin_port": 0}
ON_ADMIN: Asked = {"port": 9000}
BY_PAGE: Asked = {"port": 9000, "method": "GET", "path": "/flush_cache"}
BY_OPERATOR: dict[int, tuple[Asked, ...]] = {
    200: (
        *({"address": item, **ON_ADMIN} for item in (HERE, "127.3.2.1", "::1", "::ffff:127.0.0.1")),
        {"keys": KEYS, "key": ADMIN, "address": ELSEWHERE, "admin_port": 0},
        {"keys": KEYS, "key": ADMIN, **ON_ADMIN},
        *({**FOR_TRAINERS, "key": ADMIN, "path": path} for path in TRAINERS),
        *({**BY_PAGE, "headers": {SITE: site}} for site in ("same-origin", "none")),
    ),
    401: (
        {"keys": KEYS, "admin_port": 0},
        {"keys": KEYS, **ON_ADMIN},
        {**FOR_TRAINERS, "path": "/pause"},
    ),
    403: (
        {**FOR_TRAINERS, "key": BOB, "path": "/pause"},
        {"admin_port": 0},  # through a proxy on this machine, perhaps, that adds no header
        *({"address": item, **where} for where in ({"admin_port": 0}, ON_ADMIN)
          for item in (ELSEWHERE, "0.0.0.0", "::ffff:10.0.0.5", "fe80::1", "")),
        *({**ON_ADMIN, "headers": {name: "a"}}
          for name in ("origin", "forwarded", "x-forwarded-for")),
        # an <img> of any page, which has no origin
        *({**BY_PAGE, "headers": {SITE: site}} for site in ("cross-site", "same-site", "")),
        {"keys": KEYS, "key": BOB, "admin_port": 0},
    ),
    404: ({}, {"keys": KEYS, "key": ADMIN}, *({"path": path} for path in TRAINERS)),
}  # fmt: skip


@pytest.mark.parametrize("status", BY_OPERATOR)
async def test_only_the_operator_changes_the_server(status: int) -> None:
    for asked in BY_OPERATOR[status]:
        reply = await ask(**{"path": "/v1/admin/weights", **asked})
        assert reply.status_code == status, asked
        if status == 403:
            refused(reply)


async def test_a_trainer_is_told_of_the_setting_for_its_routes() -> None:
    reply = await ask(path="/pause", keys=KEYS, key=ADMIN, admin_port=0)
    assert "trainer_routes" in refused(reply)


@pytest.mark.parametrize("path", ["/resume", "/continue_generation", "/v1/admin/weights"])
async def test_a_full_server_hears_its_operator(path: str) -> None:
    """Requests wait while it is paused, and would keep out whoever ends the pause."""
    by_key: Asked = {"keys": KEYS, "port": 9000, "is_full": True}
    assert (await ask(path=path, port=9000, is_full=True)).status_code == 200
    assert (await ask(path=path, key=ADMIN, **by_key)).status_code == 200
    for key, status in ((BOB, 403), ("", 401)):
        assert (await ask(path=path, key=key, **by_key)).status_code == status
    assert (await ask(key=ADMIN, **by_key)).status_code == 503
    assert (await ask(port=9000, is_full=True)).status_code == 503


async def test_what_the_operator_asks_is_no_part_of_a_keys_limit() -> None:
    limits_fd = os.memfd_create("limits")
    limited: Asked = {"keys": KEYS, "requests_per_minute": 1, "limits_fd": limits_fd, "port": 9000}
    try:
        statuses = [(await ask(key=ADMIN, **limited)).status_code for _ in range(2)]
        assert statuses == [200, 429]
        assert (await ask(path="/resume", key=ADMIN, **limited)).status_code == 200
    finally:
        os.close(limits_fd)


async def test_a_key_may_be_sent_as_anthropics_clients_send_it() -> None:
    for key, status in ((BOB, 200), (BOB + "x", 401), ("", 401)):
        reply = await ask(keys=KEYS, headers={"x-api-key": key})
        assert reply.status_code == status
    assert (await ask(keys=KEYS, key=BOB + "x", headers={"x-api-key": BOB})).status_code == 401


@pytest.mark.parametrize("port", [8000, 9000])
async def test_a_web_page_of_another_origin_cannot_use_the_server(port: int) -> None:
    routes = {(operation.method, operation.path) for operation in OPERATIONS}
    routes -= {("GET", "/health"), ("GET", "/ready"), ("GET", "/ping"), ("POST", "/ping")}
    strangers = (STRANGER, "null", "http://localhost:3000", OWN + "0", "http://[")
    asked = [(*route, STRANGER) for route in routes]
    asked += [("POST", "/", stranger) for stranger in strangers]
    for method, path, origin in asked:
        reply = await ask(method, path, port=port, headers={"origin": origin})
        assert "cors_origins" in refused(reply), path
    for origin in ("null", "junk", "http://", ""):  # it is not that of an empty host
        refused(await ask(headers={"origin": origin, "host": ""}))


NAMES = ("", "localhost", "LOCALHOST:1", "127.3.2.1:8000", "[::1]:8000", ELSEWHERE,
         "a.localhost:8000", "host.docker.internal:8000")  # fmt: skip
HOST, EXAMPLE, ANY = "srm.example", "https://srm.example", {"host": "0.0.0.0"}
MAY_ASK: tuple[Asked, ...] = (
    {},
    {"headers": {"origin": OWN}},
    {"headers": {"origin": EXAMPLE, "host": HOST}, **ANY, "allowed_hosts": (HOST,)},
    {"headers": {"origin": STRANGER}, "path": "/health"},
    {"headers": {"origin": STRANGER}, "cors_origins": ("*",)},
    *({"headers": {"origin": own}, "cors_origins": (own,)} for own in (STRANGER, EXTENSION)),
    *({"headers": {"host": name}} for name in NAMES),
    *({"headers": {"host": HOST}, **own} for own in (
        {"cors_origins": (EXAMPLE,)},
        {**ANY, "allowed_hosts": ("other", "SRM.example")},
        {"allowed_hosts": ("*.example",)},
        {**ANY, "cors_origins": (EXAMPLE,)},
        {"keys": KEYS, "key": BOB},
        {"keys": KEYS, "key": BOB, **ANY},
    )),
)  # fmt: skip


@pytest.mark.parametrize("asked", MAY_ASK)
async def test_programs_the_servers_own_page_and_named_origins_go_on(asked: Asked) -> None:
    assert (await ask("GET", **{"path": "/v1/models", **asked})).status_code == 200


REBOUND = ("evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "[", "srm")


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/"])
async def test_a_name_that_was_given_our_address_is_not_ours(path: str) -> None:
    """DNS rebinding: the page's origin and `Host` are the same then."""
    listening = ((HERE, 8000), ("localhost", 8000), ("::1", 8000), ("0.0.0.0", 9000))
    for name, (host, port) in product(REBOUND, listening):
        headers = {"origin": f"http://{name}", "host": name}
        refused(await ask("GET", path, host=host, port=port, headers=headers))


EVERYWHERE: Asked = {"host": "0.0.0.0", "address": ELSEWHERE, "admin_port": 0}


@pytest.mark.parametrize("path", ["/v1/models", "/", "/docs"])
async def test_a_rebound_name_is_not_ours_on_any_address(path: str) -> None:
    """The name was looked at on loopback alone: the image listens on 0.0.0.0, without keys."""
    for name in (*REBOUND, "example", "srm.example.evil", "evilsrm.example", "a.b"):
        headers = {"origin": f"http://{name}", "host": name}
        for named in ((), ("srm.example", "*.b.example")):
            reply = await ask("GET", path, headers=headers, allowed_hosts=named, **EVERYWHERE)
            assert "allowed_hosts" in refused(reply), name
    for name in (ELSEWHERE, "[fe80::1]:8000", "localhost:8000", "srm.example.:80", "a.B.example"):
        allowed = {"allowed_hosts": ("srm.example", "*.b.example"), **EVERYWHERE}
        assert (await ask("GET", path, headers={"host": name}, **allowed)).status_code == 200, name


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/metrics"])
async def test_probes_and_prometheus_come_by_any_name(path: str) -> None:
    for name in REBOUND:
        assert (await ask("GET", path, headers={"host": name}, **EVERYWHERE)).status_code == 200
        on_admin_port = {**EVERYWHERE, "admin_port": 9000, "admin_host": "0.0.0.0", "port": 9000}
        assert (await ask("GET", path, headers={"host": name}, **on_admin_port)).status_code == 200


@pytest.mark.parametrize("name", ["*", "*.", "", "a:80", "http://a", "a/b", "a b", "*.*.a", "a..b"])
def test_a_name_of_the_server_is_a_name(name: str) -> None:
    with pytest.raises(ValueError, match="allowed_hosts must be names"):
        ServerConfig(allowed_hosts=(name,))


async def test_a_name_is_local_if_all_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"MyBox": ["127.0.1.1", "::1"], "both": [HERE, ELSEWHERE], "LOCALHOST": [HERE]}

    def look_up(name: str, _port: None) -> list[tuple[object, ...]]:
        if name not in addresses:
            raise socket.gaierror
        return [(0, 0, 0, "", (address, 0)) for address in addresses[name]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert all(map(is_loopback, ["MyBox", "LOCALHOST", "127.9.9.9", "::ffff:127.0.0.1"]))
    assert not any(map(is_loopback, ["both", "nowhere", "", "0.0.0.0"]))
    assert (await ask(host="MyBox", headers={"host": "mybox"})).status_code == 200
    refused(await ask(host="MyBox", headers={"host": "evil.example"}))


async def test_named_origins_may_use_every_method_of_a_route() -> None:
    named: Asked = {"cors_origins": ("https://page.example", STRANGER)}
    refused(await ask(**named, headers={"origin": "https://other.example"}))
    asks = {"access-control-request-headers": "authorization,content-type"}
    for method, status in (("GET", 200), ("POST", 200), ("DELETE", 200), ("PATCH", 400)):
        headers = {"origin": STRANGER, "access-control-request-method": method, **asks}
        reply = await ask("OPTIONS", "/v1/files/a", **named, headers=headers)
        assert reply.status_code == status and reply.headers["x-request-id"]
        allowed = reply.headers["access-control-allow-methods"].split(", ") if status == 200 else []
        assert (method in allowed) == (status == 200)
    for origin, shown in ((STRANGER, STRANGER), ("https://other.example", None)):
        headers = {"origin": origin, "access-control-request-method": "POST", **asks}
        reply = await ask("OPTIONS", **named, headers=headers)
        assert reply.status_code == (200 if shown else 400)
        assert reply.headers.get("access-control-allow-origin") == shown
    reply = await ask("GET", "/v1/models", keys=KEYS, **named, headers={"origin": STRANGER})
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (401, STRANGER)
    assert "access-control-allow-origin" not in (await ask(keys=KEYS, **named)).headers


async def test_a_body_is_held_as_long_as_what_goes_on() -> None:
    draining, over = Draining(), asyncio.Event()

    async def go_on() -> None:
        await over.wait()

    async def begin(scope: Scope, receive: Receive, send: Send) -> None:
        await _read(scope, receive, send)
        CURRENT.get().goes_on = asyncio.create_task(go_on())

    guard = Auth(begin, ServerWiring(), NO_KEYS, lambda: 1, draining)
    transport = httpx.ASGITransport(RequestMiddleware(guard), client=(HERE, 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        for _ in range(2):
            assert (await client.post(COMPLETIONS, content=b"{}")).text == "passed"
    assert (guard.intake.held_bytes, len(draining.tasks)) == (4, 2)
    over.set()
    await asyncio.gather(*draining.tasks)
    await asyncio.sleep(0)  # what is called when they are done
    assert (guard.intake.held_bytes, len(draining.tasks)) == (0, 0)
