"""The target of requests: the server's address, route, model and headers, resolved once.

Asks the server little, before the run, so that a wrong setting is an error and not a run of failed
requests.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
import msgspec

from srm.errors import UNDECODABLE, ConfigError
from srm.loadtest.scenario import Scenario

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_WITHIN_S = 30.0
"""Time-out of each query to the server."""
_SHOWN = 300
"""Characters of a refusal that an error quotes."""


class Target(msgspec.Struct, frozen=True):
    """All that a client needs to send a body. It can be sent to another process."""

    address: str
    """The IP address, so that names are looked up once and not by each connection."""
    port: int
    server_name: str
    """The host name to verify the certificate against; empty without TLS."""
    head: bytes
    """Request line and headers, up to the value of content-length."""
    model: str
    server_version: str
    """Version given by /version or the `server` header; empty: neither gives one."""

    def context(self) -> ssl.SSLContext | None:
        """Return a TLS context; None without TLS. SSL_CERT_FILE names further authorities."""
        return ssl.create_default_context() if self.server_name else None


async def resolve(scenario: Scenario) -> Target:
    """Look up the host, and ask the server for its model, its version and its route.

    Raises ConfigError if the url is invalid, if nothing listens there, or if the server refuses.
    """
    parts = urlsplit(scenario.url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ConfigError(f"url = {scenario.url!r}: {error}") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"url must be http://HOST:PORT or https://HOST:PORT: {scenario.url!r}")
    if parts.query or parts.fragment or parts.username:
        raise ConfigError(f"url may have neither user, query nor fragment: {scenario.url!r}")
    address = await _address(scenario.url, parts.hostname, port)
    base = base_url(scenario)
    key = api_key(scenario)
    headers = {"user-agent": "srm-loadtest"} | ({"authorization": f"Bearer {key}"} if key else {})
    async with httpx.AsyncClient(
        base_url=base,
        headers=headers,
        timeout=_WITHIN_S,
        trust_env=False,  # the run itself goes through no proxy
        verify=ssl.create_default_context(),
    ) as http:
        try:
            model = scenario.served_model_name or await _first_model(http)
            version = await _version(http)
            await _check_route(http, scenario, model)
        except httpx.TimeoutException:
            raise ConfigError(f"no answer from {base} within {_WITHIN_S:.0f} s") from None
        except httpx.HTTPError as error:
            raise ConfigError(f"no HTTP server answers at {base}: {error}") from None
    lines = [
        f"POST {urlsplit(base).path}{PATHS[scenario.api]} HTTP/1.1",
        f"host: {parts.netloc}",
        "content-type: application/json",
        f"accept: {'text/event-stream' if scenario.stream else 'application/json'}",
        *(f"{name}: {value}" for name, value in headers.items()),
        "content-length: ",
    ]
    return Target(
        address=address,
        port=port,
        server_name=parts.hostname if parts.scheme == "https" else "",
        head="\r\n".join(lines).encode(),
        model=model,
        server_version=version,
    )


async def _address(url: str, host: str, port: int) -> str:
    """Return the first address that accepts a connection: `localhost` may be either family."""
    loop = asyncio.get_running_loop()
    try:
        addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"url = {url!r}: cannot look up {host}: {error}") from None
    failure: OSError | None = None
    for *_, place in addresses:
        address = str(place[0])
        try:
            _, writer = await asyncio.wait_for(
                asyncio.open_connection(address, port), timeout=_WITHIN_S
            )
        except OSError as error:  # TimeoutError is one
            failure = error
            continue
        writer.close()
        await writer.wait_closed()
        return address
    raise ConfigError(f"nothing listens at {url}: {failure or 'it takes no connection'}")


def base_url(scenario: Scenario) -> str:
    """Return the prefix of all paths; `url` may end with /v1, as SDKs want theirs."""
    return scenario.url.rstrip("/").removesuffix("/v1")


def api_key(scenario: Scenario) -> str:
    """Return the key; empty: none is sent. Raises ConfigError if it cannot be a header."""
    key = os.environ.get(scenario.api_key_env, "") if scenario.api_key_env else ""
    if not key.isprintable() or not key.isascii():
        raise ConfigError(f"environment: {scenario.api_key_env} is no key: not printable ASCII")
    return key


async def _first_model(http: httpx.AsyncClient) -> str:
    reply = await http.get("/v1/models")
    _check_key(reply)
    if reply.is_success:
        with suppress(*UNDECODABLE, LookupError, TypeError):
            return str(reply.json()["data"][0]["id"])
    raise ConfigError(
        f"GET {reply.url} names no model ({describe(reply)}): give the name as served_model_name"
    )


async def _version(http: httpx.AsyncClient) -> str:
    """Return the version if the server says; vLLM, SGLang and ours have the route."""
    reply = await http.get("/version")
    try:
        return str(reply.json()["version"])
    except (*UNDECODABLE, LookupError, TypeError):
        return str(reply.headers.get("server", ""))


async def _check_route(http: httpx.AsyncClient, scenario: Scenario, model: str) -> None:
    """Check the route by a request without a prompt: the server refuses it, or does little."""
    path = PATHS[scenario.api]
    reply = await http.post(path, json={"model": model, "max_tokens": 1})
    _check_key(reply)
    if reply.status_code in {404, 405}:
        raise ConfigError(
            f"POST {reply.url} for model {model!r}: {describe(reply)}; "
            "the server must have the route of `api` and the model of `served_model_name`"
        )


def _check_key(reply: httpx.Response) -> None:
    if reply.status_code in {401, 403}:
        raise ConfigError(
            f"{reply.url}: {describe(reply)}; the key is read from the variable `api_key_env` names"
        )


def describe(reply: httpx.Response) -> str:
    decoded = reply.content[:_SHOWN].decode(errors="replace")  # whatever encoding it names
    return f"{reply.status_code}: {decoded.strip()}"
