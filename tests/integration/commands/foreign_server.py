"""A server that knows nothing of us, and runs of `srm evaluate passk` against one."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import srm.__main__ as srm


class Foreign:
    """An OpenAI-style server of its own kind: the completion is a number below ten, and the same
    for the same prompt and seed + index. `faults` are met first, one by each request."""

    def __init__(self) -> None:
        self.faults: list[Any] = []
        """A status with a message; `cut`, the end of the connection; `hold`, none before
        `released`; or members of the reply."""
        self.bodies: list[dict[str, Any]] = []
        """Of the requests that were answered well."""
        self.held, self.released = threading.Event(), threading.Event()
        self.owner = "somebody"
        self.retry_after_s = 0
        self.list_status = 200
        self.lock = threading.Lock()

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for index in range(body["n"]):
            seed = body["seed"] + index  # as vLLM has it
            drawn = hashlib.sha256(f"{body['prompt']} {seed}".encode()).digest()
            choices.append({"index": index, "text": f"#### {drawn[0] % 10}", "logprobs": None})
        usage = {"prompt_tokens": 5, "completion_tokens": 3 * body["n"], "total_tokens": 0}
        return {"choices": choices[::-1], "usage": usage, "object": "text_completion"}


@contextmanager
def listening(foreign: Foreign) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            listed = {"data": [{"id": "other", "owned_by": foreign.owner}]}
            self.answer(foreign.list_status, listed)

        def do_POST(self) -> None:
            assert self.path == "/v1/completions"
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with foreign.lock:
                fault = foreign.faults.pop(0) if foreign.faults else {}
                if fault == "hold":
                    foreign.held.set()
                    foreign.released.wait(120)
                if fault == "packed":
                    self.answer(200, {}, encoding="gzip")
                elif fault in ("cut", "hold"):
                    self.close_connection = True
                elif isinstance(fault, tuple):
                    self.answer(fault[0], {"error": {"message": fault[1]}})
                else:
                    foreign.bodies.append(body)
                    self.answer(200, foreign.completion(body) | fault)

        def answer(self, status: int, content: dict[str, Any], encoding: str = "identity") -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-encoding", encoding)
            self.send_header("content-length", str(len(data)))
            self.send_header("retry-after", str(foreign.retry_after_s))
            self.end_headers()
            self.wfile.write(data)

    class Listener(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """A client that leaves is no fault."""

    with Listener(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def arguments(url: str, folder: Path, **settings: Any) -> list[str]:
    flags = {
        "url": url,
        "output": folder / "out",
        "input": folder / "questions.jsonl",
        "problems": 0,
        "samples": 20,
        "concurrency": 3,
        **settings,
    }
    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    return ["evaluate", "passk", *given]


def run(url: str, folder: Path, **settings: Any) -> int:
    return srm.main(arguments(url, folder, **settings))


def result(output: Path) -> dict[str, Any]:
    (path,) = output.glob("*-passk*.json")
    document: dict[str, Any] = json.loads(path.read_bytes())
    assert path.with_suffix(".svg").name in path.with_suffix(".md").read_text()
    return document


def counts(folder: Path) -> list[tuple[int, int]]:
    return [(problem["drawn"], problem["right"]) for problem in result(folder / "out")["problems"]]


def expected(foreign: Foreign, body: dict[str, Any], digit: int) -> int:
    choices = foreign.completion(body)["choices"]
    return sum(choice["text"] == f"#### {digit}" for choice in choices)
