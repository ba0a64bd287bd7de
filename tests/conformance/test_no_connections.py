"""No process of a server calls anybody: with the MAX engine, from the start to an answered request.

The engine and the API process run behind the wall of `tests/tools/no_network.py`; the
supervisor, which asks the API process whether it is ready, is watched instead.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from srm.engine.config import DEMO_MODEL
from srm.engine.device.telemetry import SWITCHES
from tests.kit.serving import ROOT, wait_until
from tests.tools.no_network import cannot_wall

pytestmark = pytest.mark.skipif(bool(cannot_wall()), reason=cannot_wall() or "it can be done")

START_S = 900
"""The graph may have to be compiled first, and the machine be busy."""
KILLED = -signal.SIGSYS
CALLS = {
    "a socket": ("import socket; socket.socket()", KILLED),
    "a name": ("import socket; socket.getaddrinfo('host.example', 80)", KILLED),
    "a library": ("import ctypes; ctypes.CDLL(None).socket(10, 2, 0)", KILLED),
    "a child's": (
        "import subprocess, sys; "
        "sys.exit(subprocess.call([sys.executable, '-c', 'import socket; socket.socket()']))",
        KILLED % 256,
    ),
    "a pair": ("import socket; socket.socketpair()", 0),
}
"""What is called, and how the process ends that calls it."""


def behind_the_wall(*command: str) -> list[str]:
    return [sys.executable, "-m", "tests.tools.no_network", *command]


@contextmanager
def running(command: list[str], **how: object) -> Iterator[subprocess.Popen[bytes]]:
    environment = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **how)  # type: ignore[call-overload]  # of a dict
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("call", "code"), CALLS.values(), ids=CALLS)
def test_the_wall_holds_and_lets_pass_what_stays_here(tmp_path: Path, call: str, code: int) -> None:
    (tmp_path / "caller.py").write_text(f"{call}\nprint('through')\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        behind_the_wall("caller"), cwd=ROOT, env=environment, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (code, b"" if code else b"through\n")


def test_engine_and_api_call_nobody(tmp_path: Path) -> None:
    endpoint = f"--endpoint=ipc://{tmp_path}/engine"
    model = f"--model={DEMO_MODEL}"
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        running(behind_the_wall("srm.engine", model, endpoint, "--num-slots=64")) as engine,
        running(
            behind_the_wall(
                "srm.server", "api", model, endpoint, f"--listen-fd={listener.fileno()}"
            ),
            pass_fds=[listener.fileno()],
        ) as api,
        httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client,
    ):

        def is_ready() -> bool:
            assert engine.poll() is api.poll() is None, "one of the two wanted a socket"
            try:
                return client.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(is_ready, START_S)
        body = {"prompt": "Once upon a time", "n": 4, "max_tokens": 8, "logprobs": 1}
        assert client.post("/v1/completions", json=body, timeout=600).status_code == 200
        assert client.get("/metrics").status_code == 200
        time.sleep(3)  # what reports in the background has time to begin
        assert engine.poll() is api.poll() is None, "somebody was called after the request"
        for process in (api, engine):
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0


WATCHED_SUPERVISOR = """
import json, sys
hosts = set()
def hook(event, arguments):
    if event == "socket.connect":
        hosts.add(str(arguments[1][0]) if isinstance(arguments[1], tuple) else "unix")
    elif event == "socket.getaddrinfo":
        hosts.add(str(arguments[0]))
sys.addaudithook(hook)
from srm.server.supervise.launch import main
code = main(sys.argv[1:], engine_module="tests.kit.processes.numpy_engine")
print(json.dumps({"hosts": sorted(hosts)}))
sys.exit(code)
"""


def test_the_supervisor_calls_its_own_server_alone(text_model: Path) -> None:
    command = [sys.executable, "-c", WATCHED_SUPERVISOR, f"--model={text_model}", "--port=0"]
    flags = ["--num-slots=8", "--max-step-rows=8"]
    with running([*command, *flags], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline().startswith(b"Serving ")
        supervisor.send_signal(signal.SIGTERM)
        last = supervisor.stdout.read().splitlines()[-1]
        assert supervisor.wait(120) == 0
        supervisor.stdout.close()
    assert json.loads(last)["hosts"] == ["127.0.0.1"]
