"""Where tables lie: equal constraints share one, and room is used again once nobody has it."""

from __future__ import annotations

import numpy as np
import pytest

from srm.engine.constraints.automaton import UNREACHABLE, TokenAutomaton
from srm.engine.state.tables import Tables, walk_each
from srm.errors import Overloaded

TURN = 8
"""What tables begin at multiples of, and their tokens."""


def automaton(states: int = 3, classes: int = 2, vocab: int = 5, seed: int = 0) -> TokenAutomaton:
    rng = np.random.default_rng(seed)
    return TokenAutomaton(
        next_state=rng.integers(states, size=(states, classes)).astype(np.uint16),
        class_of=rng.integers(classes, size=vocab).astype(np.uint16),
        distance=np.array([UNREACHABLE, 1, *[0] * (states - 2)], np.uint16),
    )


def size_of(own: TokenAutomaton) -> int:
    return 2 * TURN + own.next_state.size + len(own.distance)


def test_equal_constraints_share_a_table_until_the_last_is_released() -> None:
    tables, own = Tables(100), automaton()
    start = tables.acquire("a", own)
    assert start > 0 and tables.acquire("a", own) == start
    ((at, entries),) = tables.unsent
    assert at == start
    assert entries.tolist() == [
        *(2, 3, *[0] * 6, *own.class_of.tolist(), *[0] * 3),
        *(*own.next_state.reshape(-1).tolist(), *own.distance.tolist()),
    ]
    tables.release("a")
    assert tables.nbytes == 2 * size_of(own)
    tables.release("a")
    assert tables.nbytes == 0
    tables.acquire("b", own)
    tables.release("b")
    assert tables.unsent == [], "nobody has it"


def test_tables_lie_apart_and_gaps_are_filled() -> None:
    own = automaton()
    room = -(-size_of(own) // TURN) * TURN
    tables = Tables(TURN + 3 * room)
    starts = [tables.acquire(name, own) for name in "abc"]
    assert starts == [TURN, TURN + room, TURN + 2 * room]
    with pytest.raises(Overloaded, match=f"take {6 * size_of(own)} of"):
        tables.acquire("d", own)
    tables.release("b")
    assert tables.acquire("d", own) == starts[1]
    tables.release("a")
    with pytest.raises(Overloaded):
        tables.acquire("large", automaton(states=6))
    tables.release("d")
    assert tables.acquire("large", automaton(states=6)) == starts[0]


@pytest.mark.parametrize("texts", [[], [[]], [[1], [], [4, 4, 0, 2], [3, 1]]])
def test_texts_are_walked_together_as_each_alone(texts: list[list[int]]) -> None:
    own = automaton(states=7, classes=4, seed=1)
    expected = []
    for text in texts:
        state = 1
        for token in text:
            state = int(own.next_state[state, own.class_of[token]])
        expected.append(state)
    walked = walk_each(own, [np.array(text, "<i4").tobytes() for text in texts])
    assert walked.tolist() == expected
