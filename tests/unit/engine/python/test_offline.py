"""The Python API on the numpy engine: what it gives, what it refuses, and when it stops."""

from __future__ import annotations

import asyncio
import io
import itertools
import signal
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow
import pytest

import srm
from srm.engine.config import EngineConfig
from srm.engine.messages import SamplingParams
from srm.engine.process.engine import Engine as SteppedEngine
from srm.engine.python.offline import Engine, GenerateProgress
from srm.engine.python.request_output import Completion, Generated
from srm.engine.python.tokenizer import FolderTokenizer
from srm.engine.steps.batch import Batch
from srm.errors import (
    CheckpointError,
    ConfigError,
    ContextTooLong,
    EngineUnavailable,
    InvalidRequest,
)
from srm.server.text.text import Text
from tests.kit.engines.numpy_runner import NumpyLaunched, NumpyRunner, tiny_weights
from tests.kit.serving import TEXT_MODEL, Server, complete

SLOTS = 16


def make(folder: Path, **settings: Any) -> tuple[Engine, SteppedEngine]:
    sizes: dict[str, Any] = {"num_slots": SLOTS, "max_step_rows": 8, "max_step_tokens": 64}
    config = EngineConfig(**sizes, model=folder, **settings)
    runner = NumpyRunner(tiny_weights(config=TEXT_MODEL), SLOTS)
    steps = SteppedEngine(TEXT_MODEL, runner, config)
    return Engine.over(steps, config), steps


@pytest.fixture
def made(text_model: Path) -> Iterator[tuple[Engine, SteppedEngine]]:
    llm, steps = make(text_model)
    with llm:
        yield llm, steps


@pytest.fixture
def llm(made: tuple[Engine, SteppedEngine]) -> Engine:
    return made[0]


@pytest.fixture
def steps(made: tuple[Engine, SteppedEngine]) -> SteppedEngine:
    """What `llm` runs on."""
    return made[1]


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def test_it_gives_what_the_server_gives(llm: Engine, server: Server) -> None:
    assert (srm.Engine, srm.SamplingParams) == (Engine, SamplingParams)
    with pytest.raises(AttributeError, match="no attribute 'Scheduler'"):
        srm.Scheduler  # type: ignore[attr-defined]  # noqa: B018
    prompts = ["the cat", "the other mat", ""]
    given: dict[str, Any] = {"n": 3, "max_tokens": 40, "seed": 2**63 + 1, "logprobs": 2}
    reply = complete(server, prompt=prompts, return_token_ids=True, temperature=1.5, **given)
    result = llm.generate(prompts, SamplingParams(temperature=1.5, **given))
    completions = [completion for generated in result for completion in generated.completions]
    assert [completion.index for completion in completions] == [0, 1, 2] * 3
    assert [completion.prompt for completion in completions] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for completion, choice in zip(completions, reply["choices"], strict=True):
        assert completion.token_ids.tolist() == choice["token_ids"]
        assert completion.text == choice["text"]
        assert completion.finish_reason == choice["finish_reason"]
        scores, size = completion.scores, len(completion.token_ids)
        assert completion.logprobs is not None and scores is not None
        assert completion.logprobs.tolist() == pytest.approx(choice["logprobs"]["token_logprobs"])
        assert scores.top_ids.shape == scores.top_logprobs.shape == (size, 2)
    assert [output.prompt_token_ids.tolist() for output in result] == [
        choice["prompt_token_ids"] for choice in reply["choices"][::3]
    ]


def test_any_tokens_read_as_the_server_reads_them(text_model: Path) -> None:
    rng = np.random.default_rng(0)
    text, decode = Text(text_model), FolderTokenizer(text_model).decode
    for length in (1, 2, 5, 50, 200):
        ids = rng.integers(0, TEXT_MODEL.vocab_size, length, np.int32)
        expected = text.decode(ids.tobytes()).decode(errors="replace")
        assert Completion(0, 0, ids, "length", None, decode).text == expected
        last = text.decode(ids[:-1].tobytes()).decode(errors="replace")
        assert Completion(0, 0, ids, "stop", None, decode).text == last


def test_many_samples_of_more_prompts_than_there_are_slots(llm: Engine) -> None:
    prompts = [[5, 6, i] for i in range(20)]
    each = [SamplingParams(n=1 + i % 7, max_tokens=1 + i % 9, seed=i) for i in range(20)]
    together = llm.generate(prompts, each)
    for i in (0, 13, 19):
        (alone,) = llm.generate([np.array(prompts[i])], each[i])
        assert tokens(alone.completions) == tokens(together[i].completions)
        assert len(alone.completions) == each[i].n
        assert together[i].prompt_token_ids.tolist() == prompts[i]
    (first, second) = llm.generate([[5, 6], [5, 6]], SamplingParams(n=4))
    assert tokens(first.completions) == tokens(second.completions), "a seed is every prompt's"


@pytest.mark.parametrize(
    ("params", "kind"), [({"n": 3}, "dict"), ([{"n": 3}], "dict"), (3, "int"), (["n"], "str")]
)
def test_params_of_another_type_are_named(llm: Engine, params: Any, kind: str) -> None:
    """`llm.generate([q], {"n": 3})` was "'str' object has no attribute 'n'"."""
    message = f"params must be SamplingParams, or one for each prompt; got {kind}$"
    with pytest.raises(InvalidRequest, match=message):
        llm.generate([[5, 6]], params)
    with pytest.raises(InvalidRequest, match=message):
        next(llm.stream([[5, 6]], params))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", 1.5, r"prompt 0: n must be an integer; got 1\.5"),
        ("max_tokens", None, "prompt 0: max_tokens must be an integer; got None"),
        ("temperature", "hot", "prompt 0: temperature must be a number; got 'hot'"),
        ("temperature", float("nan"), "prompt 0: temperature"),
        ("seed", -1, "prompt 0: seed"),
        ("logprobs", True, "prompt 0: logprobs must be an integer or null; got True"),
        ("stop_token_ids", 5, "prompt 0: stop_token_ids must be a list; got 5"),
        ("logit_bias", {"5": 1.0}, "prompt 0: a key in logit_bias must be an integer; got {'5'"),
        ("logprob_token_ids", (5, 5), "prompt 0: logprob_token_ids holds 5 more than once"),
        ("logprobs", -1, "prompt 0: logprobs must be 0 … 20, .* 320 tokens.*, got 320"),
        ("logprobs", -2, "prompt 0: logprobs must be 0 … 20, .*, got -2"),
        ("allowed_token_ids", ([5],), r"prompt 0: allowed_token_ids\[.*\] must be an integer"),
    ],
)
def test_a_wrong_parameter_is_named_and_the_next_call_works(
    llm: Engine, field: str, value: Any, message: str
) -> None:
    wrong: Any = {field: value}
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=f"^{message}"):
            llm.generate([[5]], SamplingParams(**wrong))
        with pytest.raises(InvalidRequest, match=f"^{message}"):
            next(llm.stream([[5]], SamplingParams(**wrong)))
        (generated,) = llm.generate([[5]], SamplingParams(max_tokens=2, ignore_eos=True))
        assert len(generated.completions[0].token_ids) == 2


BEYOND: list[Any] = [
    *(10**30, -(10**30), 2**64, 10**5_000, 1e30, -1e308),
    *("1" + "0" * 30, "9" * 5_000, Decimal("1e30")),
    *(np.float64(1e30), np.longdouble(1e30), np.array(10**30)),
    *(np.datetime64("2026"), np.str_("1e30")),
]
"""Numbers beyond 64 bits, and of kinds that are none."""


@pytest.mark.parametrize("field", sorted({*SamplingParams.__struct_fields__} - {"constraint"}))
def test_numbers_beyond_64_bits_are_refused_by_name(llm: Engine, field: str) -> None:
    """10**30 was an OverflowError of the serializer, np.longdouble a RecursionError, and 10**5000
    could not be written into the message."""
    for value in BEYOND:
        inner = [] if isinstance(value, np.ndarray) else [{value: 1.0}, {5: value}]
        for given in (value, [value], (5, [value]), np.array([value], object), *inner):
            wrong: Any = {field: given}
            with pytest.raises(InvalidRequest) as raised:
                llm.generate([[5]], SamplingParams(**wrong))
            assert raised.value.message.startswith("prompt 0: ")
            assert field in raised.value.message and len(raised.value.message) < 400
    (generated,) = llm.generate([[5]], SamplingParams(max_tokens=2**64 - 1, ignore_eos=True))
    assert len(generated.completions[0].token_ids) == TEXT_MODEL.n_ctx


def test_prompts_and_settings_beyond_64_bits_are_refused(llm: Engine) -> None:
    for value in BEYOND:
        if not isinstance(value, str):
            with pytest.raises(InvalidRequest, match="prompt 0"):
                llm.generate([[value]])
        for name in ("num_slots", "max_waiting"):
            with pytest.raises(ConfigError, match=name):
                Engine(**{name: value})


def test_a_wrong_parameter_names_its_prompt(llm: Engine) -> None:
    wrong: Any = {"n": "2"}
    for run in (llm.generate, lambda *given: list(llm.stream(*given))):
        with pytest.raises(InvalidRequest, match=r"^prompt 1: n must be an integer; got '2'"):
            run([[5], [6]], [SamplingParams(), SamplingParams(**wrong)])


def test_a_misspelled_parameter_is_named_with_the_one_it_is_close_to() -> None:
    wrong: Any = {"maxTokens": 3}
    message = "^'maxTokens' is not a field of SamplingParams; did you mean 'max_tokens'"
    with pytest.raises(TypeError, match=message):
        SamplingParams(**wrong)


def test_numbers_and_lists_of_numpy_are_taken_as_meant(llm: Engine) -> None:
    meant = SamplingParams(n=2, max_tokens=5, seed=3, logit_bias={5: 1.0}, stop_token_ids=(7,))
    given: Any = {"n": 2.0, "max_tokens": np.int64(5), "seed": np.uint8(3)}
    given |= {"logit_bias": {np.int32(5): np.float32(1)}, "stop_token_ids": np.array([7])}
    results = [llm.generate([[5]], params) for params in (meant, SamplingParams(**given))]
    assert tokens(results[0][0].completions) == tokens(results[1][0].completions)


def test_named_tokens_and_the_whole_vocabulary_are_scored(text_model: Path) -> None:
    llm, steps = make(text_model, max_logprobs=-1)
    size, ids = steps.model.vocab_size, [7, 280, 5]
    given: dict[str, Any] = {"max_tokens": 4, "seed": 3, "ignore_eos": True}
    every = SamplingParams(**given, logprobs=-1, prompt_logprobs=-1)
    named: Any = {"logprob_token_ids": np.array(ids), "prompt_logprob_token_ids": ids[:1]}
    (whole,), (few,) = (llm.generate([[5, 6, 7]], asked) for asked in
                        (every, SamplingParams(**given, **named)))  # fmt: skip
    for all_scores, scores, own in (
        (whole.completions[0].scores, few.completions[0].scores, ids),
        (whole.prompt_scores, few.prompt_scores, ids[:1]),
    ):
        assert all_scores is not None and scores is not None
        assert (np.sort(all_scores.top_ids) == np.arange(size)).all()
        assert scores.top_ids.tolist() == [own] * len(scores.top_ids)
        places = np.argsort(all_scores.top_ids)[:, own]
        expected = np.take_along_axis(all_scores.top_logprobs, places, axis=1)
        assert scores.top_logprobs.tolist() == expected.tolist()
    (streamed,) = llm.stream([[5, 6, 7]], SamplingParams(**given, logprob_token_ids=(7, 280, 5)))
    assert streamed.scores is not None and few.completions[0].scores is not None
    assert (streamed.scores.top_logprobs == few.completions[0].scores.top_logprobs).all()


def test_prompts_are_scored(llm: Engine) -> None:
    (result,) = llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=0, prompt_logprobs=3))
    scores = result.prompt_scores
    assert scores is not None
    assert len(scores.logprobs) == len(scores.ranks) == 3
    assert scores.top_ids.shape == scores.top_logprobs.shape == (3, 3)
    assert (scores.top_logprobs[:, 0] >= scores.logprobs - 1e-6).all()
    assert [completion.finish_reason for completion in result.completions] == ["length"]
    (plain,) = llm.generate([[5, 6, 7, 8]])
    assert plain.prompt_scores is None and plain.completions[0].scores is None


def test_a_stop_token_is_among_the_ids_and_not_in_the_text(llm: Engine, text_model: Path) -> None:
    of: dict[str, Any] = {"max_tokens": 9, "seed": 3, "ignore_eos": True}
    (free,) = tokens(llm.generate("the cat", SamplingParams(**of))[0].completions)
    (result,) = llm.generate("the cat", SamplingParams(stop_token_ids=(free[4],), **of))
    (one,) = result.completions
    assert one.finish_reason == "stop"
    assert one.token_ids.tolist() == free[: free.index(free[4]) + 1]
    assert one.text == FolderTokenizer(text_model).decode(one.token_ids[:-1])


def test_progress_ends_with_everything(llm: Engine) -> None:
    progresses: list[GenerateProgress] = []
    params = SamplingParams(n=20, max_tokens=6)
    result = llm.generate(["the cat", "a"], params, on_progress=progresses.append)
    num_tokens = sum(len(ids) for each in result for ids in tokens(each.completions))
    last, finished = progresses[-1], [progress.finished for progress in progresses]
    assert last == (40, 40, num_tokens, 0)
    assert 0 < max(progress.running for progress in progresses) <= SLOTS
    assert finished == sorted(finished)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar(llm: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    given = [["the cat"], SamplingParams(n=9, max_tokens=6, ignore_eos=True)]
    for is_terminal, options, is_shown in (
        (True, {}, True),
        (True, {"progress": False}, False),
        (True, {"on_progress": lambda _: None}, False),
        (False, {}, False),
    ):
        stderr = Terminal() if is_terminal else io.StringIO()
        monkeypatch.setattr(sys, "stderr", stderr)
        llm.generate(*given, **options)  # type: ignore[arg-type]
        shown = stderr.getvalue()
        assert ("generating" in shown and "100%" in shown and "54 tokens" in shown) == is_shown
        assert is_shown or not shown.replace("\x1b[?25l", "").strip("\n\x1b[?25h")


def test_results_are_views_and_a_table_of_arrow(
    llm: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=3, max_tokens=9, logprobs=0)
    _, generated = llm.generate(["a", "the cat"], params)
    for made in generated.completions:
        for array in (made.token_ids, made.logprobs):
            assert array is not None and isinstance(array.base, bytes)
            assert not array.flags.writeable
    table = pyarrow.table(generated)
    assert table.to_pylist() == [
        {
            "prompt": 1,
            "index": index,
            "token_ids": made.token_ids.tolist(),
            "finish_reason": made.finish_reason,
            "logprobs": made.logprobs.tolist() if made.logprobs is not None else None,
        }
        for index, made in enumerate(generated.completions)
    ]
    assert table.schema.field("token_ids").type == pyarrow.large_list(pyarrow.int32())
    (plain,) = llm.generate(["a"])
    assert "logprobs" not in pyarrow.table(plain).column_names
    assert len(pyarrow.table(Generated(plain.prompt_token_ids, []))) == 0
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="needs pyarrow, which is not installed"):
        plain.__arrow_c_stream__()


def test_begins_no_more_prompts_than_a_step_has_rows(llm: Engine) -> None:
    """All slots were filled before the first completion came."""
    running: list[int] = []
    llm.generate(
        [[5, 6]] * 40, SamplingParams(max_tokens=6), on_progress=lambda now: running.append(now[3])
    )
    assert max(running) == 8


def test_a_stream_reads_only_as_far_ahead_as_it_has_use_for(llm: Engine) -> None:
    read = 0

    def endless() -> Iterator[list[int]]:
        nonlocal read
        for read in itertools.count(1):
            yield [5, read % 300]

    result = list(itertools.islice(llm.stream(endless(), SamplingParams(max_tokens=3)), 100))
    assert len({completion.prompt for completion in result}) == 100
    assert read <= 100 + 2 * SLOTS + 2 * 64
    for completion in result[:5]:
        (alone,) = llm.generate([[5, (completion.prompt + 1) % 300]], SamplingParams(max_tokens=3))
        assert tokens(alone.completions) == [completion.token_ids.tolist()]


def test_a_stream_begins_with_few_so_that_the_first_come_soon(
    llm: Engine, steps: SteppedEngine
) -> None:
    """The page's example was silent for seconds: of 2,048 prompts, its 20 came after all others."""
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    begun = [steps.scheduler.num_left for _ in llm.stream([[5, 6]] * 30, params)]
    assert begun[:13] == [1] * 1 + [4] * 3 + [12] * 8 + [20], "then as many as a step has rows"


def test_one_at_a_time(llm: Engine) -> None:
    first = llm.stream(["the cat"] * 40, SamplingParams(max_tokens=20))
    next(first)
    with pytest.raises(EngineUnavailable, match="has not ended"):
        llm.generate(["the cat"])
    first.close()  # type: ignore[attr-defined]  # it is a generator
    assert len(llm.generate("the cat")) == 1
    llm.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        llm.generate("the cat")
    llm.close()


def test_a_refusal_names_the_prompt_and_leaves_nothing_behind(
    llm: Engine, steps: SteppedEngine
) -> None:
    good = SamplingParams(max_tokens=100)
    for prompts, params, kind, message in (
        (["the cat", [5] * 200], good, ContextTooLong, "prompt 1: .* your prompt has 200 tokens"),
        ([[5], [400]], good, InvalidRequest, "prompt 1: prompt_token_ids holds 400"),
        ([[5], []], good, InvalidRequest, "prompt 1: prompt_token_ids must be one or more"),
        ([5, 6], good, InvalidRequest, "prompt 0 must be a text or a list of token ids, got 5"),
        ([["a"]], good, InvalidRequest, "prompt 0 must be a text or a list of token ids"),
        ([[5], [[1, 2], [3]]], good, InvalidRequest, "prompt 1 must be a text or a list of token"),
        (["a", "\ud800"], good, InvalidRequest, "prompt 1 must be Unicode, got half a surrogate"),
        ([[5, 2**40]], good, InvalidRequest, "prompt 0 has ids beyond"),
        (["a"], SamplingParams(n=0), InvalidRequest, "prompt 0: n must be at least 1, got 0"),
        (["a"], SamplingParams(n=10**6), InvalidRequest, "n must be at most max_waiting"),
        (["a", "b"], [good], InvalidRequest, "as many as prompts: 2; got 1"),
    ):
        with pytest.raises(kind, match=message):
            llm.generate(prompts, params)  # type: ignore[arg-type]
        assert not steps.has_work
        assert steps.scheduler.table.num_owned == 0
    # Far behind what is read ahead, and nothing has been generated.
    before = steps.scheduler.latencies.num_sampled
    with pytest.raises(InvalidRequest, match="prompt 2000: prompt_token_ids holds 400"):
        llm.generate([[5]] * 2_000 + [[400]], good)
    assert steps.scheduler.latencies.num_sampled == before
    with pytest.raises(InvalidRequest, match="prompt_logprobs must be None here, got 0"):
        list(llm.stream(["a"], SamplingParams(prompt_logprobs=0)))


def test_without_a_tokenizer_there_are_ids(text_model: Path, tmp_path: Path) -> None:
    with make(tmp_path)[0] as nameless:
        (result,) = nameless.generate([[5, 6]])
        with pytest.raises(InvalidRequest, match="this model has no tokenizer"):
            result.completions[0].text  # noqa: B018
        parts = asyncio.run(anext(nameless.stream_tokens([5, 6])))
        assert (parts.text, len(parts.token_ids)) == ("", 1)
        with pytest.raises(InvalidRequest, match="this model has no tokenizer"):
            nameless.generate(["the cat"])
    (tmp_path / "tokenizer.json").write_text("{}")
    with make(tmp_path)[0] as broken, pytest.raises(CheckpointError, match="is not a tokenizer"):
        broken.generate(["the cat"])


def test_settings_are_those_of_the_engine(tmp_path: Path) -> None:
    for settings, message in (
        ({"num_slot": 5}, "Engine: unknown setting 'num_slot'; did you mean 'num_slots'"),
        ({"num_slots": "5"}, "Engine: num_slots = '5': must be an integer; got a string"),
        ({"dtype": 5}, "Engine: dtype = 5"),
        ({"num_slots": -1}, "num_slots must be 0"),
        ({"drain_s": 1.0}, "drain_s is a setting of the engine process"),
    ):
        with pytest.raises(ConfigError, match=message):
            Engine(tmp_path, **settings)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Engine(tmp_path)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where a shell started the tests in the background, ignoring it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_for_the_step_and_the_engine_stays_whole(
    llm: Engine, steps: SteppedEngine
) -> None:
    num_steps = 0

    def interrupt(_progress: GenerateProgress) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the cat"] * 9, SamplingParams(max_tokens=50), on_progress=interrupt)
    assert num_steps == 3
    assert steps.scheduler.table.num_owned == 0
    runner = steps.runner
    launch = runner.launch

    def interrupted(batch: object) -> object:
        signal.raise_signal(signal.SIGINT)  # in the middle of a step
        return launch(batch)  # type: ignore[arg-type]

    runner.launch = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the cat"] * 9)
    del runner.launch
    first, second = llm.generate(["the cat", "the cat"])
    assert tokens(first.completions) == tokens(second.completions)


class BrokenRunner(NumpyRunner):
    """A device that takes steps and never ends the fourth and later ones."""

    steps = 0

    def launch(self, batch: Batch) -> NumpyLaunched:
        launched = super().launch(batch)
        self.steps += 1
        if self.steps >= 4:
            launched.wait = self._fail  # type: ignore[method-assign]
        return launched

    def _fail(self) -> NoReturn:
        raise RuntimeError("the device fell off the bus")


def test_a_device_that_breaks_is_an_error_for_whoever_asked_each_time(text_model: Path) -> None:
    """And not one about iterators that are still open, nor a wait without end."""
    config = EngineConfig(num_slots=SLOTS, max_step_rows=8, max_step_tokens=64, model=text_model)
    runner = BrokenRunner(tiny_weights(config=TEXT_MODEL), SLOTS)
    with Engine.over(SteppedEngine(TEXT_MODEL, runner, config), config) as broken:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="fell off the bus"):
                broken.generate(["the cat"], SamplingParams(n=20, max_tokens=40))
