"""What is taken from a server's /metrics, and that a run goes on without them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from loadtest.client import server_metrics
from loadtest.client.server_metrics import FAMILIES, Sampling, read, running

OURS = """# HELP srm_engine_running_sequences Sequences that hold a slot.
# TYPE srm_engine_running_sequences gauge
srm_engine_running_sequences{pid="12"} 3.0
srm_engine_running_sequences{pid="7 8}"} 4.0
# TYPE srm_engine_decode_tokens_total counter
srm_engine_decode_tokens_total 1.5e+06
srm_engine_decode_tokens_created 1.7e9
srm_engine_step_seconds_bucket{le="0.1"} 5
srm_files_bytes NaN
"""
VLLM = """vllm:num_requests_running{engine="0",model_name="a \\"quoted\\" name"} 2.0 1700000000000
vllm:num_requests_running{engine="1",model_name="a"} 5.0
vllm:num_requests_running_by_reason{engine="1"} 9.0
vllm:generation_tokens_total{engine="0"} 10.0
"""
LLAMA = "llamacpp:requests_processing 4\nllamacpp:tokens_predicted_total 31\n"


def test_values_are_summed_over_labels_and_others_left_out() -> None:
    assert read(OURS) == {
        "srm_engine_running_sequences": 7.0,
        "srm_engine_decode_tokens_total": 1.5e6,
    }
    assert read(VLLM) == {"vllm:num_requests_running": 7.0, "vllm:generation_tokens_total": 10.0}
    assert read(LLAMA)["llamacpp:tokens_predicted_total"] == 31
    assert [running(read(text)) for text in (OURS, VLLM, LLAMA)] == [7.0, 7.0, 4.0]


@pytest.mark.parametrize("text", ["", "<html>no metrics</html>", "srm_engine_steps_total NaN\n"])
def test_text_without_known_values_has_none(text: str) -> None:
    assert read(text) == {}
    assert running({}) is None


def test_a_broken_line_is_an_error_and_no_value() -> None:
    with pytest.raises(ValueError):
        read("srm_engine_running_sequences many\n")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_metrics, "_EVERY_S", 0.01)


class _Answers:
    """What a server says, one after the other; the last one again and again."""

    def __init__(self, *replies: tuple[int, str]) -> None:
        self.replies = list(replies)
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.asked = threading.Semaphore(0)


@contextmanager
def _served(answers: _Answers) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers.paths.append(self.path)
            answers.keys.append(self.headers["authorization"])
            status, text = answers.replies.pop(0) if answers.replies[1:] else answers.replies[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())
            answers.asked.release()

        def log_message(self, format: str, *args: object) -> None:
            """Quietly."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_samples_have_the_times_of_the_run() -> None:
    answers = _Answers((200, OURS), (200, VLLM))
    begun = time.time()
    with _served(answers) as url, Sampling(url, "secret") as sampling:
        for _ in range(3):
            assert answers.asked.acquire(timeout=120)
    found = sampling.samples(begun, time.time() - begun + 1)
    assert found[0].values == read(OURS) and found[1].values == read(VLLM)
    assert 0 <= found[0].time < found[1].time
    assert sampling.latest == read(VLLM) and sampling.note == ""
    assert sampling.samples(begun + 1000, 10) == []
    assert answers.keys[0] == "Bearer secret"
    assert all(
        f"name%5B%5D={family.replace(':', '%3A')}" in answers.paths[0] for family in FAMILIES
    )


@pytest.mark.parametrize(
    ("replies", "note", "latest"),
    [
        ([(404, "no such route"), (200, "<html></html>"), (200, OURS)], "404", read(OURS)),
        ([(200, "go_gc_duration_seconds 1\n")], "none of the names", {}),
    ],
)
def test_a_server_without_metrics_is_noted_and_asked_again(
    replies: list[tuple[int, str]], note: str, latest: dict[str, float]
) -> None:
    answers = _Answers(*replies)
    with _served(answers) as url, Sampling(url) as sampling:
        for _ in range(4):
            assert answers.asked.acquire(timeout=120)
    assert note in sampling.note and url in sampling.note
    assert sampling.latest == latest


def test_nothing_is_asked_without_an_address() -> None:
    with Sampling("") as sampling:
        pass
    assert sampling.samples(0, 1e12) == [] and sampling.note == ""
