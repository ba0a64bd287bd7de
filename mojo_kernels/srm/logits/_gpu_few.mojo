"""The last few tokens of a row, among which top_k and top_p find their edges at once: `Few`.

Every token is compared with every other: of so few that is less work than any search.
"""

from max.gpu import WARP_SIZE, lane_id, thread_idx
from max.gpu.primitives import warp
from std.math import fma
from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.utils.numerics import neg_inf

from ._gpu_block import Block, Shared, at_least, shared
from ._logit_row import rank, unrank

comptime FEW = 5 * WARP_SIZE
"""The most tokens: of more, searching them takes fewer instructions."""

comptime _GROUP = 4
"""Tokens that a thread reads at a time; divides FEW."""


@always_inline
def store_if(kept: Bool, value: Float32, mut address: UInt32):
    """Write a value to shared memory if it is kept, and go on behind it; in two instructions.
    """
    address = inlined_assembly[
        "@$2 st.shared.f32 [$0], $3; @$2 add.u32 $0, $0, 4;",
        UInt32,
        constraints="=r,0,b,f",
        has_side_effect=True,
    ](address, kept, value)


struct Few(Copyable):
    """Logits and weights of tokens, -inf and 0 behind the last one."""

    var logits: Shared[DType.float32]  # [FEW]
    var weights: Shared[DType.float32]  # [FEW]

    def __init__(out self):
        self.logits = shared[DType.float32, FEW]()
        self.weights = shared[DType.float32, FEW]()

    def clear(self):
        """Begin with none."""
        if thread_idx.x < FEW:
            self.logits[unsafe_offset=thread_idx.x] = neg_inf[DType.float32]()

    def edge(
        self, block: Block, count: Int, top_k: Int, top_p: Float32
    ) -> Float32:
        """The smallest logit kept of the first `count` tokens; there is one."""
        var logit = neg_inf[DType.float32]()
        var here = Float32(0)  # tokens with this logit or a larger one
        var mass = Float32(0)  # what they weigh
        if thread_idx.x < count:
            logit = self.logits[unsafe_offset=thread_idx.x]
            for first in range(0, count, _GROUP):
                var logits = self.logits.unsafe_load[
                    width=_GROUP, alignment=16
                ](first)
                var weights = self.weights.unsafe_load[
                    width=_GROUP, alignment=16
                ](first)
                comptime for i in range(_GROUP):
                    var kept = at_least(logits[i], logit)
                    here += kept
                    mass = fma(kept, weights[i], mass)
        var edge = neg_inf[DType.float32]()
        if top_k > 0:
            var enough = here >= Float32(min(top_k, count))
            edge = unrank(block.max(rank(logit) if enough else 0))
        if top_p < 1:
            # The sums grow with every token, rounded as they are.
            var kept = block.max(
                bitcast[DType.uint32](mass) if logit >= edge else 0
            )
            var target = top_p * bitcast[DType.float32](kept)
            edge = max(
                edge, unrank(block.max(rank(logit) if mass >= target else 0))
            )
        return edge

    def mass(self, begin: Int, end: Int, threshold: Float32) -> Float32:
        """What those of a warp's tokens weigh that a threshold keeps; they lie together.
        """
        var sum = Float32(0)
        for i in range(begin + lane_id(), end, WARP_SIZE):
            var kept = at_least(self.logits[unsafe_offset=i], threshold)
            sum = fma(kept, self.weights[unsafe_offset=i], sum)
        return warp.sum(sum)
