"""A tensor by its first value, as structs keep it that a GPU's threads are given."""

comptime Values[type: DType] = Pointer[Scalar[type], MutUntrackedOrigin]
"""The first value of a tensor, whose lifetime is the op's."""


@always_inline
def untracked[
    dtype: DType, //
](values: Pointer[Scalar[dtype], MutAnyOrigin]) -> Values[dtype]:
    """Leave the lifetime of a tensor to the op that has it.

    Parameters:
        dtype: Of the values.

    Args:
        values: The first value.

    Returns:
        The same.
    """
    return values.unsafe_origin_cast[MutUntrackedOrigin]()


def on_16_bytes[dtype: DType, //](values: Values[dtype]) -> Bool:
    """Whether 16 bytes at a time may be read and written here.

    Parameters:
        dtype: Of the values.

    Args:
        values: The first value of a tensor.

    Returns:
        Whether its address is a multiple of 16.
    """
    return Int(values) % 16 == 0
