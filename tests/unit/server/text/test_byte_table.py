"""The two ways through a table of bytes are one."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.byte_table import ByteTable

ENTRIES = [*(bytes([i]) for i in range(256)), b"", b"a" * 15, b"b" * 16, b"c" * 17, b"\xc3" * 40]
TABLE = ByteTable(ENTRIES)
ordinary = st.integers(0, 253) | st.sampled_from([256, 257, 258])
elsewhere = st.sampled_from([254, 255, 259, 260])  # the bytes that rows are filled with, and long


@pytest.mark.parametrize("tokens", [ordinary, ordinary | elsewhere], ids=["gathered", "joined"])
def test_any_length_reads_as_its_pieces(tokens: st.SearchStrategy[int]) -> None:
    @given(st.lists(tokens, max_size=300))
    def holds(ids: list[int]) -> None:
        token_ids = array("i", ids).tobytes()
        expected = [ENTRIES[token] for token in ids]
        assert TABLE.join(token_ids) == b"".join(expected)
        assert TABLE.pieces(token_ids) == expected

    holds()


def test_a_long_run_of_every_token_and_ids_beyond_the_table() -> None:
    for token, entry in enumerate(ENTRIES):
        assert TABLE.join(array("i", [token] * 500).tobytes()) == entry * 500
    for count in (1, 100):
        with pytest.raises(IndexError):
            TABLE.join(array("i", [len(ENTRIES)] * count).tobytes())
