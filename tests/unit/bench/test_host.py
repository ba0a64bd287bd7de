"""The host benchmark keeps as many sequences running as it says."""

from __future__ import annotations

import pytest

from research.bench.host.load import Load


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("length", [None, 12])
@pytest.mark.parametrize("rows", [64, 24])
def test_so_many_sequences_run(samples: int, length: int | None, rows: int) -> None:
    load = Load(64, rows, length, samples)
    load.run(0, 50)
    cost = load.run(0, 30, 30)
    assert cost.steps == 30
    assert 48 <= load.scheduler.table.num_owned <= 64  # those that ended are replaced a step later
    assert cost.rows == 30 * rows if length is None else cost.rows >= 0.8 * 30 * rows
    assert (cost.ended > 0) == (length is not None)
    assert cost.entry()["rows"] == cost.rows and load.bytes_per_row() > 8
