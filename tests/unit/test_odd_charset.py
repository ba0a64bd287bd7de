"""A server that names an encoding that is none of text ends nothing that asks it."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from srm.errors import ConfigError, SRMError
from srm.loadtest.client import server_metrics, target
from srm.server.commands.admin_cli import snapshot
from srm.training.passk import server as passk
from tests.kit.serving import wait_until


def odd(status: int) -> httpx.Response:
    headers = {"content-type": "text/plain; charset=hex"}
    request = httpx.Request("GET", "http://a")
    return httpx.Response(status, headers=headers, content=b"why not", request=request)


@pytest.mark.parametrize("say", [target.describe, passk.describe])
def test_of_a_refusal(say: Callable[[httpx.Response], str]) -> None:
    assert "why not" in say(odd(500))


def test_of_a_completion() -> None:
    with pytest.raises(ConfigError, match="why not"):
        passk.decode(odd(200))


@pytest.mark.parametrize("status", [200, 500])
def test_of_a_reply_to_the_operator(
    status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(httpx, "post", lambda *_, **__: odd(status))
    if status == 200:
        assert snapshot([]) == 0 and capsys.readouterr().out == "why not\n"
    else:
        with pytest.raises(SRMError, match="refused with 500: why not"):
            snapshot([])


def test_of_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    client = httpx.Client(transport=httpx.MockTransport(lambda _: odd(200)))
    monkeypatch.setattr(httpx, "Client", lambda **_: client)
    with server_metrics.MetricsSampler("http://a") as sampling:
        wait_until(lambda: sampling.note)
