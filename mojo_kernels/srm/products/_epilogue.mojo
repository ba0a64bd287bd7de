"""What `srm_linear` does to a sum besides the product: `Epilogue`.

All of it is float32; what is written is rounded once, to the nearest value, ties to even.
"""

from std.math import align_up, exp

from ._tile import PANEL, WIDTH, Source, Target, Vector


@fieldwise_init
struct Epilogue[dtype: DType, out_dtype: DType](ImplicitlyCopyable):
    """Bias, SiLU and residual.

    Parameters:
        dtype: Of the bias.
        out_dtype: Of the residual and of the output.
    """

    var bias: Source[Self.dtype]
    """Where the sums start, per column; [N]."""
    var residual: Source[Self.out_dtype]
    """Added last, per element; [M, N]."""
    var has_bias: Bool
    """Whether there is a bias."""
    var has_residual: Bool
    """Whether there is a residual."""
    var silu: Bool
    """Whether SiLU follows the sum."""

    def begin(self, column: Int, cols: Int, begin: Target[DType.float32]):
        """Write where the sums of some columns start.

        Args:
            column: The first one.
            cols: How many the output has; what is left of their last panel starts from zero.
            begin: To where.
        """
        for i in range(align_up(cols, PANEL)):
            begin[unsafe_offset=i] = 0
            if self.has_bias and i < cols:
                begin[unsafe_offset=i] = self.bias[
                    unsafe_offset=column + i
                ].cast[DType.float32]()

    @no_inline
    def finish(
        self,
        sums: Source[DType.float32],
        out_: Target[Self.out_dtype],
        at: Int,
        stride: Int,
        rows: Int,
        cols: Int,
    ):
        """Write the elements that a tile's sums become.

        Args:
            sums: The rows x PANEL sums.
            out_: The whole output.
            at: Index of the tile's first element.
            stride: Distance of the rows of output and residual.
            rows: Rows of the tile.
            cols: Columns of the panel that the output has.
        """
        for row in range(rows):
            comptime for column in range(0, PANEL, WIDTH):
                var i = at + row * stride + column
                var y = sums.unsafe_load[width=WIDTH](row * PANEL + column)
                if self.silu:
                    y = y / (1 + exp(-y))
                if column + WIDTH <= cols:
                    if self.has_residual:
                        y += self.residual.unsafe_load[width=WIDTH](i).cast[
                            DType.float32
                        ]()
                    out_.unsafe_store(i, y.cast[Self.out_dtype]())
                else:
                    for c in range(cols - column):
                        var one = y[c]
                        if self.has_residual:
                            one += self.residual[unsafe_offset=i + c].cast[
                                DType.float32
                            ]()
                        out_[unsafe_offset=i + c] = one.cast[Self.out_dtype]()
