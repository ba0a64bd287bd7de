"""Which row of a ragged batch a token belongs to.

Row i owns tokens row_offsets[i] up to row_offsets[i + 1]; it may own none.
"""


@always_inline
def first_row(
    row_offsets: Pointer[Int32, _],
    num_rows: Int,
    token: Int,
    stride: Int = 1,
) -> Int:
    """The first row that starts at `token` or after it.

    Args:
        row_offsets: The offsets of all rows, ascending.
        num_rows: How many rows there are.
        token: Index of a token.
        stride: From one offset to the next.

    Returns:
        The row, or `num_rows` if none starts so late.
    """
    var low = 0
    var high = num_rows
    while low < high:
        var middle = (low + high) // 2
        if Int(row_offsets[unsafe_offset=middle * stride]) < token:
            low = middle + 1
        else:
            high = middle
    return low


@always_inline
def row_of(row_offsets: Pointer[Int32, _], num_rows: Int, token: Int) -> Int:
    """The row that owns `token`.

    Args:
        row_offsets: The offsets of all rows, ascending.
        num_rows: How many rows there are.
        token: Index of a token that a row owns.

    Returns:
        The row.
    """
    # Rows that decode come first, with a token each: no search is needed among them.
    if (
        token < num_rows
        and Int(row_offsets[unsafe_offset=token]) == token
        and Int(row_offsets[unsafe_offset=token + 1]) > token
    ):
        return token
    return first_row(row_offsets, num_rows, token + 1) - 1
