"""Slots (`srm_copy_slots`): many slots of the pool gathered into one buffer, or scattered from it.

    packed[i * W : (i + 1) * W] = state[slots[i]]      i < N
    packed[N * W + i]           = last_token[slots[i]], its bits

as it stands where `gathers`, else from right to left, with no slot twice. So the host moves any
number of slots in one copy.

CPU: slots are split over the cores. GPU: a thread per 16 bytes of a state, or per value where states
are no multiple of that.

    state       [S, W]  float32     mutated unless `gathers`
    last_token  [S]     int32       mutated unless `gathers`
    packed      [P]     float32     mutated where `gathers`; P >= N * (W + 1)
    slots       [N]     int32       in
"""

import extensibility
from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.memory import bitcast

from .parallel import RowGrid, num_tasks
from ._values import Values, on_16_bytes, untracked


@fieldwise_init
struct _SlotCopy[gathers: Bool](TrivialRegisterPassable):
    """The op's tensors, each by its first value, and their shapes."""

    var state: Values[DType.float32]
    var last_token: Values[DType.int32]
    var packed: Values[DType.float32]
    var slots: Values[DType.int32]
    var num_slots: Int64  # N; an Int may not cross to the device
    var width: Int64  # W

    @always_inline
    def copy[values: Int](self, i: Int, at: Int):
        """Copy `values` neighbours of a slot's state, from `at` on; with the first the last token.

        Parameters:
            values: How many; of more than one the addresses are multiples of their size.

        Args:
            i: Which of `slots`.
            at: The first of them in the state.
        """
        var slot = Int(self.slots[unsafe_offset=i])
        var in_pool = self.state.unsafe_offset(slot * Int(self.width) + at)
        var in_packed = self.packed.unsafe_offset(i * Int(self.width) + at)
        comptime if Self.gathers:
            in_packed.unsafe_store[alignment=4 * values](
                0, in_pool.unsafe_load[width=values, alignment=4 * values](0)
            )
        else:
            in_pool.unsafe_store[alignment=4 * values](
                0, in_packed.unsafe_load[width=values, alignment=4 * values](0)
            )
        if at == 0:
            var token = Int(self.num_slots * self.width) + i
            comptime if Self.gathers:
                self.packed[unsafe_offset=token] = bitcast[DType.float32](
                    self.last_token[unsafe_offset=slot]
                )
            else:
                self.last_token[unsafe_offset=slot] = bitcast[DType.int32](
                    self.packed[unsafe_offset=token]
                )

    @always_inline
    def copy_thread[values: Int](self):
        """What a thread of a `RowGrid` does."""
        var at = RowGrid.piece() * values
        if RowGrid.row() < Int(self.num_slots) and at < Int(self.width):
            self.copy[values](RowGrid.row(), at)

    def launch[values: Int](self, ctx: DeviceContext) raises:
        """Copy all slots on a GPU, `values` to a thread."""
        var copy = self

        def copy_slots() {var}:
            copy.copy_thread[values]()

        var grid = RowGrid(Int(self.num_slots), Int(self.width) // values)
        ctx.enqueue_function(
            copy_slots, grid_dim=grid.blocks, block_dim=grid.block
        )


@extensibility.register("srm_copy_slots")
struct _CopySlots:
    """The op."""

    @staticmethod
    def execute[
        target: StaticString, gathers: Bool
    ](
        state: MutableInputTensor[dtype=DType.float32, rank=2, ...],
        last_token: MutableInputTensor[dtype=DType.int32, rank=1, ...],
        packed: MutableInputTensor[dtype=DType.float32, rank=1, ...],
        slots: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var num_slots = slots.dim_size(0)
        var width = state.dim_size(1)
        var all = _SlotCopy[gathers](
            untracked(state.unsafe_ptr()),
            untracked(last_token.unsafe_ptr()),
            untracked(packed.unsafe_ptr()),
            untracked(slots.unsafe_ptr()),
            Int64(num_slots),
            Int64(width),
        )

        comptime if target == "cpu":
            var tasks = num_tasks(num_slots * width)

            def copy_share(task: Int) {imm}:
                for i in range(
                    task * num_slots // tasks, (task + 1) * num_slots // tasks
                ):
                    for at in range(width):
                        all.copy[1](i, at)

            sync_parallelize(copy_share, tasks)
        else:
            if num_slots == 0:
                return
            if (
                width % 4 == 0
                and on_16_bytes(all.state)
                and on_16_bytes(all.packed)
            ):
                all.launch[4](ctx)
            else:
                all.launch[1](ctx)
