"""Copies on huge pages; whether the system has such pages makes no difference to what they say."""

from __future__ import annotations

import gc
import mmap
import weakref

import numpy as np
import numpy.typing as npt
import pytest

from srm.engine.weights.huge_pages import HUGE_PAGE, HugePages


@pytest.mark.parametrize("has_huge_pages", [True, False])
def test_copies_are_equal_and_apart(has_huge_pages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_huge_pages:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    rng, pages = np.random.default_rng(0), HugePages()
    shapes = [(3, 5), (0,), (1,), (40, 2**18), (7, 2, 3)]  # one larger than a mapping
    arrays = [rng.integers(0, 2**16, shape).astype(np.uint16) for shape in shapes]
    copies = [pages.copy(array) for array in arrays]
    for array, copy in zip(arrays, copies, strict=True):
        assert copy.dtype == array.dtype and np.array_equal(copy, array)
        assert copy.ctypes.data % 64 == 0 and copy.flags.c_contiguous
        copy[...] = 0
    assert copies[0].ctypes.data % HUGE_PAGE == 0
    for number, copy in enumerate(copies):  # no copy lies in another
        copy[...] = number
    assert all((copy == number).all() for number, copy in enumerate(copies))


def test_a_mapping_goes_with_the_last_copy_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[weakref.ref[mmap.mmap]] = []

    class Counted(mmap.mmap):
        def __init__(self, *_: object, **__: object) -> None:
            mapped.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Counted)
    pages, ones = HugePages(), np.ones(8, np.float32)
    first: list[npt.NDArray[np.float32]] = [pages.copy(ones), pages.copy(ones)]
    del pages, first[0]
    gc.collect()
    assert len(mapped) == 1 and mapped[0]() is not None
    del first[0]
    gc.collect()
    assert mapped[0]() is None
