"""Constraints by table (`srm_constrain`): the logits of tokens that a row may not sample are -inf.

A table is an automaton over classes of tokens, of `engine/constraints/automaton.py`. A slot's record
says where its table begins, the state that its sequence is in, and at which position it samples its
last token. For each decode row whose slot has a table:

    state = next[state, class_of[last token]]     but for a sequence's first row in its slot
    x[t]  = -inf     where distance[next[state, class_of[t]]] >= tokens left, this one included

`distance` is the fewest tokens from a state to the end of a text, the one that ends it included: so
each text is whole when it ends. Where a state is too far from every end, whatever leads to one is
allowed. A first row's record has ~state: nothing was sampled in this slot before. The state that a
row is in is left in the record.

    table: classes, states, 6 of nothing, class_of [V, rounded up to TURN], next [states, classes],
           distance [states]; all uint16, from a multiple of TURN on

The logits are changed in place, after `srm_edit` and before `srm_sample`; `edits.mojo` says what
orders these ops, and what becomes of slices. A row's result depends on that row alone.

CPU: rows are split over the cores. GPU: a block per row. Both run `_constrain_row`.

    last_token  [S]      int32      in; a buffer, because `srm_sample` mutates it
    sampling    [S, 9]   int32      mutated at the slots: their states
    logits      [H, V + padding]  any float  mutated in decode rows but for padding
    positions   [R]      int32      in; of the decode rows
    slots       [D]      int32      in
    tables      [N]      uint16     in; fewer than HEAD: no row has a table
    slices      [H, (V + padding) / 256, 2]  float32  mutated in decode rows; any tensor when
                                   has_slices is False
"""

import extensibility
from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.algorithm import sync_parallelize
from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.memory import AddressSpace, unsafe_stack_allocation
from std.memory.alloc import unsafe_alloc
from std.utils.numerics import neg_inf

from ._sampling import FIELDS
from ._slices import invalidate
from .._values import Values, untracked
from ..parallel import num_tasks

comptime MAX_CLASSES = 8192
"""Most classes of a table: 32 KiB of shared memory."""
comptime TURN = 8
"""Tokens that a thread looks at together: 16 bytes of classes, and of bfloat16."""
comptime HEAD = TURN
"""Entries of a table before its tokens."""
comptime _BLOCK = 256  # threads of a GPU block
comptime TABLE = 6
"""Field of a record: where its slot's table begins, 0 being none."""
comptime _LAST = 7
comptime _STATE = 8
comptime _UNREACHABLE = 65535


@fieldwise_init
struct _Table(TrivialRegisterPassable):
    """A table by its first entry."""

    var entries: Values[DType.uint16]
    var vocab: Int64  # an Int may not cross to the device

    @always_inline
    def _entry(self, place: Int) -> Int:
        return Int(self.entries[unsafe_offset=place])

    @always_inline
    def num_classes(self) -> Int:
        """Count the classes of tokens.

        Returns:
            How many there are.
        """
        return self._entry(0)

    @always_inline
    def class_of(self, token: Int) -> Int:
        """Look a token up.

        Args:
            token: Its id.

        Returns:
            Its class.
        """
        return self._entry(HEAD + token)

    @always_inline
    def classes_of(self, turn: Int) -> SIMD[DType.uint16, TURN]:
        """Look the tokens of a turn up, which may pass the last one.

        Args:
            turn: Its number.

        Returns:
            Their classes.
        """
        return self.entries.unsafe_load[width=TURN, alignment=16](
            HEAD + turn * TURN
        )

    @always_inline
    def _transitions(self) -> Int:
        return HEAD + ceildiv(Int(self.vocab), TURN) * TURN

    @always_inline
    def next(self, state: Int, token_class: Int) -> Int:
        """Follow a token.

        Args:
            state: Where from.
            token_class: The token's class.

        Returns:
            The state that it leads to.
        """
        var row = self._transitions() + state * self.num_classes()
        return self._entry(row + token_class)

    @always_inline
    def distance(self, state: Int) -> Int:
        """Look up how far a text is from its end.

        Args:
            state: Where it is.

        Returns:
            The fewest tokens.
        """
        var size = self._entry(1) * self.num_classes()
        return self._entry(self._transitions() + size + state)


@always_inline
def _constrain_row[
    dtype: DType, space: AddressSpace, //, on_gpu: Bool
](
    logits: Pointer[Scalar[dtype], MutUntrackedOrigin],
    table: _Table,
    allowed: Pointer[Int32, MutUntrackedOrigin, address_space=space],
    record: Values[DType.int32],
    last: Int,
    position: Int,
):
    """Constrain one row; `last` is the token sampled last in its slot."""
    var thread = 0
    var threads = 1
    comptime if on_gpu:
        thread = Int(thread_idx.x)
        threads = _BLOCK

    @always_inline
    def wait() {imm}:
        comptime if on_gpu:
            barrier()

    var before = Int(record[unsafe_offset=_STATE])
    var state = ~before
    if before >= 0:
        state = table.next(before, table.class_of(last))
    var left = Int(record[unsafe_offset=_LAST]) - position + 1
    if table.distance(state) > left:
        left = _UNREACHABLE
    for token_class in range(thread, table.num_classes(), threads):
        var after = table.next(state, token_class)
        allowed[unsafe_offset=token_class] = Int32(table.distance(after) < left)
    wait()
    if thread == 0:
        record[unsafe_offset=_STATE] = Int32(state)
    var vocab = Int(table.vocab)
    var on_16_bytes = vocab % TURN == 0
    var banned = SIMD[dtype, TURN](neg_inf[DType.float32]().cast[dtype]())
    for turn in range(thread, ceildiv(vocab, TURN), threads):
        var classes = table.classes_of(turn)
        var kept = SIMD[DType.int32, TURN]()
        comptime for i in range(TURN):
            kept[i] = allowed[unsafe_offset=Int(classes[i])]
        var first = turn * TURN
        if not on_16_bytes:
            comptime for i in range(TURN):
                if kept[i] == 0 and first + i < vocab:
                    logits[unsafe_offset=first + i] = banned[i]
        elif kept.reduce_or() == 0:  # most are so, and need not be read
            logits.unsafe_store[alignment=16](first, banned)
        elif kept.reduce_and() == 0:
            var x = logits.unsafe_load[width=TURN, alignment=16](first)
            logits.unsafe_store[alignment=16](
                first, kept.ne(0).select(x, banned)
            )


@extensibility.register("srm_constrain")
struct _Constrain:
    """The op."""

    @staticmethod
    def execute[
        target: StaticString, padding: Int, has_slices: Bool
    ](
        last_token: MutableInputTensor[dtype=DType.int32, rank=1, ...],
        sampling: MutableInputTensor[dtype=DType.int32, rank=2, ...],
        logits: InputTensor[rank=2, ...],
        positions: InputTensor[dtype=DType.int32, rank=1, ...],
        slots: InputTensor[dtype=DType.int32, rank=1, ...],
        tables: InputTensor[dtype=DType.uint16, rank=1, ...],
        slices: InputTensor[...],
        ctx: DeviceContext,
    ) raises:
        var num_rows = slots.dim_size(0)
        if num_rows == 0 or tables.dim_size(0) < HEAD:
            return
        var vocab = Int64(logits.dim_size(1) - padding)
        var last_ptr = untracked(last_token.unsafe_ptr())
        var record_ptr = untracked(sampling.unsafe_ptr())
        var logit_ptr = logits.unsafe_ptr().unsafe_origin_cast[
            MutUntrackedOrigin
        ]()
        var position_ptr = untracked(positions.unsafe_ptr())
        var slot_ptr = untracked(slots.unsafe_ptr())
        var table_ptr = untracked(tables.unsafe_ptr())
        var slice_ptr = untracked(slices.unsafe_ptr()).unsafe_bitcast[Float32]()

        @always_inline
        def constrain[
            space: AddressSpace, //, on_gpu: Bool
        ](
            row: Int,
            allowed: Pointer[Int32, MutUntrackedOrigin, address_space=space],
        ) {var}:
            var slot = Int(slot_ptr[unsafe_offset=row])
            var record = record_ptr.unsafe_offset(slot * FIELDS)
            var start = Int(record[unsafe_offset=TABLE])
            if start == 0:
                return
            var width = Int(vocab) + padding
            comptime if has_slices:
                invalidate(slice_ptr, row, width)
            _constrain_row[on_gpu=on_gpu](
                logit_ptr.unsafe_offset(row * width),
                _Table(table_ptr.unsafe_offset(start), vocab),
                allowed,
                record,
                Int(last_ptr[unsafe_offset=slot]),
                Int(position_ptr[unsafe_offset=row]),
            )

        comptime if target == "cpu":
            var tasks = num_tasks(num_rows * Int(vocab))

            def constrain_share(task: Int) {imm}:
                var allowed = unsafe_alloc[Int32](MAX_CLASSES)
                for row in range(
                    task * num_rows // tasks, (task + 1) * num_rows // tasks
                ):
                    constrain[on_gpu=False](
                        row, allowed.unsafe_origin_cast[MutUntrackedOrigin]()
                    )
                allowed.unsafe_free()

            sync_parallelize(constrain_share, tasks)
        else:

            def constrain_block() {var}:
                var allowed = unsafe_stack_allocation[
                    MAX_CLASSES, Int32, address_space=AddressSpace.SHARED
                ]().unsafe_origin_cast[MutUntrackedOrigin]()
                constrain[on_gpu=True](Int(block_idx.x), allowed)

            ctx.enqueue_function(
                constrain_block, grid_dim=num_rows, block_dim=_BLOCK
            )
