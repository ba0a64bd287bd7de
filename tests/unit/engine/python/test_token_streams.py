"""Tokens of the Python API as they are sampled: what comes, and how a stream ends too soon."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import defaultdict
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from srm.engine.config import EngineConfig
from srm.engine.messages import SamplingParams
from srm.engine.process.engine import Engine as SteppedEngine
from srm.engine.python.offline import Engine
from srm.engine.python.request_output import CompletionPart
from srm.errors import ContextTooLong, EngineUnavailable, InvalidRequest, StepFailed
from tests.kit.engines.numpy_runner import tiny_weights
from tests.kit.serving import TEXT_MODEL
from tests.unit.engine.python.test_offline import SLOTS, BrokenRunner, make

LONG = SamplingParams(n=SLOTS, max_tokens=100, ignore_eos=True)
"""Takes all slots."""
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


async def read(llm: Engine, prompt: list[int], params: SamplingParams) -> list[CompletionPart]:
    return [part async for part in llm.stream_tokens(prompt, params)]


async def begin(llm: Engine, params: SamplingParams) -> asyncio.Task[int]:
    """Return a task that counts parts, once it has one."""
    has_begun = asyncio.Event()

    async def count() -> int:
        counted = 0
        async for _ in llm.stream_tokens([5, 6], params):
            has_begun.set()
            counted += 1
        return counted

    task = asyncio.create_task(count())
    await has_begun.wait()
    return task


async def steps_end() -> None:
    """Wait for the task that makes the steps."""
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)


async def test_parts_joined_are_the_completions(text_model: Path) -> None:
    llm, steps = make(text_model)
    prompts, each = [[5, i] for i in range(9)], [
        SamplingParams(n=1 + i % 3, max_tokens=40, seed=i, logprobs=2 if i % 2 else None)
        for i in range(9)
    ]  # fmt: skip
    streams = await asyncio.gather(*map(read, [llm] * 9, prompts, each))
    for parts, generated in zip(streams, llm.generate(prompts, each), strict=True):
        by_index = defaultdict[int, list[CompletionPart]](list)
        for part in parts:
            by_index[part.index].append(part)
        for completion in generated.completions:
            own = by_index.pop(completion.index)
            assert len(own) >= len(completion.token_ids) - 1, "a part for each step"
            ids = np.concatenate([part.token_ids for part in own])
            assert ids.tolist() == completion.token_ids.tolist()
            assert "".join(part.text for part in own) == completion.text
            assert [part.finish_reason for part in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1].finish_reason == completion.finish_reason
            for part in own:
                assert (part.scores is None) == (completion.scores is None)
            if completion.scores is not None:
                tops = [part.scores.top_ids for part in own if part.scores is not None]
                assert np.concatenate(tops).tolist() == completion.scores.top_ids.tolist()
        assert not by_index
    assert not steps.has_work


async def test_a_cancelled_stream_frees_its_slots(text_model: Path) -> None:
    llm, steps = make(text_model)
    task = await begin(llm, LONG)
    waiting = asyncio.create_task(read(llm, [8], SHORT))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(await waiting) == 3
    assert steps.scheduler.latencies.num_sampled < SLOTS * 10
    assert steps.scheduler.table.num_owned == 0 == steps.scheduler.num_requests
    async with aclosing(llm.stream_tokens([5, 6], LONG)) as left:
        await anext(left)
    never = asyncio.create_task(read(llm, [8], LONG))
    await asyncio.sleep(0)
    never.cancel()  # before its first step
    await steps_end()
    assert steps.scheduler.table.num_owned == 0 and not steps.has_work
    await read(llm, [5], SamplingParams(max_tokens=100, stop_token_ids=tuple(range(200))))
    assert not steps.has_work, "no step is under way, as after a token that stops it"
    async with aclosing(llm.stream_tokens([5, 6], LONG)) as left:
        await anext(left)
    each = [SamplingParams(max_tokens=1 + i % 9, ignore_eos=True) for i in range(40)]
    completions = llm.stream([[5, 6]] * 40, each)
    next(completions)
    await steps_end()  # which leave alone what is not theirs
    assert len([*completions]) == 39


async def test_a_refusal_is_its_own_streams_alone(text_model: Path) -> None:
    llm, _ = make(text_model)
    other = await begin(llm, LONG)
    for prompt, params, kind, message in (
        ([5] * 200, SHORT, ContextTooLong, "prompt 0: .* your prompt has 200 tokens"),
        ([400], SHORT, InvalidRequest, "prompt 0: prompt_token_ids holds 400"),
        ([5], SamplingParams(n=0), InvalidRequest, "prompt 0: n must be at least 1, got 0"),
        ([5], SamplingParams(prompt_logprobs=0), InvalidRequest, "prompt_logprobs must be None"),
    ):
        with pytest.raises(kind, match=message):
            await read(llm, prompt, params)
    with pytest.raises(EngineUnavailable, match="has not ended"):
        llm.generate([[5]], SHORT)
    assert await other == SLOTS * 100
    first = llm.stream([[5]] * 40, SHORT)
    next(first)
    with pytest.raises(EngineUnavailable, match="has not ended"):
        await read(llm, [5], SHORT)


async def test_a_device_that_breaks_is_an_error_of_each_stream(text_model: Path) -> None:
    config = EngineConfig(num_slots=SLOTS, max_step_rows=8, max_step_tokens=64, model=text_model)
    steps = SteppedEngine(
        TEXT_MODEL, BrokenRunner(tiny_weights(config=TEXT_MODEL), SLOTS), config
    )  # fmt: skip
    llm = Engine.over(steps, config)
    for _ in range(2):
        ends = await asyncio.gather(
            *(read(llm, [5, i], LONG) for i in range(3)), return_exceptions=True
        )
        for error in ends:
            assert isinstance(error, StepFailed) and "the device fell off the bus" in error.message
    with pytest.raises(RuntimeError, match="the device fell off the bus"):
        llm.close()


async def test_closing_the_engine_ends_streams_with_an_error(text_model: Path) -> None:
    llm, steps = make(text_model)
    tasks = await begin(llm, LONG), asyncio.create_task(read(llm, [8], SHORT))
    await asyncio.sleep(0)
    llm.close()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, EngineUnavailable) and "was closed" in error.message
    with pytest.raises(EngineUnavailable, match="this engine was closed"):
        await read(llm, [5], SHORT)
    assert not steps.has_work


def test_a_loop_that_ends_leaves_the_engine_whole(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, steps = make(text_model)

    async def leave() -> None:
        async for _ in llm.stream_tokens([5, 6], LONG):
            break

    async def cancel_all() -> None:
        own = llm.stream_tokens([5, 6], LONG)
        await anext(own)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        with pytest.raises(EngineUnavailable, match="event loop has ended"):
            [part async for part in own]

    for whole in (leave, cancel_all, leave):
        asyncio.run(whole())
        assert len(asyncio.run(read(llm, [5, 6], SHORT))) == 3
    asyncio.run(leave())
    assert len(llm.generate([[5, 6]], SHORT)[0].completions) == 1
    assert not steps.has_work
    before = steps.scheduler.latencies.num_sampled
    loop = asyncio.new_event_loop()  # one that is closed while a task of it waits
    waits = loop.run_until_complete(begin(llm, LONG))
    loop.close()
    assert len(asyncio.run(read(llm, [5, 6], SHORT))) == 3
    assert not steps.has_work
    assert steps.scheduler.latencies.num_sampled < before + SLOTS * 10
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # that the loop is closed
    del waits
    gc.collect()


def test_another_loop_takes_the_engine_over(text_model: Path) -> None:
    llm, steps = make(text_model)
    loops = asyncio.new_event_loop(), asyncio.new_event_loop()
    streams = [llm.stream_tokens([5, 6], LONG) for _ in loops]
    for loop, stream in zip(loops, streams, strict=True):
        loop.run_until_complete(anext(stream))
    loops[0].run_until_complete(steps_end())
    assert steps.scheduler.latencies.num_sampled < SLOTS * 10
    with pytest.raises(EngineUnavailable, match="another one has begun to read"):
        while True:
            loops[0].run_until_complete(anext(streams[0]))
    for _ in range(50):
        loops[1].run_until_complete(anext(streams[1]))
    for loop, stream in zip(loops, streams, strict=True):
        loop.run_until_complete(stream.aclose())
        loop.run_until_complete(steps_end())
        loop.close()
