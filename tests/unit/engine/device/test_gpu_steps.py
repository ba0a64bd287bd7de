"""What a GPU is given: in which order, from which memory, and nothing empty. There is no GPU here:
a stub does all as late as it can, and MAX's CPU computes from views of one packed upload."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from max.driver import CPU, Buffer
from max.dtype import DType
from max.graph import BufferType

from srm.engine.config import EngineConfig
from srm.engine.device import gpu_steps, runner
from srm.engine.device.gpu_steps import GpuSteps, padded_inputs
from srm.engine.device.model import build_step_graph
from srm.engine.device.runner import open_device
from srm.engine.messages import SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.steps.batch import Batch, padded
from srm.engine.weights.weights import Weights
from tests.kernels.gpu.test_gpu_weights import models
from tests.kit.engines.late_device import LateBuffer, LateModel, LateRunner
from tests.kit.engines.making import request_of, scheduler_of, step
from tests.kit.engines.numpy_runner import TINY, NumpyRunner, tiny_weights
from tests.kit.models.demo import engine_on_max
from tests.kit.processes.run_engine import run, tokens

SIZES: dict[str, Any] = {"num_slots": 4, "max_step_rows": 4, "max_step_tokens": 6}
SCORED = {"logprobs": 2, "prompt_logprobs": 1, "emit": "delta"}
EDITED = {"temperature": 0, "logit_bias": {3: -1.0}}
BANNED = {"bad_words": [[3]], "repetition_penalty": 1.5}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch, weights: Weights) -> Iterator[LateRunner]:
    monkeypatch.setattr(gpu_steps, "Buffer", LateBuffer)
    monkeypatch.setattr(gpu_steps, "LEAST_BYTES", 256)  # memory has to grow
    yield LateRunner(weights, 4, 2)


def ask(engine: Engine) -> dict[tuple[str, int], bytes]:
    """The tokens of requests of all kinds, some of which give up their slots for others."""
    kinds: list[dict[str, Any]] = [{}, SCORED, EDITED, BANNED]
    results = []
    for number, kind in enumerate(kinds * 2):
        prompt = list(range(3, 5 + number))
        engine.add(request_of(f"{number}", prompt, n=3, max_tokens=9, seed=number, **kind))
        results += engine.step_overlapped() + engine.step_overlapped()
    engine.add(request_of("urgent", [7], n=4, max_tokens=3, priority=-1))
    results += run(engine)
    engine.add(request_of("single", [9], max_tokens=3))
    return tokens(results + run(engine))


def test_the_next_step_is_launched_before_the_last_ones_tokens_are_read(late: LateRunner) -> None:
    engine = Engine(TINY, late, EngineConfig(prefix_slots=2, **SIZES))
    engine.add(request_of(prompt=[5], n=3, max_tokens=6, seed=1))
    run(engine)
    enqueued = ["upload", "launch", "download", "download"]
    steps = late.late.calls.count("launch")
    assert steps == 6
    assert late.late.calls == enqueued + (steps - 1) * [*enqueued, "read"] + ["read"]
    assert late.late.calls.count("upload") == steps  # one copy takes all inputs


def test_memory_is_not_written_again_before_it_was_copied(
    late: LateRunner, weights: Weights
) -> None:
    config = EngineConfig(prefix_slots=2, max_parked_bytes=2**30, **SIZES)
    expected = ask(Engine(TINY, NumpyRunner(weights, 4, 2), config))
    assert len(expected) == 2 + 8 * 3 + 4 + 1 and len(set(expected.values())) > 9
    assert ask(Engine(TINY, late, config)) == expected
    assert len(late.steps.unused) == 2, "two steps are under way at once, not more"


def test_replayed_steps_give_the_same_tokens(
    late: LateRunner, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded with rows of the spare slot, in the order of the steps that are launched."""
    monkeypatch.setattr(gpu_steps, "CAPTURED_ROWS", (2, 3))
    monkeypatch.setattr(gpu_steps, "NEW_SHARE", 2)
    config = EngineConfig(prefix_slots=2, max_parked_bytes=2**30, **SIZES)
    expected = ask(Engine(TINY, NumpyRunner(weights, 4, 2), config))
    late.steps.replays = True
    assert ask(Engine(TINY, late, config)) == expected
    counted = Counter(late.late.calls)
    assert counted["replay"] >= 5 and counted["launch"] >= 5
    assert counted["upload"] == counted["replay"] + counted["launch"]


def test_other_weights_are_captured_again(late: LateRunner, weights: Weights) -> None:
    late.steps.replays = True
    engine = Engine(TINY, late, EngineConfig(prefix_slots=2, **SIZES))
    replayed = []
    for _ in range(2):
        engine.generate([[5]], SamplingParams(max_tokens=4))
        replayed.append(late.late.calls.count("replay"))
        late.model = LateModel(late.late, late.run_batch)
    assert replayed[1] == 2 * replayed[0] > 0


def test_steps_may_be_waited_for_in_any_order_and_number(
    late: LateRunner, weights: Weights
) -> None:
    engine = Engine(TINY, NumpyRunner(weights, 4, 2), EngineConfig(prefix_slots=2, **SIZES))
    engine.add(request_of(n=3, max_tokens=9, seed=1))
    bare = NumpyRunner(weights, 4, 3)
    batches = []
    while (batch := engine.scheduler.schedule()) is not None:
        batches.append(batch)
        engine.scheduler.complete(batch, bare.launch(batch).wait())
    launched = [late.launch(batch) for batch in batches]
    result = [item.wait() for item in reversed(launched)][::-1]
    bare = NumpyRunner(weights, 4, 3)
    for batch, item in zip(batches, result, strict=True):
        np.testing.assert_array_equal(item.token_ids, bare.launch(batch).wait().token_ids)


def test_no_input_of_any_graph_is_empty(late: LateRunner) -> None:
    ask(Engine(TINY, late, EngineConfig(prefix_slots=2, **SIZES)))
    empty = {
        name
        for batch in late.batches
        for name, array in {**fields_of(batch), **fields_of(batch.edits)}.items()
        if not len(array)
    }
    names = "slots positions new score_rows num_top named spans tokens"
    assert {*names.split()} <= empty
    for batch in (padded(batch, 6) for batch in late.batches):
        assert batch.num_decode and batch.num_tokens > 1
        assert batch.num_decode + batch.num_scored_prefill > 1
    given = [padded_inputs(batch, 6) for batch in late.batches]
    for model in models():
        graph = build_step_graph(model, DType.float32, CPU())
        types = [own_input.type for own_input in graph.inputs]
        pool, inputs = types[:3], types[4:]
        assert all(isinstance(kind, BufferType) for kind in pool)
        for arrays in given:
            for wanted, array in zip(inputs, arrays, strict=True):
                assert array.size and array.ndim == len(wanted.shape)
                assert DType.from_numpy(array.dtype) == wanted.dtype


def test_a_row_that_goes_on_uploads_8_bytes() -> None:
    """And a step 256 for each array that is not a row's, whatever its rows."""
    for rows in (1_000, 70_000):
        sizes = {"num_slots": rows, "max_step_rows": rows, "max_step_tokens": rows + 1}
        scheduler = scheduler_of(**sizes, max_waiting=rows)
        scheduler.add(request_of(prompt=[5], n=rows, max_tokens=9))
        step(scheduler)
        batch = scheduler.schedule()
        assert batch is not None and batch.num_decode == rows
        arrays = padded_inputs(batch, rows)
        assert sum(array.nbytes for array in arrays if len(array) >= rows) == 8 * rows
        _, size = gpu_steps.StepBuffers(CPU()).pack(arrays)
        assert size <= 8 * rows + gpu_steps.ALIGNMENT * len(arrays)


def fields_of(arrays: object) -> dict[str, Any]:
    names = arrays.__slots__  # type: ignore[attr-defined]
    return {name: one for name in names if isinstance(one := getattr(arrays, name), np.ndarray)}


class OnCpu:
    """A step's graph on MAX's CPU, where a copy that was enqueued is not ordered with a step."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def execute(self, *inputs: Buffer) -> Any:
        CPU().synchronize()
        return self._model.execute(*inputs)


def test_the_graph_runs_on_views_of_one_packed_upload() -> None:
    with engine_on_max(tiny_weights(), prefix_slots=3, **SIZES) as plain:
        on_cpu: Any = plain.runner
        config = EngineConfig(prefix_slots=2, **SIZES)  # the last slot is nobody's
        expected = ask(Engine(TINY, on_cpu, config))
        on_cpu._gpu_steps = GpuSteps(on_cpu.device, on_cpu._pool, 6)
        on_cpu._model = OnCpu(on_cpu._model)
        assert ask(Engine(TINY, on_cpu, config)) == expected


def test_steps_fail_where_the_device_does(late: LateRunner, weights: Weights) -> None:
    def fail(_: Batch) -> None:
        raise RuntimeError("the device is lost")

    late.model.run = fail
    engine = Engine(TINY, late, EngineConfig(prefix_slots=2, **SIZES))
    with pytest.raises(RuntimeError, match="the device is lost"):
        engine.generate([[5]], SamplingParams(max_tokens=3))
    assert not late.steps.unused


def test_max_is_told_its_share_of_a_gpus_memory_before_it_opens_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT"
    monkeypatch.setattr(runner, "open_gpu", lambda: os.environ[name])
    monkeypatch.setenv(name, "50")
    assert cast(str, open_device("gpu")) == "50", "whoever runs it may say otherwise"
    monkeypatch.delenv(name)
    assert cast(str, open_device("gpu")) == "97"


def test_pinned_memory_of_max_is_the_arrays_that_are_written() -> None:
    buffers = gpu_steps.StepBuffers(CPU())
    for size in (3, 2**21):
        arrays = [np.arange(size, dtype=np.int32), np.array([[1.5], [2.5]], np.float32)]
        for _ in range(2):
            on_device = buffers.upload(arrays)
            buffers.download(on_device)
            content = buffers.read()
            for array, reading in zip(arrays, content, strict=True):
                np.testing.assert_array_equal(reading, array)
            assert all(isinstance(buffer, Buffer) for buffer in on_device)
