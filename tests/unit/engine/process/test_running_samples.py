"""Running samples that are read: their tokens, and what goes on from them feeds one token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from srm.engine.config import EngineConfig
from srm.engine.messages import Output, ReadSample, Request, SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.scheduler.parking import parkable
from srm.errors import NotFound
from tests.kit.engines.numpy_runner import NumpyRunner, tiny_weights

WEIGHTS, OTHER = tiny_weights(), tiny_weights(seed=1)
MODEL = WEIGHTS.config
PROMPT = [1, 2, 3]


def make(**settings: Any) -> Engine:
    config = EngineConfig(num_slots=8, max_step_rows=8, max_step_tokens=16, **settings)
    return Engine(MODEL, NumpyRunner(WEIGHTS, 8, config.prefix_slots), config, WEIGHTS.fingerprint)


def asked(id: str, prompt: list[int] | bytes, **fields: Any) -> Request:
    given = {"n": 2, "max_tokens": 20, "seed": 3, "ignore_eos": True, **fields.pop("params", {})}
    ids = prompt if isinstance(prompt, bytes) else np.array(prompt, "<i4").tobytes()
    return Request(id, ids, SamplingParams(**given), **fields)


def read(engine: Engine, id: str = "a-0", index: int = 0, **fields: Any) -> list[int]:
    engine.settle()
    done = engine.read_sample(message(id, index, **fields))
    ids: list[int] = np.frombuffer(done.token_ids, "<i4").tolist()
    return ids


def message(id: str, index: int, share: str = "") -> ReadSample:
    return ReadSample("r", id, index, share)


def run(engine: Engine) -> list[Output]:
    outputs = []
    while engine.has_work:
        outputs += engine.step_overlapped()
    return outputs


def tokens(outputs: list[Output], id: str) -> dict[int, list[int]]:
    own = [output for output in outputs if output.id == id]
    return {output.index: np.frombuffer(output.token_ids, "<i4").tolist() for output in own}


@pytest.mark.parametrize("parks", [False, True])
def test_what_goes_on_from_a_sample_feeds_one_token(parks: bool) -> None:
    engine = make()
    engine.add(asked("a-0", PROMPT))
    for _ in range(6):
        engine.step_overlapped()
    engine.settle()
    if parks:
        slots = parkable(engine.scheduler.table)
        engine.scheduler.park(slots, engine.runner.read_slots(slots))
    before = [read(engine, index=index) for index in (0, 1)]
    assert before[0] != before[1] and len(before[0]) == len(before[1]) > len(PROMPT) + 3
    prefixes = engine.scheduler.prefixes
    assert read(engine) == before[0] and prefixes.num_used == 3 and not prefixes.num_pinned
    engine.add(asked("b-0", before[1]))
    outputs = run(engine)
    ended = tokens(outputs, "a-0")
    for index in (0, 1):
        assert (PROMPT + ended[index])[: len(before[index])] == before[index]
    cached = {output.cached_tokens for output in outputs if output.id == "b-0"}
    assert cached == {len(before[1]) - 1}
    alone = make()
    alone.add(asked("b-0", before[1]))
    assert tokens(outputs, "b-0") == tokens(run(alone), "b-0")


def test_a_sample_that_waits_has_its_prompt() -> None:
    engine = make()
    engine.add(asked("a-0", PROMPT, params={"n": 9, "max_tokens": 2}))
    assert read(engine, index=8) == PROMPT
    engine.step()
    assert read(engine, index=0) == PROMPT


def test_what_does_not_run_for_that_key_is_not_found() -> None:
    engine = make()
    engine.add(asked("a-0", PROMPT, share="a", params={"max_tokens": 3}))
    engine.add(asked("b-0", PROMPT, share="a", params={"n": 1}))
    engine.step()
    for id, index, share in (("a-0", 0, "b"), ("a-0", 2, "a"), ("a-0", -1, "a"), ("c-0", 0, "a")):
        with pytest.raises(NotFound, match=f"^sample index = {index} of") as refused:
            read(engine, id, index, share=share)
        assert f"of prompt_index = 0 of '{id[0]}' does not run" in refused.value.message
        assert refused.value.param == "index"
    engine.stop("a-0", np.array([0], np.int32))
    while engine.has_request("a-0"):
        assert read(engine, "a-0", 1, share="a")[:3] == PROMPT
        engine.step()
    for index in (0, 1):
        with pytest.raises(NotFound):
            read(engine, "a-0", index, share="a")


def test_a_sample_is_known_by_the_name_of_its_request() -> None:
    engine = make()
    for id, prompt in (("a-0", [4]), ("a-1#1~2", [5]), ("b-0", [6])):
        engine.add(asked(id, prompt, name="mine" if id[0] == "a" else ""))
    by_name = [ReadSample("r", f"mine-{prompt}", 0, "") for prompt in (0, 1, 2)]
    read_by = [np.frombuffer(engine.read_sample(own).token_ids, "<i4") for own in by_name[:2]]
    assert [ids.tolist() for ids in read_by] == [[4], [5]]
    with pytest.raises(NotFound):
        engine.read_sample(by_name[2])


def test_a_part_has_samples_of_its_own_numbers() -> None:
    engine = make()
    numbers = np.array([1, 3], "<i4").tobytes()
    engine.add(asked("a-0", PROMPT, samples=numbers))
    assert read(engine, index=3) == PROMPT
    with pytest.raises(NotFound):
        read(engine, index=0)


@pytest.mark.parametrize("refeeds", [False, True])
def test_a_state_that_other_weights_made_is_not_kept(refeeds: bool) -> None:
    engine = make()
    engine.add(asked("a-0", PROMPT))
    for _ in range(5):
        engine.step()
    engine.load_weights(OTHER, refeeds=refeeds)
    for _ in range(3):  # while it is fed again, too
        before = read(engine)
        engine.step()
    engine.add(asked("b-0", before))
    outputs = run(engine)
    other = Engine(MODEL, NumpyRunner(OTHER, 8), EngineConfig(num_slots=8), "tiny-1")
    other.add(asked("b-0", before))
    assert tokens(outputs, "b-0") == tokens(run(other), "b-0")


def test_a_thousand_reads_leave_nothing_behind() -> None:
    engine = make(prefix_slots=3)
    engine.add(asked("a-0", PROMPT, params={"max_tokens": 60}))
    for number in range(1_000):
        if engine.has_request("a-0"):
            engine.step_overlapped()
            engine.settle()
        if not engine.has_request("a-0"):
            engine.add(asked("a-0", PROMPT, params={"max_tokens": 60, "seed": number}))
        read(engine, index=number % 2)
    engine.abort("a-0")
    scheduler = engine.scheduler
    assert scheduler.table.num_free == 8 and scheduler.prefixes.num_pinned == 0
    assert scheduler.prefixes.num_used <= 3 and not engine.has_work


def test_without_kept_prefixes_tokens_are_read_all_the_same() -> None:
    engine = make(prefix_cache=False)
    engine.add(asked("a-0", PROMPT))
    for _ in range(5):
        engine.step()
    free = engine.scheduler.prefixes.num_available
    assert len(read(engine)) > 4 and engine.scheduler.prefixes.num_available == free
