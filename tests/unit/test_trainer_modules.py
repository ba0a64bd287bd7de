"""The modules for trainers' environments import what their page says, and nothing else."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tests.kit.serving import ROOT, run_python

ENVIRONMENT = """
import json, sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

class StandIn(ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        is_class = name[:1].isupper()
        return type(name, (), {"register": MagicMock()}) if is_class else MagicMock()

class Environment(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.argv[1:]:
            return ModuleSpec(name, self, is_package=True)
        if top not in ("srm", *sys.stdlib_module_names):
            raise ModuleNotFoundError(f"{top} is not one of {sys.argv[1:]}")
    def create_module(self, spec):
        return StandIn(spec.name)
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Environment())
"""
"""Where a program has Python's own modules, `srm`, and stand-ins for the packages it is given."""


def run(program: str, packages: list[str]) -> Any:
    """What a program prints as JSON, in an environment of these packages alone."""
    done = run_python(ENVIRONMENT + program, *packages)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def packages() -> dict[str, list[str]]:
    """Those that the page names for each module: a trainer's environment has them."""
    page = (ROOT / "docs" / "clients.md").read_text()
    (line,) = re.findall(r"^- \*\*Environment\*\*: [^\n]*srm.trl.*?\n(?=\n|- )", page, re.M | re.S)
    names = re.findall(r"`([a-z.]+)`", line)
    of_trl, of_verl = names.index("srm.trl"), names.index("srm.verl")
    first, more = names[of_trl + 1 : of_verl], names[of_verl + 1 :]
    return {"srm.trl": first, "srm.verl": [*first, *more]}


@pytest.mark.parametrize("module", ["srm.trl", "srm.verl"])
def test_imports_what_the_trainer_has_alone(module: str) -> None:
    program = f"import {module}; print(json.dumps([*sys.modules]))"
    imported = {name for name in run(program, packages()[module]) if name.startswith("srm.")}
    assert {module} <= imported <= {"srm.trl", "srm.verl"}


REPLIES = [(503, {"error": "later"}), (429, {"error": "later"}), (200, {"is": "é"})]
REFUSED = [(400, {"error": "no such folder"})]
ASKING = """
import time, srm.trl
waits = []
time.sleep = waits.append
server = srm.trl.RolloutServer({!r}, ".", None, key="secret")
try:
    print(json.dumps([server._ask("/update_weights", dict(weight_dir="x")), waits]))
except RuntimeError as error:
    print(json.dumps([str(error), waits]))
"""


@contextmanager
def answering(replies: list[tuple[int, dict[str, str]]]) -> Iterator[tuple[str, list[Any]]]:
    """A server that gives these replies in turn, and what it was asked."""
    left, asked = list(replies), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.path, self.headers["authorization"], body))
            status, reply = left.pop(0)
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", asked
        finally:
            server.shutdown()
            thread.join()


def test_asks_again_what_is_refused_for_now() -> None:
    for replies, shown, waits in (
        (REPLIES, {"is": "é"}, [1, 2]),
        (REFUSED, "400 {", []),
        ([(503, {"error": "full"})] * 6, "503 {", [1, 2, 4, 8, 16, 0]),
    ):
        with answering(replies) as (url, asked):
            result, waited = run(ASKING.format(url), packages()["srm.trl"])
        assert waited == waits
        assert result == shown or (isinstance(shown, str) and shown in result)
        assert asked == [("/update_weights", "Bearer secret", {"weight_dir": "x"})] * len(replies)
