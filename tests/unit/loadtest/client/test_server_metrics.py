"""What is taken from a server's /metrics, and that a run goes on without them."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from srm.loadtest.client import server_metrics
from srm.loadtest.client.server_metrics import FAMILIES, MetricsSampler, read, running
from tests.kit.loads.raw_server import Peer, make_reply
from tests.kit.loads.toy import Toy

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


@pytest.mark.parametrize(
    ("text", "values", "sequences"),
    [
        (OURS, {"srm_engine_running_sequences": 7.0, "srm_engine_decode_tokens_total": 1.5e6}, 7.0),
        (VLLM, {"vllm:num_requests_running": 7.0, "vllm:generation_tokens_total": 10.0}, 7.0),
        (LLAMA, {"llamacpp:requests_processing": 4, "llamacpp:tokens_predicted_total": 31}, 4.0),
        ("", {}, None),
        ("<html>no metrics</html>", {}, None),
        ("srm_engine_steps_total NaN\n", {}, None),
    ],
)
def test_values_are_summed_over_labels_and_others_left_out(
    text: str, values: dict[str, float], sequences: float | None
) -> None:
    assert read(text) == values
    assert running(values) == sequences


def test_a_broken_line_is_an_error_and_no_value() -> None:
    with pytest.raises(ValueError):
        read("srm_engine_running_sequences many\n")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_metrics, "_EVERY_S", 0.01)


class Answers(Toy):
    """What a server says, one after the other; the last one again and again."""

    def __init__(self, *replies: tuple[int, str]) -> None:
        super().__init__()
        self.replies, self.heads = list(replies), list[str]()
        self._asked = threading.Semaphore(0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        while await peer.request() is not None:
            self.heads.append(peer.head)
            status, text = self.replies.pop(0) if self.replies[1:] else self.replies[0]
            await peer.send(make_reply(text.encode(), status))
            self._asked.release()

    def sampled(self, key: str = "") -> MetricsSampler:
        """After it was asked four times."""
        with self, MetricsSampler(self.url, key) as sampling:
            for _ in range(4):
                assert self._asked.acquire(timeout=120)
        return sampling


def test_samples_have_the_times_of_the_run() -> None:
    answers = Answers((200, OURS), (200, VLLM))
    begun = time.time()
    sampling = answers.sampled("secret")
    samples = sampling.samples(begun, time.time() - begun + 1)
    assert samples[0].values == read(OURS) and samples[1].values == read(VLLM)
    assert 0 <= samples[0].time < samples[1].time
    assert sampling.latest == read(VLLM) and sampling.note == ""
    assert sampling.samples(begun + 1000, 10) == []
    assert "authorization: bearer secret" in answers.heads[0].lower()
    for family in FAMILIES:
        assert f"name%5B%5D={family.replace(':', '%3A')}" in answers.heads[0]


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
    answers = Answers(*replies)
    sampling = answers.sampled()
    assert note in sampling.note and answers.url in sampling.note
    assert len(sampling.note) < 200, "a 404 had the address with every family"
    assert sampling.latest == latest


def test_nothing_is_asked_without_an_address() -> None:
    with MetricsSampler("") as sampling:
        pass
    assert sampling.samples(0, 1e12) == [] and sampling.note == ""
