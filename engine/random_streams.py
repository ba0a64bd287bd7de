"""Random streams: which one each sample of a seed draws from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def sample_seeds(seed: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Seeds of the random streams (seed, index), u64[len(indices)]: splitmix64 after `seed`."""
    # Arrays overflow without a word: arithmetic modulo 2**64 is the point.
    mixed = (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
