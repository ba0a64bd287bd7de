"""`python -m srm.engine.process.table_process PARENT`: makes the tables of constraints in a process
beside the engine's steps, which wait for no lock of its interpreter.

The first message is the vocabulary, the others are constraints; each answer is the table, or empty
where there is none.
"""

from __future__ import annotations

import logging
import sys

import msgspec

from srm.engine.constraints.automaton import TokenAutomaton, compile_automaton
from srm.engine.process.limited_process import (
    Answer,
    Died,
    LimitedProcess,
    limit_this_process,
    receive,
    send,
    take_idle_processors,
)

logger = logging.getLogger(__name__)
WITHIN_S = 120.0
"""Seconds that a table may take. Its work is bounded: on a processor of its own it takes two."""
_TRIES = 2


class _Vocabulary(msgspec.Struct):
    tokens: list[bytes]
    size: int
    eos_token_id: int


class TableProcess:
    """Makes tables in that process, which starts with the first. One thread at a time may ask."""

    def __init__(self) -> None:
        self._process: LimitedProcess | None = None
        self._is_closed = False

    def make_table(
        self, constraint: str, tokens: list[bytes], vocab_size: int, eos: int
    ) -> TokenAutomaton | None:
        """As `compile_automaton`, always with the same vocabulary. A process that was killed is
        started again, once. Then there is no table, as for one that takes too long; that is
        logged."""
        if self._process is None:
            vocabulary = _Vocabulary(tokens, vocab_size, eos)
            self._process = LimitedProcess(
                "srm.engine.process.table_process", vocabulary, is_restart_idle=True
            )
            if self._is_closed:  # by a thread that may not have seen it
                self._process.close()
        for _ in range(_TRIES):
            try:
                data = self._process.ask(constraint, WITHIN_S).data
            except (Died, OSError) as error:
                if self._is_closed:
                    break
                logger.warning("a constraint's table was not made: %s", error)
                if isinstance(error, Died) and error.is_late:
                    break
            else:
                return TokenAutomaton.of_bytes(data, vocab_size) if data else None
        return None

    def close(self) -> None:
        """End the process, whatever it does; no table is made any more."""
        self._is_closed = True
        if self._process is not None:
            self._process.close()


def main(argv: list[str]) -> int:
    if not limit_this_process(int(argv[0])):
        return 1
    inbox, outbox = sys.stdin.buffer, sys.stdout.buffer
    first = receive(inbox)
    if first is None:
        return 0
    vocabulary = msgspec.json.decode(first, type=_Vocabulary)
    about = vocabulary.tokens, vocabulary.size, vocabulary.eos_token_id
    send(outbox, Answer())
    take_idle_processors()
    while (message := receive(inbox)) is not None:
        table = compile_automaton(msgspec.json.decode(message, type=str), *about)
        send(outbox, Answer(data=table.to_bytes() if table else b""))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
