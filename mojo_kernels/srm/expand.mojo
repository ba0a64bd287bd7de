"""Rows of a step (`srm_expand`): what the host sends of them, written out for the ops that follow.

Of a decode row come its slot and its position. It reads and writes that slot and feeds the token
sampled there last, -1, unless it is `new`: then it says what it reads and feeds, and how its slot
samples from now on. A prefill row says all of itself.

    row_offsets[i] = i                  i < D        row_offsets[D + j] = prefill[j, 3]
    token_ids[i]   = -1, or new[e, 2]   i < D        token_ids[D + j]   = prompt_tokens[1 + j]
    read_slots[i]  = slots[i], or new[e, 1]          read_slots[D + j]  = prefill[1 + j, 0]
    write_slots[i] = slots[i]           i < D        write_slots[D + j] = prefill[1 + j, 1]
    positions[i]   = decode_positions[i]             positions[D + j]   = prefill[1 + j, 2]
    sampling[slots[i]] = new[e, 3:]     where new[e, 0] = i

The first of `prefill` and of `prompt_tokens` stand for the decode rows: so neither is ever empty.

CPU: rows and tokens are split over the cores. GPU: a thread per row and token of the same number.

    token_ids    [T]         int32  out
    read_slots, write_slots, positions  [R]  int32  out; R <= T
    row_offsets  [R + 1]     int32  out
    sampling     [S, 9]      int32  mutated at the slots of new rows
    slots, decode_positions  [D]  int32  in
    new          [N, 12]     int32  in: row, read slot, token, record; rows ascend, -1 is none
    prefill      [1 + R - D, 4]  int32  in: read slot, write slot, position, end of its tokens
    prompt_tokens  [1 + T - D]  int32  in
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.algorithm import sync_parallelize
from max.gpu import block_dim, block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv

from .logits._sampling import FIELDS
from .parallel import BLOCK, num_tasks
from .rows import first_row
from ._values import Values, untracked

comptime _NEW = 3 + FIELDS
comptime _PREFILL = 4


@fieldwise_init
struct _Rows(TrivialRegisterPassable):
    """The op's tensors, each by its first value, and their lengths."""

    var token_ids: Values[DType.int32]
    var read_slots: Values[DType.int32]
    var write_slots: Values[DType.int32]
    var positions: Values[DType.int32]
    var row_offsets: Values[DType.int32]
    var sampling: Values[DType.int32]
    var slots: Values[DType.int32]
    var decode_positions: Values[DType.int32]
    var new: Values[DType.int32]
    var prefill: Values[DType.int32]
    var prompt_tokens: Values[DType.int32]
    var num_tokens: Int64  # an Int may not cross to the device
    var num_rows: Int64
    var num_decode: Int64
    var num_new: Int64

    @always_inline
    def expand(self, i: Int):
        """Write out row i and token i, where there are such.

        Args:
            i: From 0 up to the number of tokens, which ends the last row.
        """
        if i < Int(self.num_decode):
            self._decode(i)
            return
        var j = i - Int(self.num_decode)
        if i <= Int(self.num_rows):
            self.row_offsets[unsafe_offset=i] = self.prefill[
                unsafe_offset=j * _PREFILL + 3
            ]
        if i < Int(self.num_rows):
            var row = self.prefill.unsafe_offset((j + 1) * _PREFILL)
            self.read_slots[unsafe_offset=i] = row[unsafe_offset=0]
            self.write_slots[unsafe_offset=i] = row[unsafe_offset=1]
            self.positions[unsafe_offset=i] = row[unsafe_offset=2]
        if i < Int(self.num_tokens):
            self.token_ids[unsafe_offset=i] = self.prompt_tokens[
                unsafe_offset=j + 1
            ]

    @always_inline
    def _decode(self, i: Int):
        var slot = self.slots[unsafe_offset=i]
        var read = slot
        var token = Int32(-1)
        var e = first_row(self.new, Int(self.num_new), i, _NEW)
        var row = self.new.unsafe_offset(e * _NEW)
        if e < Int(self.num_new) and Int(row[unsafe_offset=0]) == i:
            read = row[unsafe_offset=1]
            token = row[unsafe_offset=2]
            comptime for field in range(FIELDS):
                self.sampling[unsafe_offset=Int(slot) * FIELDS + field] = row[
                    unsafe_offset=3 + field
                ]
        self.row_offsets[unsafe_offset=i] = Int32(i)
        self.token_ids[unsafe_offset=i] = token
        self.read_slots[unsafe_offset=i] = read
        self.write_slots[unsafe_offset=i] = slot
        self.positions[unsafe_offset=i] = self.decode_positions[unsafe_offset=i]

    @always_inline
    def expand_thread(self):
        """What a thread of a block of `BLOCK` does."""
        var i = block_idx.x * block_dim.x + thread_idx.x
        if i <= Int(self.num_tokens):
            self.expand(i)


@extensibility.register("srm_expand")
struct _Expand:
    """The op."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        token_ids: OutputTensor[dtype=DType.int32, rank=1, ...],
        read_slots: OutputTensor[dtype=DType.int32, rank=1, ...],
        write_slots: OutputTensor[dtype=DType.int32, rank=1, ...],
        positions: OutputTensor[dtype=DType.int32, rank=1, ...],
        row_offsets: OutputTensor[dtype=DType.int32, rank=1, ...],
        sampling: MutableInputTensor[dtype=DType.int32, rank=2, ...],
        slots: InputTensor[dtype=DType.int32, rank=1, ...],
        decode_positions: InputTensor[dtype=DType.int32, rank=1, ...],
        new: InputTensor[dtype=DType.int32, rank=2, ...],
        prefill: InputTensor[dtype=DType.int32, rank=2, ...],
        prompt_tokens: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var num_tokens = token_ids.dim_size(0)
        var rows = _Rows(
            untracked(token_ids.unsafe_ptr()),
            untracked(read_slots.unsafe_ptr()),
            untracked(write_slots.unsafe_ptr()),
            untracked(positions.unsafe_ptr()),
            untracked(row_offsets.unsafe_ptr()),
            untracked(sampling.unsafe_ptr()),
            untracked(slots.unsafe_ptr()),
            untracked(decode_positions.unsafe_ptr()),
            untracked(new.unsafe_ptr()),
            untracked(prefill.unsafe_ptr()),
            untracked(prompt_tokens.unsafe_ptr()),
            Int64(num_tokens),
            Int64(read_slots.dim_size(0)),
            Int64(slots.dim_size(0)),
            Int64(new.dim_size(0)),
        )
        var size = num_tokens + 1

        comptime if target == "cpu":
            var tasks = num_tasks(size)

            def expand_share(task: Int) {imm}:
                for i in range(
                    task * size // tasks, (task + 1) * size // tasks
                ):
                    rows.expand(i)

            sync_parallelize(expand_share, tasks)
        else:

            def expand_rows() {var}:
                rows.expand_thread()

            ctx.enqueue_function(
                expand_rows, grid_dim=ceildiv(size, BLOCK), block_dim=BLOCK
            )
