"""What sequences' times and requests' wishes become in the histograms, by a clock of the test's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from prometheus_client import REGISTRY, Histogram

from engine import metrics
from engine.config import EngineConfig
from engine.process.engine import Engine
from engine.scheduler.scheduler import Scheduler
from engine.steps.batch import StepResult
from tests.conftest import MakeEngine, MakeRequest
from tests.engines.numpy_runner import TINY


class Clocked:
    """A scheduler whose steps take as long as they are told."""

    def __init__(self, **settings: int) -> None:
        config = EngineConfig(**{"num_slots": 8, "prefix_slots": 4, **settings})  # type: ignore[arg-type]
        self.scheduler = Scheduler(TINY, config)
        self.latencies = self.scheduler.latencies
        self.latencies.now = 1000.0

    def wait(self, seconds: float) -> None:
        self.latencies.now += seconds

    def step(self, seconds: float) -> None:
        batch = self.scheduler.schedule()
        assert batch is not None
        self.wait(seconds)
        tokens = np.full(batch.num_decode, 9, np.int32)
        self.scheduler.complete(batch, StepResult(tokens, np.zeros(len(tokens), np.float32)))


class Grown:
    """What a histogram has gained since this was made."""

    def __init__(self, histogram: Histogram) -> None:
        (family,) = histogram.describe()
        self._name = family.name
        self._before = self._now()

    def _now(self) -> dict[tuple[str, str], float]:
        (family,) = [one for one in REGISTRY.collect() if one.name == self._name]
        return {(one.name, one.labels.get("le", "")): one.value for one in family.samples}

    def __call__(self) -> tuple[int, float]:
        """Observations and their sum."""
        now = self._now()
        count, total = (
            now[self._name + end, ""] - self._before[self._name + end, ""]
            for end in ("_count", "_sum")
        )
        return int(count), round(total, 6)

    def below(self, bound: str) -> int:
        key = (self._name + "_bucket", bound)
        return int(self._now()[key] - self._before[key])


@pytest.fixture
def grown() -> Iterator[dict[str, Grown]]:
    histograms = {name: one for name, one in vars(metrics).items() if isinstance(one, Histogram)}
    yield {name: Grown(one) for name, one in histograms.items()}


def test_a_sequence_waits_is_prefilled_and_decodes(
    make_request: MakeRequest, grown: dict[str, Grown]
) -> None:
    clocked = Clocked()
    clocked.scheduler.add(make_request(max_tokens=3))
    clocked.wait(2.0)
    for seconds in (0.5, 0.25, 0.125, 0.0625):  # prefill, and three tokens
        clocked.step(seconds)
    clocked.latencies.publish(is_idle=True)
    assert grown["SEQUENCE_QUEUE_SECONDS"]() == (1, 2.0)
    assert grown["SEQUENCE_PREFILL_SECONDS"]() == (1, 0.75)
    assert grown["SEQUENCE_DECODE_SECONDS"]() == (1, 0.1875)
    assert grown["SEQUENCE_INFERENCE_SECONDS"]() == (1, 0.9375)
    assert grown["SEQUENCE_SECONDS"]() == grown["REQUEST_SECONDS"]() == (1, 2.9375)
    assert grown["FIRST_TOKEN_SECONDS"]() == (1, 2.75)
    assert grown["INTER_TOKEN_SECONDS"]() == (2, 0.1875)
    assert grown["INTER_TOKEN_SECONDS"].below("0.1") == 1
    assert grown["SEQUENCE_TOKEN_SECONDS"]() == (1, 0.09375)
    assert grown["SEQUENCE_TOKENS"]() == (1, 3)


def test_samples_are_sequences_each_and_one_request(
    make_request: MakeRequest, grown: dict[str, Grown]
) -> None:
    clocked = Clocked()
    clocked.scheduler.add(make_request(n=12, max_tokens=2))  # four of them find no slot at first
    for _ in range(5):  # prefill, twice two tokens
        clocked.step(1.0)
    clocked.latencies.publish(is_idle=True)
    assert grown["REQUEST_N"]() == (1, 12)
    assert grown["REQUEST_N"].below("10.0") == 0
    assert grown["REQUEST_TOKENS"]() == (1, 24)
    assert grown["REQUEST_LONGEST"]() == (1, 2)
    assert grown["REQUEST_PROMPT_TOKENS"]() == (1, 3)
    assert grown["REQUEST_MAX_TOKENS"]() == (1, 2)
    assert grown["REQUEST_SECONDS"]() == (1, 5.0)
    assert grown["SEQUENCE_TOKENS"]() == (12, 24)
    assert grown["SEQUENCE_QUEUE_SECONDS"]() == (12, 4 * 3.0)
    assert grown["SEQUENCE_PREFILL_SECONDS"]() == (12, 8 * 2.0 + 4 * 1.0)
    assert grown["FIRST_TOKEN_SECONDS"]() == (12, 8 * 2.0 + 4 * 4.0)
    assert grown["INTER_TOKEN_SECONDS"]() == (12, 12.0)


def test_who_takes_turns_waits_longer_between_tokens(
    make_request: MakeRequest, grown: dict[str, Grown]
) -> None:
    clocked = Clocked(max_step_rows=3, max_step_tokens=16)
    clocked.scheduler.add(make_request(prompt=[5], n=6, max_tokens=3))
    for _ in range(6):
        clocked.step(1.0)
    clocked.latencies.publish(is_idle=True)
    assert grown["INTER_TOKEN_SECONDS"]() == (12, 12 * 2.0)
    assert grown["FIRST_TOKEN_SECONDS"]() == (6, 3 * 1.0 + 3 * 2.0)


def test_a_prompt_that_is_only_scored_is_a_request_without_sequences(
    make_engine: MakeEngine, make_request: MakeRequest, grown: dict[str, Grown]
) -> None:
    engine = make_engine()
    engine.add(make_request(max_tokens=0, prompt_logprobs=0))
    run(engine)
    assert grown["REQUEST_SECONDS"]()[0] == grown["REQUEST_TOKENS"]()[0] == 1
    assert grown["REQUEST_TOKENS"]()[1] == grown["SEQUENCE_TOKENS"]()[0] == 0


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step_overlapped()


def test_every_token_is_a_first_one_or_has_a_gap(
    make_engine: MakeEngine, make_request: MakeRequest, grown: dict[str, Grown]
) -> None:
    """Also where sequences stop early, are aborted, take turns and replace each other."""
    before = REGISTRY.get_sample_value("srm_engine_decode_tokens_total") or 0
    engine = make_engine(num_slots=5, max_step_rows=3)
    rng = np.random.default_rng(0)
    for i in range(20):
        n, max_tokens = int(rng.integers(1, 5)), int(rng.integers(1, 9))
        engine.add(make_request(str(i), n=n, max_tokens=max_tokens, ignore_eos=False, seed=i))
        engine.step_overlapped()
        if i % 4 == 3:
            engine.abort(str(i - 2))
    run(engine)
    tokens = (REGISTRY.get_sample_value("srm_engine_decode_tokens_total") or 0) - before
    gaps, first = grown["INTER_TOKEN_SECONDS"]()[0], grown["FIRST_TOKEN_SECONDS"]()[0]
    assert gaps + first == tokens > 100
    assert not engine.scheduler.latencies._groups


def test_an_aborted_request_is_counted_and_leaves_no_times(
    make_engine: MakeEngine, make_request: MakeRequest, grown: dict[str, Grown]
) -> None:
    labels = {"finish_reason": "abort"}
    before = REGISTRY.get_sample_value("srm_engine_sequences_total", labels) or 0
    engine = make_engine()
    engine.add(make_request(n=20, max_tokens=9))
    for _ in range(3):
        engine.step_overlapped()
    engine.abort("a")
    assert REGISTRY.get_sample_value("srm_engine_sequences_total", labels) == before + 20
    assert grown["REQUEST_SECONDS"]()[0] == grown["SEQUENCE_SECONDS"]()[0] == 0
    assert not engine.scheduler.latencies._groups


@pytest.mark.parametrize("value", [0.0005, 0.0049, 0.005, 0.3, 1e9])
def test_many_observations_at_once_are_what_one_at_a_time_are(value: float) -> None:
    bounds = (0.005, 0.01, 0.3)
    one, many, counted = (Histogram(f"h{i}", "", buckets=bounds, registry=None) for i in range(3))
    for _ in range(7):
        one.observe(value)
    metrics.observe(many, np.full(7, value))
    metrics.observe_counts(counted, [(value, 3), (value, 4)])
    buckets = [
        [bucket.get() for bucket in histogram._buckets] for histogram in (one, many, counted)
    ]
    assert buckets[0] == buckets[1] == buckets[2]
    assert sum(buckets[0]) == 7
    assert one._sum.get() == pytest.approx(many._sum.get()) == pytest.approx(counted._sum.get())
