"""`python -m tests.tools.road ['{"logprobs": 2}']`: what a streamed completion runs through.

A request goes over a socket to the application, an engine's process in a thread answers, and each
function of ours that is called is noted: on the way in, until the device has its first result; in
the engine; and on the way back, from these results to the socket. What carries bytes between
processes is left out, and so are tests. Prints of each way how many files, how many functions, and
the deepest stack of these. Knows no name between the two ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import uvicorn
from uvicorn.server import ServerState

from srm.engine.process.engine import Engine
from srm.engine.steps.batch import Batch, Launched, StepResult
from srm.server.http.connection import Connection
from srm.server.routes.app import create_app
from srm.server.text.text import Text
from tests.kit.engines.numpy_runner import NumpyRunner, tiny_weights
from tests.kit.engines.served_engine import NUM_SLOTS, Served, connected
from tests.kit.serving import COMPLETIONS, TEXT_MODEL, write_text_model

try:
    from srm.engine.wiring import EngineWiring
    from srm.server.wiring import ServerWiring
except ImportError:  # in the tree of a commit that has connections among the settings
    from srm.engine.config import EngineConfig as EngineWiring  # type: ignore[assignment]
    from srm.server.config import ServerConfig as ServerWiring  # type: ignore[assignment]

ROOT = f"{Path.cwd()}/"
CARRIERS = ("server/http/connection.py", "engine/client/connection.py", "engine/process/")
ENGINE = "engine/process/engine.py"  # which carries nothing
_WORD = 263
"""A token that is whole characters."""
_WITHIN_S = 120


class Road:
    """Counts what is called, and has the engine wait until each token has been read."""

    def __init__(self) -> None:
        self.way: str | None = None
        self.called: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
        self.deepest: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._read = threading.Semaphore(0)

    def note(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or self.way is None or not (file := _ours(frame)):
            return
        is_api = threading.current_thread() is threading.main_thread()
        way = self.way if is_api else "engine"
        self.called[way].add((file, frame.f_code.co_qualname))
        depth, outer = 1, frame.f_back
        while outer is not None:
            depth, outer = depth + bool(_ours(outer)), outer.f_back
        self.deepest[way] = max(self.deepest[way], depth)

    async def read(self, reader: asyncio.StreamReader) -> bytes:
        """Read a whole reply."""
        reply = b""
        while data := await reader.read(1 << 20):
            reply += data
            for _ in range(data.count(b"data: {")):
                self._read.release()
        return reply

    def pace(self) -> None:
        """Hold the engine until all that came before this result is over: the way in, or the last
        result's way back."""
        if self.way == "in":
            asyncio.run_coroutine_threadsafe(_settle(), self._loop).result(_WITHIN_S)
            self.way = "back"
        else:
            assert self._read.acquire(timeout=_WITHIN_S), "a token was not sent"


async def _settle() -> None:
    """Let the event loop do all that it can without hearing of anything more."""
    for _ in range(50):
        await asyncio.sleep(0)


def _ours(frame: FrameType) -> str:
    """The file of a function of ours that is counted."""
    name = frame.f_code.co_filename
    file = name.removeprefix(ROOT).removeprefix("srm/")
    if file == name or file.startswith(("tests/", ".venv/")):
        return ""
    return "" if file.startswith(CARRIERS) and file != ENGINE else file


class PacedRunner(NumpyRunner):
    """Samples words, each once the one before has been read."""

    road: Road

    def launch(self, batch: Batch) -> Launched:  # type: ignore[override]
        return Paced(super().launch(batch), self.road)


class Paced:
    def __init__(self, launched: Launched, road: Road) -> None:
        self._launched, self._road = launched, road

    def wait(self) -> StepResult:
        result = self._launched.wait()
        if len(result.token_ids):
            self._road.pace()
        return replace(result, token_ids=np.full_like(result.token_ids, _WORD))


async def stream(fields: dict[str, Any]) -> Road:
    """Ask for a stream of completions, and note what that calls."""
    road = PacedRunner.road = Road()
    sys.setprofile(road.note)
    threading.setprofile(road.note)
    with tempfile.TemporaryDirectory() as folder:
        write_text_model(Path(folder) / "model")
        endpoint, socket = f"ipc://{folder}/engine", f"{folder}/api"
        settings = EngineWiring(num_slots=NUM_SLOTS, max_step_rows=8, endpoint=endpoint)
        weights = tiny_weights(0, TEXT_MODEL)
        runner = PacedRunner(weights, NUM_SLOTS)
        served = Served(Engine(weights.config, runner, settings, "f"), settings, 120)
        try:
            async with connected(endpoint, heartbeat_s=1_000) as client:
                config = ServerWiring(model=Path(folder) / "model", data_dir=folder)
                app = create_app(config, client, Text(config.model))
                http = uvicorn.Config(app, ws="none", log_config=None, access_log=False)
                protocol = partial(Connection, config, http, ServerState(), {})
                await asyncio.get_running_loop().create_unix_server(protocol, socket)
                reader, writer = await asyncio.open_unix_connection(socket)
                body = json.dumps({"prompt": "the cat", "stream": True, "max_tokens": 9} | fields)
                head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
                head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                road.way = "in"
                writer.write((head + body).encode())
                reply = await road.read(reader)
                await _settle()
                road.way = None
                writer.close()
                assert b"[DONE]" in reply, reply
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            served.process.drain()
            served.process.drain()
            served.join()
    return road


def main(argv: list[str]) -> int:
    road = asyncio.run(stream(json.loads(argv[0]) if argv else {}))
    ways = {
        way: [len({file for file, _ in called}), len(called), road.deepest[way]]
        for way, called in sorted(road.called.items())
    }
    files = len({file for called in road.called.values() for file, _ in called})
    print(json.dumps({"files": files, **ways}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
