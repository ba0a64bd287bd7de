"""The router finds replicas as the manifests tell it to: from an API server, here one of ours.

Needs the router's package: ROUTER_PYTHON is a Python that has it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.deploy.routers import Router
from tests.kit.serving import SERVER_FLAGS, Server, free_port, wait_until, write_text_model

PODS = "/api/v1/namespaces/srm/pods"
CONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "only",
    "contexts": [{"name": "only", "context": {"cluster": "one", "user": "one"}}],
    "users": [{"name": "one", "user": {"token": "none"}}],
}


def pod(name: str, ip: str, is_ready: bool = True, **metadata: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": name.partition("-")[0]}
    named = {"name": name, "namespace": "srm", "labels": labels, "resourceVersion": "2"}
    condition = {"type": "Ready", "status": str(is_ready)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**named, **metadata},
        "spec": {"containers": []},
        "status": {"phase": "Running", "podIP": ip, "conditions": [condition]},
    }


class ApiServer(ThreadingHTTPServer):
    """Lists pods, and tells those who watch of each that is changed."""

    daemon_threads = True

    def __init__(self, *pods: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pods = pods
        self.changes: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.paths: set[str] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def do_GET(self) -> None:
        self.server.paths.add(self.path.partition("?")[0])
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()  # and the reply ends with the connection
        if "watch=true" not in self.path:
            entries = {"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "1"}}
            self.wfile.write(json.dumps({**entries, "items": self.server.pods}).encode())
            return
        while True:
            change = {"type": "MODIFIED", "object": self.server.changes.get()}
            self.wfile.write(json.dumps(change).encode() + b"\n")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def addresses(tmp_path: Path) -> Iterator[dict[str, str]]:
    """URLs of two servers by their addresses, which have the same port as pods have."""
    write_text_model(tmp_path / "model")
    port = free_port()
    flags = (*SERVER_FLAGS, f"--port={port}")
    one, other = (f"127.0.0.{last}" for last in (2, 3))
    with (
        Server(tmp_path / "model", *flags, f"--host={one}") as first,
        Server(tmp_path / "model", *flags, f"--host={other}") as second,
    ):
        yield {one: first.url, other: second.url}


@pytest.mark.slow
def test_the_router_has_the_replicas_that_are_ready_and_do_not_go(
    addresses: dict[str, str], tmp_path: Path
) -> None:
    python = os.environ.get("ROUTER_PYTHON")
    if python is None:
        pytest.skip("ROUTER_PYTHON is not set: a Python that has vllm-router")
    one, other = addresses
    api = ApiServer(pod("srm-0", one), pod("srm-1", other, is_ready=False), pod("else-0", other))
    cluster = {"name": "one", "cluster": {"server": f"http://127.0.0.1:{api.server_port}"}}
    (tmp_path / "config").write_text(json.dumps({**CONFIG, "clusters": [cluster]}))
    flags = ("--service-discovery", "--selector", "app.kubernetes.io/name=srm")
    port = addresses[one].rpartition(":")[2]
    where = ("--service-discovery-namespace=srm", f"--service-discovery-port={port}")
    with Router(
        "vllm", Path(python), [], *flags, *where, KUBECONFIG=str(tmp_path / "config")
    ) as router:

        def has(*urls: str) -> bool:
            workers: list[str] = router.http.get("/list_workers").json()["urls"]
            return sorted(workers) == sorted(urls)

        assert has(addresses[one]) and api.paths == {PODS}
        api.changes.put(pod("srm-1", other))
        wait_until(lambda: has(*addresses.values()))
        api.changes.put(pod("srm-0", one, deletionTimestamp="2026-01-01T00:00:00Z"))
        wait_until(lambda: has(addresses[other]))
        body = {"prompt": "the cat", "max_tokens": 2}
        assert router.http.post("/v1/completions", json=body).status_code == 200
    api.shutdown()
    api.server_close()
