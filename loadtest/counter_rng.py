"""Random numbers with random access: any one can be computed without those before it.

Uses Philox, a counter-based generator (Salmon et al. 2011, as numpy has it), keyed by the
scenario's seed: what is drawn for a request depends on its index alone, so processes need no
coordination.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

ARRIVALS, REQUEST, PREFIX, BLOCK, ORDER, TOKENIZER, STEP = range(7)
"""Purposes that numbers are drawn for; each has an independent stream."""


class Draws:
    """Random numbers of one seed. Not for several threads at once."""

    def __init__(self, seed: int) -> None:
        """`seed` is one of 0 … 2**64 - 1."""
        self._bits = Philox(counter=0, key=seed)
        self._state = self._bits.state  # set whole: a third of what a new generator takes
        self._counter = self._state["state"]["counter"]

    def raw(self, purpose: int, index: int, count: int) -> NDArray[np.uint64]:
        """Return the first `count` numbers [count] of 64 random bits, of an index and a purpose."""
        self._counter[:] = (0, 0, index, purpose)
        self._bits.state = self._state
        numbers: NDArray[np.uint64] = self._bits.random_raw(count)
        return numbers


def shares(raw: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Map the numbers to float64 in (0, 1) by their upper 53 bits: never 0 and never 1."""
    uniforms: NDArray[np.float64] = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return uniforms
