"""Random numbers that are looked up: any one of them without those before it.

Philox, a counter-based generator (Salmon et al. 2011, as numpy has it), keyed by the scenario's
seed: what is drawn for a request depends on its index alone, so processes need not tell each other
anything. Knows nothing of requests.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

ARRIVALS, REQUEST, PREFIX, BLOCK, ORDER, TOKENIZER = range(6)
"""What numbers are drawn for: streams that do not touch."""


class Draws:
    """Numbers of one seed. Not for several threads at once."""

    def __init__(self, seed: int) -> None:
        """`seed` is one of 0 … 2**64 - 1."""
        self._bits = Philox(counter=0, key=seed)
        self._state = self._bits.state  # set whole: a third of what a new generator takes
        self._counter = self._state["state"]["counter"]

    def raw(self, purpose: int, index: int, count: int) -> NDArray[np.uint64]:
        """The first `count` numbers [count], 64 random bits each, of one index of one purpose."""
        self._counter[:] = (0, 0, index, purpose)
        self._bits.state = self._state
        numbers: NDArray[np.uint64] = self._bits.random_raw(count)
        return numbers


def shares(raw: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The numbers as float64 in (0, 1), their upper 53 bits: never 0 and never 1."""
    found: NDArray[np.float64] = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return found
