"""Spans, where the packages of the extra are; and what is said where they are not."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from engine.errors import ConfigError
from server.http.request_log import Entry
from server.http.traces import Tracer

SCOPE = {
    "type": "http",
    "method": "POST",
    "headers": [(b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")],
}


def test_without_the_packages_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk open"):
        Tracer("http://127.0.0.1:4318/v1/traces", "m")


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An address that takes spans, and the bodies that came."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
        server.shutdown()
        serving.join()


def test_a_request_is_a_span_with_what_is_known_of_it(
    collector: tuple[str, list[bytes]],
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    endpoint, bodies = collector
    tracer = Tracer(endpoint, "tiny")
    entry = Entry("id-1", completion_id="cmpl-1", completion_tokens=8, first_token_s=0.25)
    tracer.record(SCOPE, "/v1/completions", 200, time.time_ns(), entry)
    tracer.record(SCOPE, "other", 503, time.time_ns(), Entry("id-2"))
    tracer.close()
    sent = b"".join(bodies)
    for part in (
        *(b"POST /v1/completions", b"srm.request_id", b"id-1", b"cmpl-1", b"srm.first_token_s"),
        *(b"tiny", b"id-2", bytes.fromhex("0af7651916cd43dd8448eb211c80319c")),
    ):
        assert part in sent
