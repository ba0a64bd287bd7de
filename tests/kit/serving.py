"""`srm serve` as a process of its own, with the numpy or the real engine: for tests over HTTP."""

from __future__ import annotations

import atexit
import base64
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from srm.engine.config import ModelConfig
from srm.server.loop_turns import LOOP_TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]
TEXT_MODEL = ModelConfig(d_model=16, num_layers=2, num_heads=2, n_ctx=128, vocab_size=320)
NUM_SLOTS = 64
MAX_WAITING = 3_000
MAX_BODY_BYTES = 1_000_000
SERVER_FLAGS = (
    f"--num-slots={NUM_SLOTS}",
    f"--max-step-rows={NUM_SLOTS}",
    f"--max-waiting={MAX_WAITING}",
    f"--max-body-bytes={MAX_BODY_BYTES}",
    "--stall-s=1000",  # a busy machine is no stall
)
_START_S = 120
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
EOS_PROMPT = [154] * 4
"""After it the end of text is the likeliest token of the numpy engine's model."""

CHAT_TEMPLATE = """{{ '<|begin_of_text|>' }}{% for message in messages %}
{{ message.role }}: {{ message.content }}{{ '<|end_of_text|>' if message.role == 'assistant' }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


def write_text_model(folder: Path, model: ModelConfig = TEXT_MODEL) -> None:
    """A checkpoint without weights: configuration, a byte-level BPE tokenizer, a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,  # fewer than the model has: the rest are ids without text
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat with the other cat"] * 9, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_bytes(msgspec.json.encode(model))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def run_python(program: str, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a program from the repository's root, as `subprocess.run` does; its end is not judged."""
    settings: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "timeout": 600, **how}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, check=False, text=True, **settings)


def tries() -> Iterator[None]:
    """For what may have ended before it is met, or is still to come: again, for a while."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        yield
    raise AssertionError("what was waited for never came")


def wait_until(condition: Callable[[], object], within_s: float = 120) -> None:
    """Ask, again and again; raises AssertionError if it never becomes true."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for never came"
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def serve_command(
    model: Path, engine_module: str, *flags: str, loop_timeout_s: float = LOOP_TIMEOUT_S
) -> list[str]:
    """`srm serve` with an engine of the tests' choice."""
    program = (
        "import sys; from srm.server.supervise import launch; "
        f"launch.LOOP_TIMEOUT_S = {loop_timeout_s}; "
        f"sys.exit(launch.main(sys.argv[1:], engine_module={engine_module!r}))"
    )
    return [sys.executable, "-c", program, f"--model={model}", *flags]


class Server:
    """A running `srm serve`. Leaves with SIGTERM, and must then have exit code 0."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        engine_module: str = "tests.kit.processes.numpy_engine",
        start_s: float = _START_S,
        loop_timeout_s: float = LOOP_TIMEOUT_S,
    ) -> None:
        """Waits until it is ready, for `start_s` seconds at most.

        Its files are in a folder of their own, which goes with it, unless a flag says where.
        """
        self.folder = folder
        self.lines: list[str] = []
        self._data = tempfile.TemporaryDirectory(prefix="srm-data-")
        self.process = subprocess.Popen(
            serve_command(
                folder,
                engine_module,
                "--port=0",
                f"--data-dir={self._data.name}",
                *flags,
                loop_timeout_s=loop_timeout_s,
            ),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        atexit.register(self.process.kill)  # a test that failed may have left it
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(start_s) or not self._url():
            self.process.kill()
            raise AssertionError("srm serve did not start:\n" + "".join(self.lines))
        self.url = self._url()
        self.http = httpx.Client(base_url=self.url, timeout=600)  # of a busy machine
        port = next((flag.split("=")[1] for flag in flags if flag.startswith("--admin-port=")), "")
        self.admin_url = f"http://127.0.0.1:{port}" if port else self.url
        self.admin = httpx.Client(base_url=self.admin_url, timeout=120) if port else self.http

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("Serving "):
                self._ready.set()
        self._ready.set()

    def _url(self) -> str:
        match = re.search(r"^Serving \S+ on (\S+)$", "".join(self.lines), re.MULTILINE)
        return match[1] if match else ""

    def metric(self, name: str, label: str = "") -> float:
        """The sum of the samples of a metric, of those that have a label with this value."""
        samples = re.findall(
            rf"^{name}(\{{.*\}})? (\S+)$", self.admin.get("/metrics").text, re.MULTILINE
        )
        return sum(float(value) for labels, value in samples if not label or f'"{label}"' in labels)

    def wait_until_idle(self, within_s: float = 120) -> None:
        """Until /metrics has every slot free and nothing that runs or waits."""
        deadline = time.monotonic() + within_s
        while self._held() != (0, 0, 0):
            assert time.monotonic() < deadline, f"held, running, waiting: {self._held()}"
            time.sleep(0.02)

    def _held(self) -> tuple[float, float, float]:
        """Slots that are not free, sequences that run, and that wait."""
        held = self.metric("srm_engine_num_slots") - self.metric("srm_engine_free_slots")
        running, waiting = (
            self.metric(f"srm_engine_{name}_sequences") for name in ("running", "waiting")
        )
        return held, running, waiting

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def post(self, **fields: Any) -> httpx.Response:
        """A completion request; the prompt is "the cat" if none is given."""
        return self.http.post(COMPLETIONS, json={"prompt": "the cat", **fields})

    def stop(self, timeout_s: float = 120) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 120) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        self.http.close()
        self.admin.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._data.cleanup()
        atexit.unregister(self.process.kill)
        return code

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            assert self.stop() == 0, "".join(self.lines)


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    """The reply to a completion request, which must be answered."""
    reply = server.post(**fields)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def answer_lines(
    server: Server, path: str, bodies: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The bodies of replies and of errors to a batch of these bodies for this route."""
    lines = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": path, "body": body})
        for i, body in enumerate(bodies)
    ]
    files = {"file": ("in.jsonl", "\n".join(lines)), "purpose": (None, "batch")}
    file = server.http.post("/v1/files", files=files).json()["id"]
    asked = {"input_file_id": file, "endpoint": path, "completion_window": "24h"}
    batch = f"/v1/batches/{server.http.post('/v1/batches', json=asked).json()['id']}"
    wait_until(lambda: server.get(batch).json()["status"] == "completed")
    ended = server.get(batch).json()
    output, errors = (
        [
            json.loads(line)["response"]["body"]
            for line in server.get(f"/v1/files/{ended[name]}/content").text.splitlines()
        ]
        for name in ("output_file_id", "error_file_id")
    )
    return output, errors


def choice_of(server: Server, **fields: Any) -> dict[str, Any]:
    """Its only choice."""
    (choice,) = complete(server, **fields)["choices"]
    entries: dict[str, Any] = choice
    return entries


def events_of(server: Server, path: str = COMPLETIONS, /, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, without the closing [DONE], which must be there."""
    prompt = {"prompt": "the cat"} if path == COMPLETIONS else {}
    reply = server.http.post(path, json={**prompt, "stream": True, **fields})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def parts_of(events: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """What events say of one choice."""
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]


def added(first: Any, more: Any) -> Any:
    """What two parts of a choice say together: texts and lists go on, the rest is said once."""
    if isinstance(first, dict) and isinstance(more, dict):
        return first | {name: added(first.get(name), value) for name, value in more.items()}
    if isinstance(first, (str, bytes, list)) and more is not None:
        return first + more
    assert more is None or first is None or first == more
    return first if more is None else more


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice that a stream has in these parts."""
    whole: dict[str, Any] = {}
    for part in parts:
        assert whole.get("finish_reason") is None, "nothing comes behind the end"
        whole = added(whole, unpacked(part))
    return whole


def unpacked(choice: dict[str, Any]) -> dict[str, Any]:
    packed = choice.get("packed", {})
    decoded = {name: base64.b64decode(value) for name, value in packed.items()}
    return choice | {"packed": decoded} if packed else choice


def connect(server: Server, path: str = COMPLETIONS, /, **fields: Any) -> socket.socket:
    """A stream that nobody reads yet, over a connection that holds little."""
    address = urlsplit(server.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.settimeout(600)
    connection.connect((address.hostname, address.port))
    body = json.dumps({"prompt": "the cat", "stream": True, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    connection.sendall(head.encode() + b"connection: close\r\n\r\n" + body)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other end closes it."""
    with connection:
        return b"".join(iter(lambda: connection.recv(1 << 20), b""))


def processes(server: Server) -> list[tuple[str, int]]:
    """`engine`, `api` or `jobs`, and the process id of each child."""
    pids = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    results = []
    for pid in map(int, pids.split()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):  # it has just gone
            continue
        if command != [b""]:  # the same, and nobody has waited for it yet
            (name,) = {b"api", b"jobs"} & set(command) or {b"engine"}
            results.append((name.decode(), pid))
    return results


def children(server: Server) -> dict[str, int]:
    """Process ids of `engine`, `api` (the last one's) and `jobs`."""
    return dict(processes(server))


def is_ready(server: Server) -> bool:
    try:
        return server.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


class Asked(threading.Thread):
    """A completion of 120 tokens that runs, for as long as the engine is held."""

    def __init__(self, server: Server, others: int = 0, **fields: object) -> None:
        """Returns when it runs, or waits behind so many others."""
        super().__init__()
        self._server, self._fields = server, fields
        self.start()
        names = ("running", "waiting") if others else ("running",)
        while sum(server.metric(f"srm_engine_{name}_sequences") for name in names) <= others:
            assert self.is_alive(), "it has ended before it ran"
            time.sleep(0.01)

    def run(self) -> None:
        self._reply = self._server.post(**{"max_tokens": 120, "ignore_eos": True, **self._fields})

    def answer(self) -> httpx.Response:
        self.join()
        return self._reply


def error_of(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a refusal with this status: in the one shape, and whether to retry is told."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    error: dict[str, Any] = body["error"]
    assert (set(body), body["type"]) == ({"error", "type"}, "error")
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert reply.headers["x-request-id"]
    is_final = status not in {408, 409, 429, 500, 503}
    assert is_final == (reply.headers.get("x-should-retry") == "false") or status == 409
    return error
