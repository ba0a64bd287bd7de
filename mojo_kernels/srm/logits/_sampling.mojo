"""How a slot's sequence samples, as the device keeps it: `engine.steps.batch.SAMPLING`."""

from std.memory import bitcast

from .._values import Values

comptime FIELDS = 9
"""Of 4 bytes: temperature, top_k, top_p, min_p, a seed, which takes two, and those of
`constraints.mojo`."""


@fieldwise_init
struct Sampling(TrivialRegisterPassable):
    """A slot's record."""

    var temperature: Float32
    """0 is greedy."""
    var top_k: Int
    """0 is off."""
    var top_p: Float32
    """1 is off."""
    var min_p: Float32
    """0 is off."""
    var seed: UInt64
    """Of the sequence's random stream."""

    @always_inline
    def is_drawn_from_all[rejects: Bool](self) -> Bool:
        """Tell whether tokens are drawn from all: where none is left out, or with `rejects` until one
        is kept.

        Returns:
            Whether that is so.
        """
        var from_all = self.top_k == 0 or self.top_p >= 1
        comptime if not rejects:
            from_all = self.top_k == 0 and self.top_p >= 1 and self.min_p == 0
        return self.temperature > 0 and from_all

    @staticmethod
    @always_inline
    def of(records: Values[DType.int32], slot: Int32) -> Self:
        """Read a slot's record.

        Args:
            records: Those of all slots.
            slot: Whose.

        Returns:
            The record.
        """
        var record = records.unsafe_offset(Int(slot) * FIELDS)

        @always_inline
        def number(field: Int) {imm} -> Float32:
            return bitcast[DType.float32](record[unsafe_offset=field])

        @always_inline
        def bits(field: Int) {imm} -> UInt64:
            return UInt64(bitcast[DType.uint32](record[unsafe_offset=field]))

        return Self(
            number(0),
            Int(record[unsafe_offset=1]),
            number(2),
            number(3),
            bits(4) | bits(5) << 32,
        )
