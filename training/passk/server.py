"""CompletionsServer: calls POST /v1/completions of any OpenAI-style server, with retries."""

from __future__ import annotations

import asyncio
import math
import os
import random
from types import TracebackType
from typing import Any

import httpx
import msgspec

from srm.errors import UNDECODABLE, ConfigError, SRMError

_LONGEST_PAUSE_S = 30.0
MOST_PORT = 2**16 - 1
_SHOWN = 300
"""Number of characters of a server's error reply that an error message quotes."""


class _Choice(msgspec.Struct):
    index: int
    text: str


class _Counted(msgspec.Struct):
    text: str
    count: int
    matched: int = 0


class SampleCounts(msgspec.Struct):
    """The part of an SRM server's reply that counts the samples of the prompt."""

    drawn: int
    counts: list[_Counted]
    reached: bool = False


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class CountedReply(msgspec.Struct):
    """The fields of a completion that are used."""

    choices: list[_Choice]
    usage: _Usage
    samples: list[SampleCounts] = []
    system_fingerprint: str | None = None
    first_weights_version: int | None = None
    """Version of the weights that made its first token, if they were changed during the reply."""


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[_Model]


class CompletionsServer:
    """A connection to a server; `async with` opens it, asks which model it serves, and closes
    it."""

    def __init__(self, url: str, model: str, api_key_env: str, timeout_s: float) -> None:
        """An empty `model` becomes the first of /v1/models.

        Raises ConfigError for an API key that cannot be sent, and for an invalid url.
        """
        key = os.environ.get(api_key_env, "") if api_key_env else ""
        if not key.isprintable() or not key.isascii():
            raise ConfigError(f"environment: {api_key_env} is no key: not printable ASCII")
        try:
            self._http = httpx.AsyncClient(
                base_url=url.rstrip("/").removesuffix("/v1"),
                headers={"authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(None, connect=30),
                limits=httpx.Limits(max_connections=None),
            )
        except httpx.InvalidURL as error:
            raise ConfigError(f"url = {url!r}: {error}") from None
        if (port := self._http.base_url.port) and port > MOST_PORT:
            raise ConfigError(f"url = {url!r}: the port must be at most {MOST_PORT}, got {port}")
        self._url = url
        self._timeout_s = timeout_s
        self.model = model
        self.is_srm = False
        """Whether it is an SRM server, which can count equal samples and stop drawing by itself."""

    async def __aenter__(self) -> CompletionsServer:
        try:
            await self._look()
        except BaseException:
            await self._http.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def _look(self) -> None:
        try:
            reply = await self._http.get("/v1/models", timeout=30)
        except httpx.HTTPError as error:
            raise ConfigError(f"url: {self._url} does not answer: {_describe(error)}") from None
        if reply.status_code in {401, 403}:
            raise ConfigError(f"{describe(reply)}; api_key_env names the variable with the key")
        has_no_list = self.model and reply.status_code in {404, 405, 501}
        if not reply.is_success and not has_no_list:
            raise ConfigError(f"url: {describe(reply)}")
        try:
            models = msgspec.json.decode(reply.content, type=_Models).data
        except UNDECODABLE:
            models = []
        if not self.model and not models:
            raise ConfigError(f"GET {reply.url} names no model: give it as served_model_name")
        self.model = self.model or models[0].id
        self.is_srm = any(model.id == self.model and model.owned_by == "srm" for model in models)

    async def complete(self, body: dict[str, Any]) -> CountedReply:
        """Return the reply to a request for completions of `model`.

        Where the server is gone, overloaded or fails, it is asked again, with pauses. Raises
        ConfigError for what it refuses and for a reply that is none, SRMError when time is up.
        """
        last, longest = "", 0.5
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                while True:
                    pause = longest * random.uniform(0.5, 1)
                    longest = min(2 * longest, _LONGEST_PAUSE_S)
                    try:
                        reply = await self._http.post(
                            "/v1/completions", json={"model": self.model, **body}
                        )
                    except httpx.TransportError as error:
                        last = f"{self._url}: {_describe(error)}"
                    except httpx.DecodingError as error:
                        raise ConfigError(
                            f"{self._url} answered with what cannot be unpacked: {_describe(error)}"
                        ) from None
                    else:
                        if reply.is_success:
                            return decode(reply)
                        last = describe(reply)
                        if not _may_succeed_later(reply):
                            raise ConfigError(last)
                        pause = _retry_after_s(reply, pause)
                    if asyncio.get_running_loop().time() + pause > (limit.when() or math.inf):
                        raise TimeoutError
                    await asyncio.sleep(pause)
        except TimeoutError:
            why = f"; the last try: {last}" if last else ""
            raise SRMError(
                f"a request was not answered within timeout_s = {self._timeout_s:g}{why}"
            ) from None


def decode(reply: httpx.Response) -> CountedReply:
    try:
        return msgspec.json.decode(reply.content, type=CountedReply)
    except UNDECODABLE as error:
        raise ConfigError(
            f"{reply.url} answered with what is no completion: {error}: {_show_reply(reply)!r}"
        ) from None


def _may_succeed_later(reply: httpx.Response) -> bool:
    """Whether to retry, by the rules of OpenAI's clients."""
    if reply.headers.get("x-should-retry") == "false":
        return False
    return reply.status_code in {408, 409, 429} or reply.status_code >= 500


def _retry_after_s(reply: httpx.Response, otherwise: float) -> float:
    try:
        reported = float(reply.headers["retry-after"])
    except (KeyError, ValueError):  # absent, or a date
        return otherwise
    return reported if 0 <= reported < math.inf else otherwise


def describe(reply: httpx.Response) -> str:
    try:
        why = reply.json()["error"]["message"]
    except (*UNDECODABLE, LookupError, TypeError):
        why = _show_reply(reply)
    return f"{reply.url} refused with {reply.status_code}: {why}"


def _show_reply(reply: httpx.Response) -> str:
    """Return the beginning of a reply as text, whatever encoding it names."""
    return reply.content[:_SHOWN].decode(errors="replace").strip()


def _describe(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
