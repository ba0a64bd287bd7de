"""`python -m srm.engine.process.table_process PARENT`: makes the tables of constraints in a process
beside the engine's steps, which wait for no lock of its interpreter.

The first message is the vocabulary, the others are constraints, each read by a process of its own;
each answer is the table, or empty where there is none.
"""

from __future__ import annotations

import logging
import sys
from threading import Lock

import msgspec

from srm.engine.constraints.automaton import TokenAutomaton, compile_automaton
from srm.limited_process import (
    Answer,
    Died,
    Effort,
    LimitedProcess,
    answer_each,
    limit_this_process,
    receive,
    send,
    yield_processors,
)

logger = logging.getLogger(__name__)
WITHIN_S = 120.0
"""Seconds that a table may take."""
CPU_S = 20.0
"""Seconds of processor time that a table may take. Its work is counted: it takes two."""
_TRIES = 2


class _Vocabulary(msgspec.Struct):
    tokens: list[bytes]
    size: int
    end_ids: int | list[int]


class TableProcess:
    """Makes tables in that process, which starts with the first. Any thread may ask."""

    def __init__(self) -> None:
        self._process: LimitedProcess | None = None
        self._lock = Lock()
        self._is_closed = False

    def make_table(
        self,
        constraint: str,
        tokens: list[bytes],
        vocab_size: int,
        ends: int | list[int],
        cpu_s: float = CPU_S,
    ) -> TokenAutomaton | None:
        """As `compile_automaton`, always with the same vocabulary. Who makes it is begun again if
        it was killed, once. Then there is no table, as for one that takes too long; that is
        logged. Raises OutOfTime if it takes more than `cpu_s` of processor time, where that is
        less than CPU_S."""
        with self._lock:
            if self._process is None:
                vocabulary = _Vocabulary(tokens, vocab_size, ends)
                self._process = LimitedProcess("srm.engine.process.table_process", vocabulary)
                if self._is_closed:  # by a thread that may not have seen it
                    self._process.close()
        for _ in range(_TRIES):
            try:
                data = self._process.ask_beside(
                    constraint, Effort(cpu_s, cpu_s == CPU_S), WITHIN_S
                ).data
            except Died as error:
                if error.is_out_of_time and cpu_s < CPU_S:
                    raise OutOfTime from None
                if self._is_closed:
                    break
                logger.warning("a constraint's table was not made: %s", error)
                if error.is_late or error.is_over_limit:
                    break
            else:
                return TokenAutomaton.of_bytes(data, vocab_size) if data else None
        return None

    def close(self) -> None:
        """End the process, whatever it does; no table is made any more."""
        self._is_closed = True
        if self._process is not None:
            self._process.close()


class OutOfTime(Exception):
    """A table takes longer than it may at first."""


def main(argv: list[str]) -> int:
    if not limit_this_process(int(argv[0])):
        return 1
    first = receive(sys.stdin.buffer)
    if first is None:
        return 0
    vocabulary = msgspec.json.decode(first, type=_Vocabulary)
    about = vocabulary.tokens, vocabulary.size, vocabulary.end_ids
    yield_processors()
    send(sys.stdout.buffer, Answer())

    def answer(message: bytes) -> Answer:
        table = compile_automaton(msgspec.json.decode(message, type=str), *about)
        return Answer(data=table.to_bytes() if table else b"")

    answer_each(int(argv[1]), answer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
