"""Token streams of the Python API: requests whose new tokens are awaited in an event loop, while a
thread makes the steps."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import numpy as np

from srm.engine.messages import Output
from srm.engine.process.engine import Engine as SteppedEngine
from srm.engine.python.pending_prompt import PendingPrompt, naming
from srm.engine.python.request_output import CompletionPart, token_scores
from srm.engine.python.tokenizer import FolderTokenizer
from srm.engine.steps.batch import I32
from srm.errors import EngineUnavailable, RequestError, SRMError, StepFailed

_loop_ended = partial(
    EngineUnavailable, "this stream's event loop has ended, or another one has begun to read"
)


class TokenStreams:
    """Requests on one engine that are read with `async for`, in one event loop at a time. All
    methods are for one thread."""

    def __init__(
        self,
        steps: SteppedEngine,
        step: Callable[[], list[Output]],
        tokenizer: FolderTokenizer,
    ) -> None:
        self._steps, self._step, self._tokenizer = steps, step, tokenizer
        self._ids = map(str, itertools.count())
        self._unread: dict[str, asyncio.Queue[Output | SRMError]] = {}  # by request
        self._added: list[PendingPrompt] = []  # since the last turn
        self._has_left = False  # whether a reader has, since the last turn
        self._loop: asyncio.AbstractEventLoop | None = None  # that of all readers
        self._driver: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "srm-steps")  # started when first used

    @property
    def is_open(self) -> bool:
        """Whether any stream has not ended."""
        return bool(self._unread)

    async def read(self, asked: PendingPrompt) -> AsyncGenerator[CompletionPart, None]:
        """Yield the new tokens of a prompt. Raises RequestError if the engine refuses it,
        StepFailed if a step fails, EngineUnavailable if the engine is closed."""
        loop, unfinished = asyncio.get_running_loop(), asked.unfinished
        if self._loop is not loop:  # another asyncio.run, after one that was left in the middle
            self._fail(_loop_ended)
            self._loop, self._driver = loop, None
        request = msgspec.structs.replace(asked.request, id=next(self._ids), emit="delta")
        unread = self._unread[request.id] = asyncio.Queue()
        self._added.append(PendingPrompt(asked.number, request, unfinished))
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive(loop))
        undecided: defaultdict[int, list[I32]] = defaultdict(list)
        try:
            while True:  # also of no samples, which are refused
                output = await unread.get()
                if isinstance(output, SRMError):
                    raise output
                unfinished -= output.finish_reason is not None
                is_scored = request.params.logprobs is not None
                yield CompletionPart(
                    index=output.index,
                    token_ids=np.frombuffer(output.token_ids, np.int32),
                    text=self._add_text(undecided[output.index], output),
                    finish_reason=output.finish_reason,
                    scores=token_scores(output) if is_scored else None,
                )
                if not unfinished:
                    break
        finally:
            self._has_left |= self._unread.pop(request.id, None) is not None and unfinished > 0

    def drain(self) -> None:
        """End all requests, after the step under way."""
        if self._driver is not None:
            self._added, self._has_left = [], False
            self._thread.submit(self._turn, [], set()).result()

    def close(self) -> None:
        """End all requests with an error, and the thread."""
        self._fail(partial(EngineUnavailable, "this engine was closed while a stream was read"))
        try:
            self.drain()
        finally:
            self._thread.shutdown()

    async def _drive(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the thread make steps as long as there are readers."""
        make_error: Callable[[], SRMError] = _loop_ended  # unless there is another reason
        try:
            while self._loop is loop and (self._has_left or self._has_work):
                added, self._added, self._has_left = self._added, [], False
                turn = loop.run_in_executor(self._thread, self._turn, added, {*self._unread})
                for request_id, output in await turn:
                    if request_id in self._unread:
                        self._unread[request_id].put_nowait(output)
        except Exception as error:  # noqa: BLE001 - whatever a device that breaks raises
            make_error = partial(StepFailed, f"a step failed while a stream was read: {error!r}")
        finally:
            if self._loop is loop:
                self._fail(make_error)

    def _turn(
        self, added: list[PendingPrompt], wanted: set[str]
    ) -> list[tuple[str, Output | SRMError]]:
        """Abort what is not wanted, add requests and make a step; return what has come of each."""
        steps, results = self._steps, list[tuple[str, Output | SRMError]]()
        for request_id in steps.scheduler.request_ids():
            if request_id not in wanted:
                steps.abort(request_id)
        for asked in (asked for asked in added if asked.request.id in wanted):
            try:
                with naming(asked):
                    steps.add(asked.request)
            except RequestError as error:
                results.append((asked.request.id, error))
        outputs = self._step() if steps.has_work else []
        if not steps.scheduler.num_requests:
            outputs += steps.settle()  # there may be no turn after this one
        return results + [(output.id, output) for output in outputs]

    @property
    def _has_work(self) -> bool:
        """Whether a turn would do anything for those who read."""
        return self.is_open and bool(self._added or self._steps.scheduler.num_requests)

    def _fail(self, make_error: Callable[[], SRMError]) -> None:
        """End each stream with an error of its own, since a traceback is added to it."""
        for unread in self._unread.values():
            if self._loop is not None and not self._loop.is_closed():
                unread.put_nowait(make_error())
        self._unread.clear()

    def _add_text(self, undecided: list[I32], output: Output) -> str:
        """Return the text that new tokens decide, and keep those that end within a character."""
        is_stop = output.finish_reason == "stop"
        undecided.append(np.frombuffer(output.token_ids, np.int32)[: -1 if is_stop else None])
        text = self._tokenizer.decode(np.concatenate(undecided)) if self._tokenizer.exists else ""
        if text.endswith("\ufffd") and output.finish_reason is None:
            return ""
        undecided.clear()
        return text
