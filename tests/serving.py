"""`srm serve` as a process of its own, with the numpy or the real engine: for tests over HTTP."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from engine.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
TEXT_MODEL = ModelConfig(d_model=16, num_layers=2, num_heads=2, n_ctx=128, vocab_size=320)
NUM_SLOTS = 64
MAX_WAITING = 3_000
MAX_BODY_BYTES = 1_000_000
SERVER_FLAGS = (
    f"--num-slots={NUM_SLOTS}",
    f"--max-step-rows={NUM_SLOTS}",
    f"--max-waiting={MAX_WAITING}",
    f"--max-body-bytes={MAX_BODY_BYTES}",
)
_START_S = 120


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


def tries() -> Iterator[None]:
    """For what may have ended before it is met, or is still to come: again, for a while."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        yield
    raise AssertionError("what was waited for never came")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A running `srm serve`. Leaves with SIGTERM, and must then have exit code 0."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        engine_module: str = "tests.engines.numpy_engine",
        start_s: float = _START_S,
    ) -> None:
        """Waits until it is ready, for `start_s` seconds at most.

        Its files are in a folder of their own, which goes with it, unless a flag says where.
        """
        self.lines: list[str] = []
        self._data = tempfile.TemporaryDirectory(prefix="srm-data-")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c"),
                "import sys; from server.supervise.launch import main; "
                f"sys.exit(main(sys.argv[1:], engine_module={engine_module!r}))",
                *(f"--model={folder}", "--port=0", f"--data-dir={self._data.name}", *flags),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        if not self._ready.wait(start_s) or not self._url():
            self.process.kill()
            raise AssertionError("srm serve did not start:\n" + "".join(self.lines))
        self.url = self._url()
        self.http = httpx.Client(base_url=self.url, timeout=600)  # of a busy machine
        port = next((one.split("=")[1] for one in flags if one.startswith("--admin-port=")), "")
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
        found = re.search(r"^Serving \S+ on (\S+)$", "".join(self.lines), re.MULTILINE)
        return found[1] if found else ""

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
        return self.http.post("/v1/completions", json={"prompt": "the cat", **fields})

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


def choice_of(server: Server, **fields: Any) -> dict[str, Any]:
    """Its only choice."""
    (choice,) = complete(server, **fields)["choices"]
    found: dict[str, Any] = choice
    return found
