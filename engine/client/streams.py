"""Streams: the new tokens of an API process's requests, and which readers to wake for them.

A Stream is one caller's requests of n completions each. A step's tokens are divided among the
streams, which keep them until they are read, and only streams without unread ones are woken. Which
engine runs what is for `Spread` to say; what an engine that is lost had, another runs again.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from srm.engine.client.spread import MAX_RUNS, Part, Spread
from srm.engine.client.unread import (
    INDEX,
    INDEX_BITS,
    IS_DIRECT,
    IS_OVER,
    IS_SEARCHED,
    RUNS,
    TokenTable,
)
from srm.engine.messages import (
    PROMPT,
    REASONS,
    Abort,
    Done,
    Output,
    Outputs,
    Refusal,
    Request,
    StartSamples,
    StopSamples,
    ToEngine,
    error_of,
    part_of,
)
from srm.engine.steps.batch import I32, I64
from srm.engine.steps.tokens import (
    U8,
    Tokens,
    from_outputs,
    from_wire,
    join,
    step_tokens,
)
from srm.errors import EngineError, EngineUnavailable, SRMError, StepFailed

Send = Callable[[ToEngine], None]
Write = Callable[[Sequence[Tokens]], None]
STOP = REASONS.index("stop")


class Finder(Protocol):
    """Finds completions that are to end, for what their text says, as their tokens come."""

    def find(self, indices: I64, token_ids: I32, reasons: U8) -> list[int]:
        """Take one more token each of completions; return the places of those that end."""

    def add(self, index: int, token: int, reason: int) -> bool:
        """Take one more token of a completion; return whether it ends."""


class Delivery(NamedTuple):
    """Everything a stream received since the last `read_new`."""

    tokens: Tokens
    """New tokens of completions; their owner is place of the request x n + completion."""
    scores: list[tuple[int, Output]]
    """Scores of prompts, each with the place of its request in the stream."""
    weights_version: int = 1
    """Version of the weights that made the last of these tokens."""


class Stream(AbstractContextManager["Stream"]):
    """Requests of one caller with the same n, until each completion has ended, or the block of this
    is left."""

    def __init__(
        self,
        streams: Streams,
        requests: Sequence[Request],
        says_versions: bool,
        finder: Finder | None,
    ) -> None:
        params = requests[0].params
        self.n = params.n
        self.cached_tokens = [0] * len(requests)
        """Cached prompt tokens of each request, known from its first token on."""
        self.unfinished = self.n * len(requests)
        """Completions whose end has not been taken."""
        self.num_top = params.logprobs or 0
        """Alternatives of each token that the requests ask for."""
        self._streams = streams
        self._table = streams.table
        self._unread = self._table.open(self.unfinished, len(requests), params.logprobs)
        self._unread.says_versions = says_versions
        self._finder = finder
        self.number = self._unread.number
        if finder is not None:
            self._unread.end_some = self._end_some
            self._table.flags[IS_SEARCHED, self.number] = True
        self._first = self.number << INDEX_BITS
        self._state = self._unread.state
        self._is_durable = all(request.durable for request in requests)
        self._ends = [self.n] * len(requests)  # completions of each from which on all were cut
        self._start_below = [request.first_wave for request in requests]
        self._outputs: list[tuple[int, Output]] = []
        self._error: Exception | None = None
        self._again_version = 0  # of the weights that what comes again is of
        self._is_shut = False
        self._num_left = 0  # tokens that were not read, once the block was left
        self._uncounted: set[str] = set()  # requests whose engine has not said how many it sampled
        self._when_counted: Callable[[int], None] | None = None
        self.parts: list[list[Part]] = []
        """All that engines were given of it, by place of its request."""
        for place, request in enumerate(requests):
            if request.emit == "tokens":
                number = self._first + place * self.n
                request = msgspec.structs.replace(request, stream=number)  # noqa: PLW2901
            self.parts.append(streams.spread.parts(request, place))

    @property
    def version(self) -> int:
        """Weights version that made what was received last; 0 if nothing was received."""
        return self._unread.version

    @property
    def first_version(self) -> int:
        """Oldest weights version that made anything received so far; 0 if nothing was received."""
        return self._unread.first_version

    @property
    def numbers(self) -> range:
        """Numbers of its completions in a step's rows."""
        return range(self._first, self._first + len(self._state))

    def number_of(self, part: Part, index: int) -> int:
        """Return the number, in a step's rows, of a completion that has this index in a part."""
        return self._first + part.place * self.n + part.sample(index)

    def hand_out(self) -> bool:
        """Have the tokens that come next given to the writer, not kept, if all before them were
        taken and are of the weights in use; return whether they are."""
        unread, table = self._unread, self._table
        is_direct = not (unread.has_new or self._error) and unread.version == table.version
        table.flags[IS_DIRECT, self.number] = is_direct
        return is_direct

    def keep(self) -> None:
        """Have the tokens that come until the next `hand_out` kept."""
        if self._finder is not None:  # which takes tokens in order, whoever gives them to it
            self._streams.settle()
        self._table.flags[IS_DIRECT, self.number] = False

    def wake(self) -> None:
        """Have `wait` return, though there may be nothing to take."""
        self._unread.wake()

    async def wait(self) -> None:
        """Wait until there is something to take, or `wake`.

        Raises the error that the engine refuses a request with, EngineUnavailable when it goes away
        and StepFailed when it breaks, after all that came before has been taken.
        """
        if not self._unread.has_new:
            if self._error is None:
                self._unread.waiter = asyncio.get_running_loop().create_future()
                await self._unread.waiter
            self.check()

    def check(self) -> None:
        """Raise what `wait` would, where it would not wait."""
        if self._error is not None and not self._unread.has_new:
            raise self._error

    def read_new(self, only_ended: bool = False) -> Delivery:
        """Return everything new since the last call. `only_ended` leaves the tokens of completions
        that still run, so that each one comes whole."""
        tokens = self._unread.read(only_ended)
        self.unfinished -= int(np.count_nonzero(tokens.reasons))
        scores: list[tuple[int, Output]] = []
        if self._outputs:
            outputs = self.take_outputs()
            scores = [(place, output) for place, output in outputs if output.index == PROMPT]
            samples = [(p * self.n + out.index, out) for p, out in outputs if out.index != PROMPT]
            if samples:
                tokens = join([tokens, from_outputs(samples)])
        return Delivery(tokens, scores, self._unread.version)

    def take_outputs(self) -> list[tuple[int, Output]]:
        """Return all Outputs since the last call, as they came, each with its request's place."""
        self._unread.has_new = False
        if not self._outputs:
            return []
        outputs, self._outputs = self._outputs, []
        self.unfinished -= sum(output.finish_reason is not None for _, output in outputs)
        return outputs

    def _end_some(self, indices: I64, token_ids: I32, reasons: U8) -> None:
        """Set the reasons of completions that the finder ends, which frees their slots."""
        assert self._finder is not None
        if places := self._finder.find(indices, token_ids, reasons):
            self._free(indices[places][reasons[places] == 0])
            reasons[places] = STOP

    def stop(self, indices: I64) -> None:
        """End these completions, none of whose ends was taken, and have the engine free their
        slots."""
        self._free(indices[self._state[indices] == RUNS])
        self.unfinished -= len(indices)
        self._table.end(self._unread, indices)
        if not self.unfinished:
            self._unread.wake()

    def _free(self, running: I64) -> None:
        """Have the engine free the slots of these completions."""
        n = self.n
        for place in np.unique(running // n).tolist():
            own = running[running // n == place] - place * n
            for part in self.parts[place]:
                if len(local := part.local(own)):
                    message = StopSamples(part.request.id, local.astype("<i4").tobytes())
                    self._streams.send(part.engine, message)

    def start_below(self, place: int, index: int) -> None:
        """Let the completions of a request before this one start, where it held them back."""
        before = self._start_below[place]
        if before is None or index <= before:
            return
        self._start_below[place] = index
        for part in self.parts[place]:
            if (below := part.first_from(index)) > part.first_from(before):
                self._streams.send(part.engine, StartSamples(part.request.id, below))

    def cut(self, place: int, end: int) -> int:
        """End a request's completions from index `end` on, started or not; returns how many tokens
        that drops: nothing more comes of them, not even what has arrived and was not taken."""
        if end >= self._ends[place]:
            return 0
        indices = np.arange(place * self.n + end, place * self.n + self._ends[place])
        self._ends[place] = end
        outputs, self._outputs = self._outputs, []
        dropped: list[Output] = []
        for at, output in outputs:
            if at == place and output.index >= end:
                dropped.append(output)
            else:
                self._outputs.append((at, output))
        states = self._state[indices]
        if (states == RUNS).any():
            for part in self.parts[place]:
                if (cut := part.first_from(end)) < part.request.params.n:
                    message = StopSamples(part.request.id, b"", cut=cut)
                    self._streams.send(part.engine, message)
        # The end of one that came as an Output counts as read as soon as it is here.
        self.unfinished -= int(np.count_nonzero(states != IS_OVER))
        self.unfinished -= sum(output.finish_reason is not None for output in dropped)
        unread = self._table.end(self._unread, indices)
        self._unread.wake()  # somebody may wait for what does not come any more
        return unread + sum(len(output.token_ids) // 4 for output in dropped)

    def add_output(self, part: Part, output: Output, version: int) -> None:
        """Take in an Output of one of the requests."""
        if self._is_shut:
            return
        self._unread.note_new(output.first_version or version, version)
        place = part.place
        if self._streams.spread.count > 1:
            output = self._of_whole(part, output)
        if self._unread.says_versions and not output.versions:
            versions = np.full(len(output.token_ids) // 4, version, "<i4").tobytes()
            output = msgspec.structs.replace(output, versions=versions)
        if output.index != PROMPT:
            index = place * self.n + output.index
            if self._state[index]:  # stopped; this was on its way
                return
            if self._finder is not None:
                output = self._up_to_end(index, output, self._finder)
            if output.finish_reason is not None:
                self._state[index] = IS_OVER
        self.cached_tokens[place] = output.cached_tokens
        self._outputs.append((place, output))

    def fail(self, error: Exception) -> None:
        """End all requests of the stream with this error, which `wait` raises."""
        self.keep()
        self._error = error
        self._unread.wake()

    def lose(self, engine: int, error: SRMError) -> None:
        """Have another engine run what is left of what this one had, or end with the error."""
        for part in [part for part in chain(*self.parts) if part.engine == engine]:
            if not self.run_again(part):
                self.fail(error)

    def run_again(self, part: Part) -> bool:
        """Give what is left of a part to another engine, if one may have it; tokens that came are
        not delivered again. Durable requests are their sender's to send again."""
        streams, first = self._streams, part.place * self.n
        samples = np.arange(self.n) if part.samples is None else part.samples
        left = samples[self._state[first + samples] == RUNS]
        if not len(left):
            return True
        engine = streams.spread.choose(part.request, 1, without=part.engine)
        if self._is_durable or part.runs == MAX_RUNS or not engine:
            return False
        status = streams.spread.statuses[engine[0]]
        if status is None or self.first_version not in {0, status.weights_version}:
            return False  # other weights would go on with other tokens
        self._table.expect_again(
            self._unread, np.append(first + left, len(self._state) + part.place)
        )
        self._again_version = status.weights_version
        streams.again.add(self)
        again = part.again(left, engine[0], self._start_below[part.place])
        own = self.parts[part.place]
        own[own.index(part)] = again
        streams.take_back(part)
        streams.submit(self, again)
        return True

    def check_again(self, version: int) -> bool:
        """Return whether something is still to come again, and let nothing come any more if weights
        of another version make it: a sample would be joined of two."""
        if not self._unread.comes_again:
            return False
        if (
            version > self._again_version
        ):  # an engine that changes last may still be of the one before
            self._is_shut = True
            self._table.shut(self._unread)
            self.fail(EngineUnavailable("weights changed while what an engine lost was made again"))
        return not self._is_shut

    def _up_to_end(self, index: int, output: Output, finder: Finder) -> Output:
        """Return the Output of a completion as far as the finder lets it go."""
        token_ids, reason = array("i", output.token_ids), REASONS.index(output.finish_reason)
        for count, token in enumerate(token_ids, 1):
            if finder.add(index, token, reason if count == len(token_ids) else 0):
                if not reason:
                    self._free(np.array([index]))
                output = part_of(output, 0, count)
                return msgspec.structs.replace(output, finish_reason="stop")
        return output

    def _of_whole(self, part: Part, output: Output) -> Output:
        """Return the Output as one of the whole request's, without tokens that came before."""
        index, at = output.index, len(self._state) + part.place
        if index != PROMPT:
            index = part.sample(index)
            at = part.place * self.n + index
        num_come, num_again = self._unread.num_come, self._unread.num_again
        count = len(output.token_ids) // 4
        skipped = min(count, int(num_again[at]))
        num_again[at] -= skipped
        num_come[at] += count - skipped
        return msgspec.structs.replace(part_of(output, skipped, count), index=index)

    def __exit__(self, *_: object) -> None:
        """Forget the requests; those that still run are aborted, but for durable ones that were
        lost: an engine that is still there goes on with them, and so does the successor of one that
        drains."""
        runs = (self._state == RUNS).reshape(-1, self.n).any(axis=1)
        samples = [output for _, output in self._outputs if output.index != PROMPT]
        self._num_left += sum(len(output.token_ids) // 4 for output in samples)
        self._num_left += self._unread.num_tokens
        for part in chain(*self.parts):
            self._streams.take_back(part)
        del self._streams.by_number[self.number]
        self._streams.again.discard(self)
        self._table.close(self.number)
        is_lost = self._is_durable and isinstance(self._error, EngineError)
        self._error = None  # which was raised where this stream is known, and the request's body
        for place in np.flatnonzero(runs & (not is_lost)).tolist():
            for part in self.parts[place]:
                is_counted = part.request.emit == "final"  # else what it sampled has come
                if is_counted:
                    self._uncounted.add(part.request.id)
                    self._streams.uncounted[part.request.id] = part.engine, self
                self._streams.send(part.engine, Abort(part.request.id, is_counted))

    def when_counted(self, call: Callable[[int], None]) -> None:
        """Have `call` called, now or later, with the tokens that were sampled and not read when the
        block was left."""
        self._when_counted = call
        self._call_when_counted()

    def count(self, request_id: str, sampled: int) -> None:
        """Count what an engine had sampled of a request that was aborted or refused."""
        self._num_left += sampled
        self._uncounted.discard(request_id)
        self._call_when_counted()

    def _call_when_counted(self) -> None:
        if self._when_counted is not None and not self._uncounted:
            self._when_counted(self._num_left)


class Streams:
    """All streams of an API process."""

    def __init__(self, *sends: Send) -> None:
        """`sends` has one for each engine."""
        self._sends = sends
        self.spread = Spread(len(sends))
        self.table = TokenTable(counts=len(sends) > 1)
        self.by_number: dict[int, Stream] = {}
        self.again: set[Stream] = set()
        """Those of which something comes again, that an engine lost."""
        self.uncounted: dict[str, tuple[int, Stream]] = {}
        """Engine and stream of aborted requests whose engine has not said what it sampled."""
        self._places: dict[str, tuple[Stream, Part]] = {}  # by the id that an engine knows
        self._write: Write | None = None
        self._direct: list[Tokens] = []  # of steps that came together, to be written together

    def set_writer(self, write: Write) -> None:
        """Have `write` called with the new tokens of streams that are direct, in steps that came
        together; the end of a completion, and all that comes behind it of its stream, is kept."""
        self._write = write

    def send(self, engine: int, message: ToEngine) -> None:
        self._sends[engine](message)

    def has_request(self, request_id: str) -> bool:
        return request_id in self._places

    def open(
        self,
        requests: Sequence[Request],
        says_versions: bool = False,
        finder: Finder | None = None,
    ) -> Stream:
        """Send requests of the same n, whose ids are not in use; the caller closes the stream.
        `says_versions`: each token comes with the version of the weights that made it. `finder`
        says where completions end before the engine ends them.

        Raises InvalidRequest or Overloaded when there are too many completions at once."""
        stream = Stream(self, requests, says_versions, finder)
        self.by_number[stream.number] = stream
        for part in chain(*stream.parts):
            self.submit(stream, part)
        return stream

    def submit(self, stream: Stream, part: Part) -> None:
        """Have an engine run this."""
        self._places[part.request.id] = stream, part
        self.spread.given[part.engine] += part.request.params.n
        self.send(part.engine, part.request)

    def take_back(self, part: Part) -> None:
        """Wait no more for what an engine was given."""
        del self._places[part.request.id]
        self.spread.given[part.engine] -= part.request.params.n

    def receive(self, message: Outputs | Refusal | Done) -> None:
        """Divide a step's tokens among the streams; what nobody reads any more is dropped."""
        if isinstance(message, Done | Refusal) and message.id in self.uncounted:
            _, stream = self.uncounted.pop(message.id)
            sampled = message.detail["tokens"] if isinstance(message, Done) else message.tokens
            stream.count(message.id, int(sampled))
        elif isinstance(message, Refusal):
            self.refuse(message.id, error_of(message), message.tokens)
        if not isinstance(message, Outputs):
            return
        version = message.weights_version
        self.again = {stream for stream in self.again if stream.check_again(version)}
        ends: list[tuple[int, int]] = []  # numbers and reasons of those that came in rows so far
        for output in message.outputs:
            waiting = self._places.get(output.id)
            if waiting is None:
                continue
            stream, part = waiting
            if part.request.emit == "tokens" and output.finish_reason is not None:
                number = stream.number_of(part, output.index)
                ends.append((number, REASONS.index(output.finish_reason)))
                continue
            stream.add_output(part, output, version)
            stream.keep()  # what comes behind it is taken behind it
        for number, count in message.cached:
            if (reader := self.by_number.get(number >> INDEX_BITS)) is not None:
                reader.cached_tokens[(number & INDEX) // reader.n] = count
        if message.tokens is not None:
            tokens = from_wire(message.tokens)
            if self._direct and self.table.keeps_searched(tokens, version):
                self.settle()
            if (direct := self.table.put(tokens, version)) is not None:
                self._direct.append(direct)
        if ends:  # as rows too, so that they come with the tokens before them
            self.settle()
            numbers, reasons = np.array(ends).T
            no_tokens = np.full(len(ends), -1, np.int32)
            self.table.put(step_tokens(numbers, no_tokens, reasons.astype(np.uint8)), version)

    def settle(self) -> None:
        """Write the tokens of streams that are direct, of all steps that were received since the
        last call: a process that is behind writes once to each connection."""
        direct, self._direct = self._direct, []
        if direct and self._write is not None:
            self._write(direct)

    def refuse(self, request_id: str, error: SRMError, sampled: int = 0) -> None:
        """End the stream of this request with this error; it had sampled so many tokens."""
        if request_id in self._places:
            stream, part = self._places[request_id]
            # An engine that breaks says so to all whose requests it had.
            if not (isinstance(error, StepFailed) and stream.run_again(part)):
                stream.fail(error)
                if part.request.emit == "final":  # else they have come
                    stream.count(request_id, sampled)

    def lose(self, engine: int, make: Callable[[], SRMError]) -> None:
        """Note that an engine has gone; streams that end by that get an error each."""
        self.spread.note_status(engine, None)
        for id in [id for id, (of, _) in self.uncounted.items() if of == engine]:
            self.receive(Done(id, {"tokens": 0}))
        for stream in list(self.by_number.values()):
            stream.lose(engine, make())
