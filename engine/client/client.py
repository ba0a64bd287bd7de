"""EngineClient: requests and aborts from an API process's event loop to the engine processes.

Keeps: a request ends in all its terminal Outputs or in an error, never in silence; and leaving the
block of `open`, however it happens, aborts what still runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from functools import partial

import msgspec

from srm.engine.client.connection import EngineConnection
from srm.engine.client.streams import Finder, Stream, Streams, Write
from srm.engine.messages import (
    HEARTBEAT_S,
    Abort,
    Control,
    Done,
    Hello,
    HoldWeights,
    LoadWeights,
    Output,
    Pause,
    PutWeights,
    ReadSample,
    Request,
    Resume,
    Running,
    Status,
    TakeSnapshot,
    ToEngine,
)
from srm.errors import EngineError, EngineUnavailable, InvalidRequest, NotFound
from srm.tasks import Fail, beside, end_process, task_group

log = logging.getLogger(__name__)

ENGINE_TIMEOUT_S = 10.0
"""Seconds without an answer to a heartbeat after which an engine counts as gone; and for which
engines that start are waited for once another one is there."""
AWAY_S = 60.0
"""Seconds without an engine after which others run the durable requests that it would have."""


class EngineClient:
    """One API process's connections to the engines. Belongs to one event loop.

    Of several engines, each with the same weights, one that is lost takes nothing along: another
    one runs again what it had.
    """

    def __init__(
        self,
        endpoint: str,
        heartbeat_s: float = HEARTBEAT_S,
        engine_timeout_s: float = ENGINE_TIMEOUT_S,
        away_s: float = AWAY_S,
    ) -> None:
        """`endpoint` has that of each engine, with commas between them."""
        endpoints = endpoint.split(",")
        self.streams = Streams(*(partial(self._send, number) for number in range(len(endpoints))))
        self.engines = [
            EngineConnection(
                *(endpoint, heartbeat_s, engine_timeout_s),
                *(self.streams.receive, self.streams.settle, partial(self._change, engine_index)),
                renews=len(endpoints) > 1,
                label=str(engine_index) if len(endpoints) > 1 else "",
            )
            for engine_index, endpoint in enumerate(endpoints)
        ]
        self._heartbeat_s, self._away_s = heartbeat_s, away_s
        self._changes: set[asyncio.Task[Done]] = set()  # of weights, whoever still waits for them
        self._gone_at = [time.monotonic()] * len(self.engines)  # when each was there last
        self.is_closed = False
        """Whether `close` was called: nothing is received any more."""
        self.status: Status | None = None
        """Last status of all reachable engines, combined; None while none is reachable, and at the
        start until all have answered, or until ENGINE_TIMEOUT_S after the first answer."""
        self._is_leaving = False
        self._heard_at: float | None = None  # when the first engine answered
        self._has_begun = False
        self.fingerprints: dict[int, str] = {}
        """By weights_version: those of versions that the engines use or have used."""
        self._labels: dict[int, str] = {}  # the same, of those that have one
        self._has_status = asyncio.Event()

    @property
    def losses(self) -> int:
        """How often an engine became unreachable."""
        return sum(engine.losses for engine in self.engines)

    def label(self, weights_version: int) -> str:
        """Return what its trainer calls a version, else its number."""
        return self._labels.get(weights_version, str(weights_version))

    async def connect(self, fail: Fail = end_process) -> None:
        """Start talking to the engines, which need not be there yet. `fail` is called if that
        cannot go on: by default the process ends, which would get no message any more."""
        for engine in self.engines:
            await engine.connect(fail)

    async def wait_until_ready(self, timeout_s: float) -> Status:
        """The first status; EngineUnavailable if it takes longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_status.wait()
        except TimeoutError:
            raise EngineUnavailable(f"no engine answered within {timeout_s:g} s") from None
        assert self.status is not None
        return self.status

    async def refresh(self) -> Status:
        """Return the status that engines have by now: another process may have changed it since
        they were asked last. Raises EngineUnavailable while none answers."""
        hello = Hello(uuid.uuid4().hex)
        await asyncio.gather(
            *(engine.ask(hello) for engine in self.engines), return_exceptions=True
        )
        return self.require_status()

    def require_status(self) -> Status:
        """Return `status`. Raises EngineUnavailable, which says why, while there is none."""
        if self.status is None:
            reasons = [engine.why_away for engine in self.engines]
            raise EngineUnavailable(next(filter(None, reasons), "the engine is not ready"))
        return self.status

    async def close(self) -> None:
        """Stop talking. Requests still running raise EngineUnavailable; no Abort is sent for them:
        durable ones go on, for whoever sends them again."""
        self.is_closed = True
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)
        for number in range(len(self.engines)):
            self.streams.spread.note_status(number, None)  # none of them is to run anything again
        for engine in self.engines:
            await engine.close()

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Run a request; yields its Outputs until each of its n completions has ended.

        Raises the RequestError the engine refuses it with, EngineUnavailable when the engine is
        not there, drains or goes away, StepFailed when it breaks.
        """
        assert request.emit != "tokens", "Tokens are no Outputs: open a stream"
        with self.open([request]) as stream:
            while stream.unfinished:
                await stream.wait()
                for _, output in stream.take_outputs():
                    yield output

    def open(
        self,
        requests: Sequence[Request],
        says_versions: bool = False,
        finder: Finder | None = None,
    ) -> Stream:
        """Run requests as `Streams.open` does, until each completion has ended or the block of the
        stream is left.

        Raises EngineUnavailable where there is no engine; the stream's `wait` raises all else.
        """
        self.require_status()
        for request in requests:
            if self.streams.has_request(request.id):
                raise InvalidRequest(f"id {request.id!r} is in use by a running request", "id")
        return self.streams.open(requests, says_versions, finder)

    def set_writer(self, write: Write) -> None:
        """See `Streams.set_writer`."""
        self.streams.set_writer(write)

    async def snapshot(self) -> Done:
        """Have every engine that is not away write a snapshot of durable requests; returns when
        all are on disk. Raises SnapshotError if one cannot be, and EngineUnavailable."""
        return _together(await self._ask_all(TakeSnapshot(uuid.uuid4().hex)))

    async def control(self, message: Control) -> Done:
        """Have every engine pause, resume, end requests or forget prefixes; returns when all have,
        but for those that have been away for long.

        Raises the error that one refuses it with, and EngineUnavailable where one is away or goes
        away: then none is paused by this, and all else is done by those that are there.
        """
        if not isinstance(message, Pause):
            for engine in self.engines:
                if engine.status is None and isinstance(message, Resume):
                    engine.send(message)  # to the one that takes its place, which is paused as well
            return _together(_all_done(await self._ask_each(message), "the others have done it"))
        if self._is_leaving:
            raise EngineUnavailable("the server is stopping: what runs is not paused")
        self._check_all_answer()
        answers = await self._ask_each(message)
        have_paused = [isinstance(answer, Done) for answer in answers.values()]
        if any(have_paused) and not all(have_paused):  # else another's pause would end
            await self._ask_each(_resume())
        return _together(_all_done(answers, "nothing is paused"))

    async def read_sample(self, of: str, prompt: int, index: int, share: str) -> Done:
        """Return the tokens that a running sample has by now, as `Engine.read_sample`: of the
        completion with this id, of whichever API process. Raises NotFound, and EngineUnavailable
        where one that may run it is away."""
        self.require_status()
        message = ReadSample(uuid.uuid4().hex, f"{of}-{prompt}", index, share)
        answers = (await self._ask_each(message)).values()
        done = [answer for answer in answers if isinstance(answer, Done)]
        if done:  # what an engine runs again for another one comes twice
            return max(done, key=lambda answer: len(answer.token_ids))
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        raise min(errors, key=lambda error: isinstance(error, NotFound))

    def leave(self) -> None:
        """Have what is paused go on, and refuse to pause it from now on: whoever would resume it is
        not let in any more. Called again and again, since others may pause."""
        self._is_leaving = True
        for engine in self.engines:
            if engine.status is not None and engine.status.paused:
                engine.send(_resume())

    async def load_weights(
        self, path: str, running: Running, label: str = "", within: str = ""
    ) -> Done:
        """Have all engines go on with the weights in this folder; returns when they do. Whoever
        asked may leave: the change is made all the same.

        `label` is what its trainer calls them; links lead to nothing outside of `within`, or of the
        folder itself.

        An engine that has been away for long begins with them once it is back. Raises the error
        that one refuses them with, SwapInProgress, and EngineUnavailable; then none does, unless
        the message says that this is not known.
        """
        is_staged = len(self.engines) > 1
        message = LoadWeights(uuid.uuid4().hex, path, running, is_staged, label, within)
        if not message.is_staged:
            return await self.engines[0].ask(message)
        change = asyncio.create_task(self._change_all(message))
        self._changes.add(change)
        change.add_done_callback(self._end_change)
        return await asyncio.shield(change)

    def _end_change(self, change: asyncio.Task[Done]) -> None:
        self._changes.discard(change)
        if not change.cancelled() and (error := change.exception()):
            log.warning("weights were not changed: %s", error)

    async def _change_all(self, message: LoadWeights) -> Done:
        """Stage the weights on all engines, then put them to use. Until the first one has put them
        they are dropped by all if anything goes wrong; then by none, and whoever missed that
        follows the note that it has left."""
        losses = {number: engine.losses for number, engine in self._present()}
        try:
            async with beside(self._hold(message.id, losses)):
                staged = await self._ask_all(message)
            versions = {engine.detail["weights_version"] for engine in staged}
            if len(versions) > 1:
                raise EngineUnavailable("the engines do not use the same weights yet: ask again")
            self._check_all_there(losses)
        except BaseException:
            for number in losses:
                self.engines[number].send(Abort(message.id))
            raise
        put = PutWeights(message.id)
        answers = await asyncio.gather(
            *(self.engines[number].ask(put) for number in losses), return_exceptions=True
        )
        done = [answer for answer in answers if isinstance(answer, Done)]
        errors = [
            (number, answer)
            for number, answer in zip(losses, answers, strict=True)
            if not isinstance(answer, Done)
        ]
        if not done:
            if not any(isinstance(error, EngineError) for _, error in errors):
                raise errors[0][1]  # each has said that it goes on as before
            why = f"whether weights were changed is not known: {errors[0][1]}"
            raise EngineUnavailable(f"{why}; /v1/admin/state says which are in use")
        for number, error in errors:
            log.warning(
                "weights version %s is in use; engine %d goes on with it too, but is behind: %s",
                *(done[0].detail["weights_version"], number, error),
            )
        return _together(done)

    async def _hold(self, change: str, losses: dict[int, int]) -> None:
        """Tell the engines, as long as this process turns, that the change is still wanted. Raises
        EngineUnavailable once one of them cannot make it."""
        while True:
            self._check_all_there(losses)
            for number in losses:
                self.engines[number].send(HoldWeights(change))
            await asyncio.sleep(self._heartbeat_s)

    def _check_all_there(self, losses: dict[int, int]) -> None:
        for number, count in losses.items():
            engine = self.engines[number]
            is_ready = engine.status is not None and engine.status.state == "ready"
            if not is_ready or engine.losses != count:
                why = f"engine {number} does not answer, has been lost, or drains"
                raise EngineUnavailable(f"{why}: no weights are changed")

    def _present(self) -> list[tuple[int, EngineConnection]]:
        """Return the engines and their numbers, but for those that have been away for long."""
        is_away = self.streams.spread.is_away
        return [each for each in enumerate(self.engines) if not is_away[each[0]]]

    def _check_all_answer(self) -> None:
        for number, engine in self._present():
            if engine.status is None and len(self.engines) > 1:
                raise EngineUnavailable(f"engine {number}: {engine.why_away}")

    async def _ask_each(self, message: Control) -> dict[int, Done | BaseException]:
        """Ask every engine that is not away; return what each one answers, or why it does not."""
        present = dict(self._present())
        asked = (engine.ask(message) for engine in present.values())
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return dict(zip(present, answers, strict=True))

    async def _ask_all(self, message: TakeSnapshot | LoadWeights) -> list[Done]:
        """Ask every engine, none of which may be away. Raises the first error."""
        self._check_all_answer()
        async with task_group() as group:
            tasks = [group.create_task(engine.ask(message)) for _, engine in self._present()]
        return [task.result() for task in tasks]

    def _send(self, engine_index: int, message: ToEngine) -> None:
        self.engines[engine_index].send(message)

    def _change(self, engine_index: int, why: str) -> None:
        """Take in a status, or the reason why an engine is lost."""
        status = self.engines[engine_index].status
        self.streams.spread.note_status(engine_index, None if self.is_closed else status)
        engines = [engine.status for engine in self.engines if engine.status is not None]
        if status is not None:
            self.fingerprints[status.weights_version] = status.fingerprint
            if status.label:
                self._labels[status.weights_version] = status.label
            self._has_begun = self._has_begun or self._may_begin(len(engines))
        self.status = _sum(engines) if engines and self._has_begun else None
        if self.status is not None:
            self._has_status.set()
        else:
            self._has_status.clear()
        if status is None:
            self.streams.lose(engine_index, lambda: EngineUnavailable(why))
        elif not self.is_closed:
            self._look_for_others()

    def _look_for_others(self) -> None:
        """Give up waiting for engines that are away for too long while another one is there."""
        now, is_away = time.monotonic(), self.streams.spread.is_away
        for number, engine in enumerate(self.engines):
            if engine.status is not None:
                self._gone_at[number] = now
            elif not is_away[number] and now - self._gone_at[number] >= self._away_s:
                is_away[number] = True
                away = f"engine {number} has not been there for {self._away_s:g} s"
                log.warning("%s: others run what batches would have it run", away)
                engine.give_up(away)

    def _may_begin(self, num_heard: int) -> bool:
        now = time.monotonic()
        self._heard_at = self._heard_at or now
        return num_heard == len(self.engines) or now - self._heard_at >= ENGINE_TIMEOUT_S


def _sum(statuses: list[Status]) -> Status:
    """Return the status of all these engines together."""
    if len(statuses) == 1:
        return statuses[0]
    totals = {
        name: sum(getattr(status, name) for status in statuses)
        for name in ("num_slots", "running", "waiting", "max_waiting", "steps", "sampled")
    }
    best = next((status for status in statuses if status.state == "ready"), statuses[0])
    retry_after_s = max(status.retry_after_s for status in statuses)
    version = max(statuses, key=lambda status: status.weights_version)
    return msgspec.structs.replace(
        best,
        retry_after_s=retry_after_s,
        weights_version=version.weights_version,
        fingerprint=version.fingerprint,
        changing=max(status.changing for status in statuses),
        held_s=max(status.held_s for status in statuses),
        paused=any(status.paused for status in statuses),
        **totals,
    )


def _resume() -> Resume:
    return Resume(uuid.uuid4().hex)


def _all_done(answers: dict[int, Done | BaseException], others: str) -> list[Done]:
    """Return the answers of all engines. Raises the first error; `others` says what that means for
    the other engines."""
    done: list[Done] = []
    for number, answer in answers.items():
        if isinstance(answer, EngineUnavailable) and len(answers) > 1:
            raise EngineUnavailable(f"engine {number}: {answer.message}; {others}")
        if isinstance(answer, BaseException):
            raise answer
        done.append(answer)
    return done


_ADDED = {"requests", "sequences", "bytes"}
"""Facts of a Done that are the sum of the engines'; of seconds the longest counts, and else what
the first engine says."""


def _together(answers: list[Done]) -> Done:
    """Return the answers of several engines as one."""
    if len(answers) == 1:
        return answers[0]
    detail: dict[str, str | int | float] = {}
    for name in dict.fromkeys(name for answer in answers for name in answer.detail):
        details = [answer.detail[name] for answer in answers if name in answer.detail]
        numbers = [value for value in details if not isinstance(value, str)]
        if name in _ADDED:
            detail[name] = sum(numbers)
        else:
            detail[name] = max(numbers) if numbers else details[0]
    return Done(answers[0].id, detail)
