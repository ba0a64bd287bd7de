"""What sequences' times and requests' wishes become in the histograms, by a clock of the test's."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import REGISTRY, Histogram

from srm.engine import metrics
from tests.kit.engines.making import complete, engine_of, park_preempted, request_of, scheduler_of
from tests.kit.processes.run_engine import run


class Clocked:
    """A scheduler whose steps take as long as they are told."""

    def __init__(self, **settings: int) -> None:
        self.scheduler = scheduler_of(**settings)
        self.latencies = self.scheduler.latencies
        self.latencies.now = 1000.0

    def steps(self, *seconds: float) -> None:
        for second in seconds:
            batch = self.scheduler.schedule()
            assert batch is not None
            self.latencies.now += second
            complete(self.scheduler, batch)
        self.latencies.publish(is_idle=True)


class Grown:
    """What a histogram has gained since this was made."""

    def __init__(self, histogram: Histogram) -> None:
        (family,) = histogram.describe()
        self._name = family.name
        histogram._sum.set(0)  # to one as large as other tests leave nothing can be added
        self._before = self._now()

    def _now(self) -> dict[tuple[str, str], float]:
        (family,) = [metric for metric in REGISTRY.collect() if metric.name == self._name]
        return {
            (sample.name, sample.labels.get("le", "")): sample.value for sample in family.samples
        }

    def __call__(self) -> tuple[int, float]:
        """Observations and their sum."""
        count, total = (
            self._now()[self._name + end, ""] - self._before[self._name + end, ""]
            for end in ("_count", "_sum")
        )
        return int(count), round(total, 6)

    def below(self, bound: str) -> int:
        key = (self._name + "_bucket", bound)
        return int(self._now()[key] - self._before[key])


@pytest.fixture
def grown() -> dict[str, Grown]:
    items = vars(metrics).items()
    return {name: Grown(item) for name, item in items if isinstance(item, Histogram)}


def has_grown(grown: dict[str, Grown], expected: dict[str, tuple[int, float]]) -> None:
    assert {name: grown[name]() for name in expected} == expected


def test_a_sequence_waits_is_prefilled_and_decodes(grown: dict[str, Grown]) -> None:
    clocked = Clocked()
    clocked.scheduler.add(request_of(max_tokens=3))
    clocked.latencies.now += 2.0
    clocked.steps(0.5, 0.25, 0.125, 0.0625)  # prefill, and three tokens
    has_grown(
        grown,
        {
            "SEQUENCE_QUEUE_SECONDS": (1, 2.0),
            "SEQUENCE_PREFILL_SECONDS": (1, 0.75),
            "SEQUENCE_DECODE_SECONDS": (1, 0.1875),
            "SEQUENCE_INFERENCE_SECONDS": (1, 0.9375),
            "SEQUENCE_SECONDS": (1, 2.9375),
            "FIRST_TOKEN_SECONDS": (1, 2.75),
            "INTER_TOKEN_SECONDS": (2, 0.1875),
            "SEQUENCE_TOKEN_SECONDS": (1, 0.09375),
        },
    )
    assert grown["INTER_TOKEN_SECONDS"].below("0.1") == 1


def test_samples_are_sequences_each_and_one_request(grown: dict[str, Grown]) -> None:
    clocked = Clocked()
    clocked.scheduler.add(request_of(n=12, max_tokens=2))  # four of them find no slot at first
    clocked.steps(*[1.0] * 5)  # prefill, twice two tokens
    expected = {
        "REQUEST_N": (1, 12.0),
        "REQUEST_TOKENS": (1, 24.0),
        "REQUEST_LONGEST": (1, 2.0),
        "REQUEST_PROMPT_TOKENS": (1, 3.0),
        "REQUEST_MAX_TOKENS": (1, 2.0),
        "REQUEST_SECONDS": (1, 5.0),
        "SEQUENCE_TOKENS": (12, 24.0),
        "SEQUENCE_QUEUE_SECONDS": (12, 4 * 3.0),
        "SEQUENCE_PREFILL_SECONDS": (12, 8 * 2.0 + 4 * 1.0),
        "FIRST_TOKEN_SECONDS": (12, 8 * 2.0 + 4 * 4.0),
        "INTER_TOKEN_SECONDS": (12, 12.0),
    }
    has_grown(grown, expected)
    assert grown["REQUEST_N"].below("10.0") == 0


def test_waits_between_tokens_are_right_where_steps_are_mixed(grown: dict[str, Grown]) -> None:
    clocked = Clocked(max_step_rows=3)
    clocked.scheduler.add(request_of("low", [5], n=2, priority=-1, max_tokens=5))
    clocked.steps(1.0, 1.0)  # both of low, for the first time; and again: 2 x 1
    clocked.scheduler.add(request_of("high", [5], n=2, max_tokens=3))
    # High for the first time, one of low: 1 x 1; high: 2 x 1, the other of low: 1 x 2; high: 2 x 1,
    # the first of low: 1 x 2; both of low: 1 + 2.
    clocked.steps(1.0, 1.0, 1.0, 1.0)
    assert grown["INTER_TOKEN_SECONDS"]() == (2 + 1 + 3 + 3 + 2, 2 + 1 + 4 + 4 + 3)


def test_a_sequence_that_was_parked_waited_meanwhile(grown: dict[str, Grown]) -> None:
    clocked = Clocked(num_slots=1)
    scheduler = clocked.scheduler
    scheduler.add(request_of("low", [5], priority=-1, max_tokens=3))
    clocked.steps(1.0, 1.0)  # 1 x 1
    scheduler.add(request_of("high", [5], max_tokens=2))
    park_preempted(scheduler)
    clocked.steps(1.0, 2.0, 4.0)  # high, for the first time; high: 1 x 2; low: 1 x 7
    decoded = (2, 2.0 + 8.0)
    has_grown(grown, {"INTER_TOKEN_SECONDS": (3, 10.0), "SEQUENCE_DECODE_SECONDS": decoded})


def test_a_prompt_that_is_only_scored_is_a_request_without_sequences(
    grown: dict[str, Grown],
) -> None:
    engine = engine_of()
    engine.add(request_of(max_tokens=0, prompt_logprobs=0))
    run(engine)
    assert grown["REQUEST_SECONDS"]()[0] == 1
    has_grown(grown, {"REQUEST_TOKENS": (1, 0.0), "SEQUENCE_TOKENS": (0, 0.0)})


def test_every_token_is_a_first_one_or_has_a_gap(grown: dict[str, Grown]) -> None:
    """Also where sequences stop early, are aborted, take turns and replace each other."""
    before = REGISTRY.get_sample_value("srm_engine_decode_tokens_total") or 0
    engine, rng = engine_of(num_slots=5, max_step_rows=3), np.random.default_rng(0)
    for i in range(20):
        n, max_tokens = int(rng.integers(1, 5)), int(rng.integers(1, 9))
        engine.add(request_of(str(i), n=n, max_tokens=max_tokens, ignore_eos=False, seed=i))
        engine.step_overlapped()
        if i % 4 == 3:
            engine.abort(str(i - 2))
    run(engine)
    tokens = (REGISTRY.get_sample_value("srm_engine_decode_tokens_total") or 0) - before
    gaps, first = grown["INTER_TOKEN_SECONDS"]()[0], grown["FIRST_TOKEN_SECONDS"]()[0]
    assert gaps + first == tokens > 100
    assert not engine.scheduler.latencies.groups


def test_an_aborted_request_is_counted_and_leaves_no_times(grown: dict[str, Grown]) -> None:
    name, labels = "srm_engine_sequences_total", {"finish_reason": "abort"}
    before = REGISTRY.get_sample_value(name, labels) or 0
    engine = engine_of()
    engine.add(request_of(n=20, max_tokens=9))
    run(engine, 3)
    engine.abort("a")
    assert REGISTRY.get_sample_value(name, labels) == before + 20
    assert grown["REQUEST_SECONDS"]()[0] == grown["SEQUENCE_SECONDS"]()[0] == 0
    assert not engine.scheduler.latencies.groups


def test_many_observations_at_once_are_what_one_at_a_time_are() -> None:
    for value in (0.0005, 0.0049, 0.005, 0.3, 1e9):
        made = [Histogram("h", "", buckets=(0.005, 0.01, 0.3), registry=None) for _ in range(3)]
        for _ in range(7):
            made[0].observe(value)
        metrics.observe(made[1], np.full(7, value))
        metrics.observe_counts(made[2], [(value, 3), (value, 4)])
        families = [family for histogram in made for family in histogram.collect()]
        samples = [
            {(sample.name, *sample.labels.values()): sample.value for sample in family.samples}
            for family in families
        ]
        for of_one in samples:
            of_one.pop(("h_created",))
            assert of_one.pop(("h_sum",)) == pytest.approx(7 * value)
        assert samples[0] == samples[1] == samples[2] and samples[0]["h_count",] == 7
