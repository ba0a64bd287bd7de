"""Prefill: prompts on their way into slots, by way of the states that prompts share.

A prompt starts from the longest kept state of its beginning, waits if an earlier request is just
making a longer one, and leaves states behind: after all but its last token, and where it parts from
an earlier prompt. A row reads one slot and writes another, so a state that is kept costs no copy.
Keeps: no row reads what its own batch writes.
"""

from __future__ import annotations

from srm.engine.scheduler.assembly import PromptChunk
from srm.engine.scheduler.wait_queues import FairQueue, WaitQueue
from srm.engine.state.prefixes import NO_SLOT, Found, Prefix, Prefixes
from srm.engine.state.sequence import SequenceGroup

MIN_SPLIT = 16
"""Tokens that two prompts must share, beyond what is kept, for a state after them to be made: it
splits the prefill in two rows of different steps."""


class Prefill:
    """Groups whose prompts are being prefilled, or wait for a prefix that is."""

    def __init__(self, prefixes: Prefixes, waiting: FairQueue) -> None:
        """`waiting`: where groups go back to when what they awaited is there, or dropped."""
        self._prefixes = prefixes
        self._waiting = waiting
        self._line = WaitQueue()
        self.awaiting: dict[Prefix, WaitQueue] = {}
        """Groups by the state that they wait for."""
        self.given: list[tuple[int, bytes]] = []
        """Slots, and the states that requests gave for them, to be written before the next step."""
        self._num_begun = 0

    @property
    def num_tokens(self) -> int:
        """Tokens still to be fed of the prompts begun."""
        return sum(group.num_unprefilled for group in self._line)

    @property
    def is_busy(self) -> bool:
        """Whether a prompt is being fed."""
        return self._line.peek() is not None

    def begin(self, group: SequenceGroup) -> bool:
        """Decide which state the group starts from, and which it makes; `push` it if prompt is left
        to feed. False: it waits for a prefix."""
        tokens = group.prompt[:-1]
        matched = usable = self._prefixes.find(tokens, group.request.salt)
        if group.is_scored:  # what is scored is fed
            quiet = tokens[: group.num_quiet]
            usable = self._prefixes.find(quiet, group.request.salt)
        given = self._put_given(group, usable)
        if given is None and usable.coming is not None and usable.coming.order > group.order:
            group.awaited = usable.coming
            self.awaiting.setdefault(usable.coming, WaitQueue()).push(group)
            return False
        if (start := given or usable.ready) is not None:
            self._start_from(group, start)
        if given is not None:
            self._prefixes.release(given)
        self._num_begun += 1
        group.share.last_begun, group.begun_at = self._num_begun, group.started
        is_new = self._prefixes.keep and matched.length < len(tokens)
        if group.num_unprefilled and (group.needs_prefix or is_new):
            self._leave(group, len(tokens))
        shared = set()
        if matched.length + MIN_SPLIT <= matched.shared < len(tokens):
            shared.add(matched.shared)
        if group.is_scored and usable.length + MIN_SPLIT <= len(quiet) and self._prefixes.keep:
            shared.add(len(quiet))  # what else may follow it is likely to be scored too
        for length in sorted(shared, reverse=True):
            self._leave(group, length)
        if group.prefilled:
            self._prefixes.count_hit(group.prefilled)
        if group.taken_up is None:  # what is fed again was not there at first
            group.cached = group.prefilled
        return True

    def push(self, group: SequenceGroup) -> None:
        """Let the group take part in the next batches."""
        self._line.push(group)

    def chunks(self, room: int) -> tuple[list[PromptChunk], list[SequenceGroup]]:
        """Return the next chunks, `room` tokens at most, and the groups whose prompts are done."""
        chunks: list[PromptChunk] = []
        forked: list[SequenceGroup] = []
        done: list[SequenceGroup] = []
        while room and (group := self._line.peek()) is not None:
            stop, chunk = group.next_stop, _next_chunk(group, room)
            chunks.append(chunk)
            room -= chunk.stop - chunk.start
            group.prefilled, group.state_slot = chunk.stop, chunk.write_slot
            if chunk.stop < stop:
                break  # it is out of room, and stays first in line
            self._line.pop()
            if group.fills and group.fills[0].length == chunk.stop:
                prefix = group.fills.pop(0)
                self._prefixes.finish(prefix)
                self._wake(prefix)
            (forked if group.num_unprefilled else done).append(group)
        for group in forked:  # only now: their next rows read what these write
            self._line.push(group)
        for group in done:
            self.release(group, besides=group.prefix)
        return chunks, done

    def release(self, group: SequenceGroup, besides: Prefix | None = None) -> None:
        """Release the group's prefixes, which nobody reads for it any more, `besides` one."""
        for prefix in [prefix for prefix in group.pinned if prefix is not besides]:
            group.pinned.remove(prefix)
            group.share.pins -= 1
            self._prefixes.release(prefix)

    def drop(self, group: SequenceGroup) -> None:
        """Take the group out, wherever it is. Groups that awaited its prefixes wait no more."""
        self._line.discard(group)
        if group.awaited is not None:
            self.awaiting[group.awaited].discard(group)
        self.release(group)
        for prefix in group.fills:
            self._wake(prefix)

    def forget(self, group: SequenceGroup) -> None:
        """Reset the group, whose prompt is to be fed again from the first token on."""
        self.release(group)
        group.fills.clear()
        group.prefilled, group.awaited = 0, None
        group.scored_before = group.scored
        group.state_slot, group.prefix = NO_SLOT, None

    def _put_given(self, group: SequenceGroup, usable: Found) -> Prefix | None:
        """Put the state that a request gives into a slot, if no kept one is as long; return it
        pinned. None: its tokens are fed."""
        length = group.state_length
        longest = group.num_quiet if group.is_scored else length
        if not usable.length < length <= longest:
            return None
        prefix = self._prefixes.claim(group.prompt[:length], group.order, group.request.salt)
        if prefix is not None:
            self._prefixes.finish(prefix)
            self.given.append((prefix.slot, group.request.state))
        return prefix

    def _start_from(self, group: SequenceGroup, prefix: Prefix) -> None:
        self._prefixes.pin(prefix)
        group.pinned.append(prefix)
        group.share.pins += 1
        group.prefilled = prefix.length
        group.state_slot = prefix.slot
        if not group.num_unprefilled:
            group.prefix = prefix

    def _leave(self, group: SequenceGroup, length: int) -> None:
        """Have the state after the first `length` tokens made, if a slot can be had for it."""
        is_whole = length == len(group.prompt) - 1
        prefix = self._prefixes.claim(group.prompt[:length], group.order, group.request.salt)
        if prefix is None and is_whole and group.needs_prefix:
            # All slots are pinned, one by this group itself, or it would not have been its turn.
            self.release(group)
            group.prefilled, group.state_slot = 0, NO_SLOT
            prefix = self._prefixes.claim(group.prompt[:length], group.order, group.request.salt)
            assert prefix is not None
        if prefix is None:
            return
        group.pinned.append(prefix)
        group.share.pins += 1
        if is_whole:
            group.prefix = prefix
        group.fills.insert(0, prefix)  # the longest is claimed first

    def _wake(self, prefix: Prefix) -> None:
        for group in self.awaiting.pop(prefix, ()):
            group.awaited = None
            self._waiting.push(group)


def _next_chunk(group: SequenceGroup, room: int) -> PromptChunk:
    write = group.fills[0].slot if group.fills else group.slot
    read = write if group.state_slot == NO_SLOT else group.state_slot
    stop = min(group.prefilled + room, group.next_stop)
    return PromptChunk(group, group.prompt, group.prefilled, stop, read, write)
