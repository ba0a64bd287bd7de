"""The Python API: `Engine(model).generate(prompts, SamplingParams(n=10_000))`, in this process.

A model folder, its runner and the stepped engine under one name, for whoever writes a program and
no server. A completion is the one that the server gives for the same prompt, parameters and seed.
Nothing in `engine` imports this.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, closing, contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from srm.engine.config import DEMO_MODEL, EngineConfig
from srm.engine.device.runner import make_runner
from srm.engine.messages import PROMPT, Output, SamplingParams, count_alternatives
from srm.engine.process.engine import Engine as SteppedEngine
from srm.engine.python.pending_prompt import PendingPrompt, Prompt, in_turn, naming
from srm.engine.python.request_output import Completion, CompletionPart, Generated
from srm.engine.python.state import State
from srm.engine.python.token_streams import TokenStreams
from srm.engine.python.tokenizer import FolderTokenizer
from srm.engine.python.tree import Score, check_params, grow
from srm.engine.python.until import Selection, Until
from srm.engine.tree_search import Tree, TreeNode, TreeSearch
from srm.engine.weights.checkpoint import load_checkpoint
from srm.errors import (
    UNDECODABLE,
    ConfigError,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    in_words,
    show_value,
)
from srm.progress import count_seconds, show_progress
from srm.settings import build_struct

_DEFAULTS = SamplingParams()
_Given = TypeVar("_Given", bound=msgspec.Struct)
_encode = msgspec.msgpack.Encoder().encode
_OF_THE_PROCESS = (
    *("drain_s", "request_timeout_s", "step_timeout_s", "log_level", "log_format"),
    *("snapshot_dir", "snapshot_interval_s", "snapshot_s"),
)
"""Settings of the engine process, which mean nothing here."""


class GenerateProgress(NamedTuple):
    """Progress of `generate`."""

    finished: int
    """Completions that have ended."""
    total: int
    """Completions asked for."""
    tokens: int
    """Tokens sampled so far."""
    running: int
    """Completions that are being sampled."""


class Engine:
    """A model, ready to complete prompts. Not thread-safe; one `generate` or `stream` at a time, or
    any number of `stream_tokens`."""

    def __init__(self, model: str | Path = DEMO_MODEL, **settings: Any) -> None:
        """Load a model folder and its step graph, compiled now or before. `settings` are those of
        EngineConfig, such as `device`. Raises ConfigError or CheckpointError."""
        for name in _OF_THE_PROCESS:
            if name in settings:
                raise ConfigError(f"{name} is a setting of the engine process; there is none here")
        given = {name: _plain(value) for name, value in settings.items()}
        config = build_struct(EngineConfig, {"model": Path(model), **given}, "Engine", strict=True)
        with count_seconds(f"loading {config.model}"):
            weights = load_checkpoint(config.model)
        runner = make_runner(weights, config)
        steps = SteppedEngine(weights.config, runner, config, weights.fingerprint)
        self._take(steps, config, runner.close)

    @classmethod
    def over(cls, steps: SteppedEngine, config: EngineConfig) -> Engine:
        """Make one of an engine that is there already, which its owner closes."""
        engine = cls.__new__(cls)
        engine._take(steps, config, lambda: None)
        return engine

    def _take(self, steps: SteppedEngine, config: EngineConfig, close: Callable[[], None]) -> None:
        self._steps: SteppedEngine | None = steps
        self._close = close
        self._step_rows, _ = config.step_limits(steps.model)
        self._is_busy = False
        self._tokenizer = FolderTokenizer(config.model)
        self._step = steps.step_overlapped if config.overlap else steps.step
        self._streams = TokenStreams(steps, self._step, self._tokenizer)

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = _DEFAULTS,
        *,
        on_progress: Callable[[GenerateProgress], None] | None = None,
        progress: bool = True,
        until: Until | None = None,
        state: State | None = None,
    ) -> list[Generated]:
        """Complete every prompt, in the order given; one text alone is one prompt.

        `params` are all prompts' or one for each. A seed is that of every prompt that has it: equal
        prompts with equal parameters have equal completions. `on_progress` is called after every
        step; without it, a terminal shows a bar on standard error unless `progress` is False.
        `until` says when a prompt needs no more of its n samples. Prompts follow the tokens of
        `state`, which are not fed; an empty one is its end.
        Raises RequestError, which names the prompt at fault; nothing is left running then.
        """
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        each = list(_checked(params, len(given)))
        if len(each) != len(given):
            raise InvalidRequest(
                f"params must be one or as many as prompts: {len(given)}; got {len(each)}", "params"
            )
        if not isinstance(until, Until | None):
            raise InvalidRequest(f"until must be an Until, got {show_value(until)}", "until")
        steps, completions = self._open(), [list[Completion]() for _ in given]
        total, before = sum(params.n for params in each), steps.scheduler.latencies.num_sampled
        selection, num_chosen = (Selection(until, each) if until else None), 0

        def report() -> None:
            scheduler = steps.scheduler
            tokens = scheduler.latencies.num_sampled - before
            finished = num_chosen + (selection.num_unneeded if selection else 0)
            tell(finished, f"{tokens:,} tokens")
            if on_progress is not None:
                on_progress(GenerateProgress(finished, total, tokens, scheduler.table.num_owned))

        each_given = zip(given, _counted(each, steps), strict=True)
        asked = list(in_turn(each_given, self._tokenizer, **_begun(state, steps)))
        for pending in asked:  # so that none is refused once others have been generated
            with naming(pending):
                steps.scheduler.check(pending.request)
        is_shown = progress and on_progress is None and sys.stderr.isatty()
        with (
            show_progress("generating", total, is_shown=is_shown) as tell,
            closing(self._run(steps, iter(asked), report, self._step_rows, selection)) as made,
        ):
            for completion in made:
                num_chosen += 1
                completions[completion.prompt].append(completion)
        return [pending.generated(completions[pending.number]) for pending in asked]

    def state(self, prompt: Prompt, state: State | None = None) -> State:
        """Return what the model remembers of a prompt, which follows the tokens of `state`. Raises
        as `generate`."""
        steps = self._open()
        asked = iter([(prompt, SamplingParams(max_tokens=0))])
        begun = _begun(state, steps)
        (pending,) = in_turn(asked, self._tokenizer, **begun, returns_state=True)
        with closing(self._run(steps, iter([pending]), lambda: None, 1)) as ended:
            for _ in ended:
                pass
        (output,) = pending.parts[PROMPT]
        status = steps.status()
        return State(
            token_ids=np.frombuffer(pending.request.prompt_token_ids, np.int32),
            values=np.frombuffer(output.state, np.float32),
            fingerprint=status.fingerprint,
            arithmetic=status.arithmetic,
        )

    def tree(
        self,
        prompt: Prompt,
        tree: Tree,
        params: SamplingParams = _DEFAULTS,
        *,
        score: Score | None = None,
        state: State | None = None,
    ) -> list[TreeNode]:
        """Grow a tree of what may follow a prompt, which follows the tokens of `state`; return its
        nodes in the order in which they came.

        `params` say how nodes are sampled; `tree` says how many and how long. Nodes of the highest
        `score`, called once with each, are expanded first; by default it is their log-probability.
        The same tree, prompt, parameters and scores make the same nodes. Raises RequestError.
        """
        steps = self._open()
        if not isinstance(tree, Tree):
            raise InvalidRequest(f"tree must be a Tree, got {show_value(tree)}", "tree")
        (checked,) = _checked(params, 1)
        asked = iter([(prompt, check_params(checked, tree, score))])
        (pending,) = in_turn(asked, self._tokenizer, **_begun(state, steps))
        search = TreeSearch(
            _typed(tree, "tree."), steps.model, pending.request, self._tokenizer.decode
        )
        search.tree.check_fits(steps.status())
        with naming(pending):
            steps.scheduler.check(pending.request)
            steps.scheduler.check(search.request(search.prompt, ""))
        self._is_busy = True
        try:
            return grow(search, steps, self._step_uninterrupted, score)
        finally:
            self._end_all(steps)

    def stream(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] = _DEFAULTS,
    ) -> Iterator[Completion]:
        """Yield completions as they end, in whatever order, of prompts that may be without end.

        Prompts are read while fewer completions are under way than a step has rows: at first than a
        sixteenth, so that the first ones end soon, then two more for each that ended. Leaving the
        loop cancels the rest once the iterator is closed. Raises as `generate`, and refuses
        `prompt_logprobs`.
        """
        given = iter([prompts] if isinstance(prompts, str) else prompts)
        steps, each = self._open(), map(_streamed, _checked(params))
        asked = in_turn(zip(given, _counted(each, steps), strict=False), self._tokenizer)
        first = -(-self._step_rows // 16)
        with closing(self._run(steps, asked, lambda: None, first)) as completions:
            yield from completions

    async def stream_tokens(
        self, prompt: Prompt, params: SamplingParams = _DEFAULTS
    ) -> AsyncGenerator[CompletionPart, None]:
        """Yield a prompt's new tokens as they are sampled, of all its samples as they come.

        Any number of tasks of one event loop may do so at once; steps run in a thread. Closing the
        iterator, or cancelling its task, frees the slots. Raises as `stream`; StepFailed if the
        device fails, and EngineUnavailable once the engine is closed.
        """
        steps = self._open(is_shared=True)
        each = _counted(map(_streamed, _checked(params, 1)), steps)
        (pending,) = in_turn(zip([prompt], each, strict=True), self._tokenizer)
        async with aclosing(self._streams.read(pending)) as parts:
            async for part in parts:
                yield part

    def close(self) -> None:
        """Free the model's memory; nothing can be generated any more."""
        if self._steps is not None:
            self._steps = None
            try:
                with _uninterrupted():
                    self._streams.close()
            finally:
                self._close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, is_shared: bool = False) -> SteppedEngine:
        """Return the engine for one call alone, or for another token stream."""
        if self._steps is None:
            raise EngineUnavailable("this engine was closed")
        if self._is_busy or (self._streams.is_open and not is_shared):
            raise EngineUnavailable(
                "another generate() or stream of this engine has not ended: close() the iterator"
            )
        if not is_shared:
            self._streams.drain()
        return self._steps

    def _run(
        self,
        steps: SteppedEngine,
        asked: Iterator[PendingPrompt],
        after_step: Callable[[], None],
        first: int,
        selection: Selection | None = None,
    ) -> Generator[Completion, None, None]:
        """Yield completions as they end, or as they are selected. Takes no more prompts than steps
        have use for: those of `first` completions, then two more for each that ended."""
        running: dict[str, PendingPrompt] = {}
        decode = self._tokenizer.decode
        self._is_busy = True
        try:
            upcoming = next(asked, None)
            while upcoming is not None or steps.has_work:
                most = min(self._step_rows, first)
                while upcoming is not None and self._add(steps, upcoming, most, selection):
                    running[upcoming.request.id] = upcoming
                    upcoming = next(asked, None)
                for output in self._step_uninterrupted():
                    pending = running.get(output.id)  # none: all that it needs has ended before
                    if pending is None or (made := pending.add_output(output, decode)) is None:
                        continue
                    first += 2
                    yield from [made] if selection is None else selection.add(made)
                    if not pending.unfinished or (selection and selection.is_over(pending.number)):
                        del running[output.id]
                if selection is not None:
                    selection.choose_samples(steps)
                after_step()
        finally:
            self._end_all(steps)

    def _step_uninterrupted(self) -> list[Output]:
        with _uninterrupted():
            return self._step()

    def _end_all(self, steps: SteppedEngine) -> None:
        """End what runs, so that the next call has the engine for itself."""
        self._is_busy = False  # whatever a broken device does below
        with _uninterrupted():
            for request_id in steps.scheduler.request_ids():
                steps.abort(request_id)
            while steps.has_work:
                steps.step()

    def _add(
        self,
        steps: SteppedEngine,
        asked: PendingPrompt,
        most: int,
        selection: Selection | None,
    ) -> bool:
        """Add a request if fewer than `most` completions are under way, and there is room. Raises
        RequestError, which names the prompt."""
        num_unfinished = steps.scheduler.num_waiting + steps.scheduler.table.num_owned
        if num_unfinished >= most:
            return False  # more would not be faster, and would put off the first completions
        try:
            with naming(asked):
                request = asked.request
                steps.add(request if selection is None else selection.hold_back(request))
        except Overloaded:
            return False
        return True


def _checked(
    params: SamplingParams | Iterable[SamplingParams], count: int | None = None
) -> Iterator[SamplingParams]:
    """Yield parameters of each prompt, `count` if given. Raises InvalidRequest for other types."""
    if isinstance(params, SamplingParams):
        known = _typed(params, "prompt 0: ")
        yield from repeat(known) if count is None else repeat(known, count)
        return
    # A dict's keys are none, but it is the dict that is wrong.
    is_list = isinstance(params, Iterable) and not isinstance(params, Mapping)
    for number, each in enumerate(params if is_list else [params]):
        if not isinstance(each, SamplingParams):
            raise InvalidRequest(
                f"params must be SamplingParams, or one for each prompt; got {type(each).__name__}",
                "params",
            )
        yield _typed(each, f"prompt {number}: ")


def _typed(given: _Given, where: str) -> _Given:
    """Return a struct with fields of the declared types, which Python does not check: numpy's
    numbers and lists are taken as meant. Raises InvalidRequest, which names place and field."""
    fields = {}
    for field in msgspec.structs.fields(type(given)):
        value = getattr(given, field.name)
        try:
            fields[field.name] = msgspec.convert(_plain(value), field.type)
            _encode(fields[field.name])  # what is beyond 64 bits cannot be sent
        except (*UNDECODABLE, TypeError, OverflowError) as error:
            fault = in_words(error, field.name).partition("; got ")[0]
            if isinstance(error, OverflowError):
                fault = f"{field.name} must be within 64 bits"
            elif get_origin(field.type) is Literal:
                fault = f"{field.name} must be {' or '.join(get_args(field.type))}"
            raise InvalidRequest(f"{where}{fault}; got {show_value(value)}", field.name) from None
    return type(given)(**fields)


def _plain(value: Any) -> Any:
    """Return Python's own numbers, lists and dicts for those of numpy; 2.0 is 2."""
    if isinstance(value, np.longdouble):
        return _plain(float(value))
    if isinstance(value, np.number | np.bool_ | np.str_ | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):  # a date, which is no number
        return str(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _counted(each: Iterable[SamplingParams], steps: SteppedEngine) -> Iterator[SamplingParams]:
    return (count_alternatives(params, steps.model.vocab_size) for params in each)


def _begun(state: State | None, steps: SteppedEngine) -> dict[str, Any]:
    if state is None:
        return {}
    if not isinstance(state, State):
        raise InvalidRequest(f"state must be a State, got {show_value(state)}", "state")
    return {"before": state.token_ids, **state.request_fields(steps.status())}


def _streamed(params: SamplingParams) -> SamplingParams:
    if params.prompt_logprobs is not None:
        raise InvalidRequest(
            f"prompt_logprobs must be None here, got {params.prompt_logprobs}: generate() has them",
            "prompt_logprobs",
        )
    return params


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the block is left: a step is done or not begun."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)
