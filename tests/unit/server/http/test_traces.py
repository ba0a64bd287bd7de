"""Spans, where the packages of the extra are; and what is said where they are not."""

from __future__ import annotations

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

from srm.errors import ConfigError
from srm.server.http.request_log import LogEntry
from srm.server.http.traces import Tracer

SCOPE = {
    "type": "http",
    "method": "POST",
    "headers": [(b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")],
}


def test_without_the_packages_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk open"):
        Tracer("http://127.0.0.1:4318/v1/traces", "m")


class Collector(BaseHTTPRequestHandler):
    """Takes spans; keeps the bodies that came."""

    bodies: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_request_is_a_span_with_what_is_known_of_it() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        tracer = Tracer(f"http://127.0.0.1:{server.server_port}/v1/traces", "tiny")
        entry = LogEntry("id-1", completion_id="cmpl-1", completion_tokens=8, first_token_s=0.25)
        tracer.record(SCOPE, "/v1/completions", 200, time.time_ns(), entry)
        tracer.record(SCOPE, "other", 503, time.time_ns(), LogEntry("id-2"))
        tracer.close()
        server.shutdown()
        serving.join()
    sent = b"".join(Collector.bodies)
    for part in (
        *(b"POST /v1/completions", b"srm.request_id", b"id-1", b"cmpl-1", b"srm.first_token_s"),
        *(b"tiny", b"id-2", bytes.fromhex("0af7651916cd43dd8448eb211c80319c")),
    ):
        assert part in sent
