"""Edits (`srm_edit`): what callers want of tokens, done to logits before anything is sampled.

For each of some decode rows, and a token of it that was sampled `count` times so far:

    x = logit + bias                                 where the token has a bias
    x = x / repetition if x > 0 else x * repetition  where it was sampled or is in the prompt
    x = x - frequency * count - presence             where it was sampled
    x = -inf                                         where it is banned, or only others are allowed

The host lists tokens in spans of one array, so that rows of a request share what is the same for
them. A row has the spans BIASED, ALLOWED, BANNED, PAIRS, PROMPT, SAMPLED and MASK, in this order,
each a start and a stop; MASK is a span of `masks`, a bit for each token of the vocabulary, and where
it is not empty, tokens whose bit is 0 are banned. The first biases belong to the first tokens, one each, and a span of biased tokens
has none twice. Where ALLOWED is not empty, all else is banned. PAIRS are (before, token): the token
is banned right after the other. Any token may be twice in the others: SAMPLED is counted.

The token sampled last is on the device alone and not in SAMPLED: it is `last_token[read_slot]`
where the row feeds token -1, and there is none where the row feeds a token by name.

The logits are changed in place. They are no buffer, which would have to be copied into; that this
op comes after the output head and before `srm_sample` follows from the last tokens, which are one.

Where the head left slices of the logits (has_slices), those of an edited row no longer hold: they are
made invalid.

Tokens are counted in TILE counters at a time: in shared memory by a block per row (GPU), or in
scratch memory (CPU: rows are split over the cores). Both run `_edit_row`.

    last_token  [S]      int32      in; a buffer, because `srm_sample` mutates it
    logits      [H, V + padding]  any float  mutated in `rows` but for padding
    token_ids   [T]      int32      in; decode row i feeds token i
    read_slots  [R]      int32      in
    rows        [E]      int32      in; decode rows, none twice
    spans       [E, 14]  int32      in; even, odd: start and stop in `tokens`, the last in `masks`
    penalties   [E, 3]   float32    in; repetition, frequency, presence
    tokens      [N]      int32      in
    biases      [B]      float32    in; of tokens[:B]
    masks       [M]      int32      in; bit t % 32 of word t // 32 is token t's
    slices      [H, (V + padding) / 256, 2]  float32  mutated in `rows`; any tensor when has_slices
                                   is False
"""

import extensibility
from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.algorithm import sync_parallelize
from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.atomic import Atomic
from std.memory import AddressSpace, unsafe_stack_allocation
from std.memory.alloc import unsafe_alloc
from std.utils.numerics import neg_inf

from ._slices import invalidate
from .._pdl import launch_attributes, start_after_last
from .._values import untracked
from ..parallel import num_tasks

comptime TILE = 8192
"""Tokens that are counted at a time: 32 KiB of counters."""
comptime _BLOCK = 256  # threads of a GPU block
comptime _BIASED = 0
comptime _ALLOWED = 1
comptime _BANNED = 2
comptime _PAIRS = 3
comptime _PROMPT = 4
comptime _SAMPLED = 5
comptime _MASK = 6
comptime _SPANS = 7
comptime _IS_ALLOWED = Int32(1 << 29)
comptime _IN_PROMPT = Int32(1 << 30)
comptime _COUNT = _IS_ALLOWED - 1
"""A counter's lower bits; the two above are flags."""

comptime _Ints = Pointer[Int32, _]
comptime _Floats = Pointer[Float32, _]


@always_inline
def _edit_row[
    dtype: DType, space: AddressSpace, //, on_gpu: Bool
](
    logits: Pointer[Scalar[dtype], MutUntrackedOrigin],
    vocab: Int,
    marks: Pointer[Int32, MutUntrackedOrigin, address_space=space],
    last: Int32,
    spans: _Ints,
    penalties: _Floats,
    tokens: _Ints,
    biases: _Floats,
    masks: _Ints,
):
    """Edit one row; `last` is -1 if nothing was sampled yet."""
    var thread = 0
    var threads = 1
    comptime if on_gpu:
        thread = Int(thread_idx.x)
        threads = _BLOCK

    @always_inline
    def start(span: Int) {imm} -> Int:
        return Int(spans[unsafe_offset=2 * span])

    @always_inline
    def stop(span: Int) {imm} -> Int:
        return Int(spans[unsafe_offset=2 * span + 1])

    @always_inline
    def wait() {imm}:
        comptime if on_gpu:
            barrier()

    @always_inline
    def ban(token: Int32) {imm}:
        logits[unsafe_offset=Int(token)] = neg_inf[DType.float32]().cast[
            dtype
        ]()

    for i in range(start(_BIASED) + thread, stop(_BIASED), threads):
        var token = Int(tokens[unsafe_offset=i])
        var x = logits[unsafe_offset=token].cast[DType.float32]()
        logits[unsafe_offset=token] = (x + biases[unsafe_offset=i]).cast[
            dtype
        ]()
    wait()

    var repetition = penalties[unsafe_offset=0]
    var frequency = penalties[unsafe_offset=1]
    var presence = penalties[unsafe_offset=2]
    var is_penal = repetition != 1 or frequency != 0 or presence != 0
    var is_choosy = start(_ALLOWED) < stop(_ALLOWED)
    var end = vocab if is_penal or is_choosy else 0
    for tile in range(0, end, TILE):
        var size = min(TILE, vocab - tile)

        @always_inline
        def flag(span: Int, bit: Int32) {imm}:
            """Equal tokens of two threads are set to the same."""
            for i in range(start(span) + thread, stop(span), threads):
                var at = Int(tokens[unsafe_offset=i]) - tile
                if 0 <= at < size:
                    marks[unsafe_offset=at] |= bit
            wait()

        @always_inline
        def count(token: Int32) {imm}:
            var at = Int(token) - tile
            if 0 <= at < size:
                comptime if on_gpu:
                    _ = Atomic.fetch_add(marks.unsafe_offset(at), Int32(1))
                else:
                    marks[unsafe_offset=at] += 1

        for i in range(thread, size, threads):
            marks[unsafe_offset=i] = 0
        wait()
        flag(_ALLOWED, _IS_ALLOWED)
        flag(_PROMPT, _IN_PROMPT)
        for i in range(start(_SAMPLED) + thread, stop(_SAMPLED), threads):
            count(tokens[unsafe_offset=i])
        if thread == 0 and last >= 0:
            count(last)
        wait()
        for i in range(thread, size, threads):
            var mark = marks[unsafe_offset=i]
            if mark == 0 and not is_choosy:
                continue
            var x = logits[unsafe_offset=tile + i].cast[DType.float32]()
            var times = mark & _COUNT
            if times > 0 or mark & _IN_PROMPT != 0:
                x = x / repetition if x > 0 else x * repetition
            if times > 0:
                x -= frequency * Float32(times)
                x -= presence
            if is_choosy and mark & _IS_ALLOWED == 0:
                x = neg_inf[DType.float32]()
            logits[unsafe_offset=tile + i] = x.cast[dtype]()
        wait()

    if start(_MASK) < stop(_MASK):
        for token in range(thread, vocab, threads):
            var word = masks[unsafe_offset=start(_MASK) + token // 32]
            if (word >> Int32(token % 32)) & 1 == 0:
                ban(Int32(token))
    for i in range(start(_BANNED) + thread, stop(_BANNED), threads):
        ban(tokens[unsafe_offset=i])
    for i in range(start(_PAIRS) + 2 * thread, stop(_PAIRS), 2 * threads):
        if last >= 0 and tokens[unsafe_offset=i] == last:
            ban(tokens[unsafe_offset=i + 1])


@extensibility.register("srm_edit")
struct _Edit:
    """The op."""

    @staticmethod
    def execute[
        target: StaticString, padding: Int, has_slices: Bool, pdl: Bool
    ](
        last_token: MutableInputTensor[dtype=DType.int32, rank=1, ...],
        logits: InputTensor[rank=2, ...],
        token_ids: InputTensor[dtype=DType.int32, rank=1, ...],
        read_slots: InputTensor[dtype=DType.int32, rank=1, ...],
        rows: InputTensor[dtype=DType.int32, rank=1, ...],
        spans: InputTensor[dtype=DType.int32, rank=2, ...],
        penalties: InputTensor[dtype=DType.float32, rank=2, ...],
        tokens: InputTensor[dtype=DType.int32, rank=1, ...],
        biases: InputTensor[dtype=DType.float32, rank=1, ...],
        masks: InputTensor[dtype=DType.int32, rank=1, ...],
        slices: InputTensor[dtype=DType.float32, ...],
        ctx: DeviceContext,
    ) raises:
        var num_rows = rows.dim_size(0)
        if num_rows == 0:
            return
        # An Int may not cross to the device: its width is the host's.
        var vocab = Int64(logits.dim_size(1) - padding)
        var last_ptr = last_token.unsafe_ptr()
        var logit_ptr = logits.unsafe_ptr().unsafe_origin_cast[
            MutUntrackedOrigin
        ]()
        var id_ptr = token_ids.unsafe_ptr()
        var slot_ptr = read_slots.unsafe_ptr()
        var row_ptr = rows.unsafe_ptr()
        var span_ptr = spans.unsafe_ptr()
        var penalty_ptr = penalties.unsafe_ptr()
        var token_ptr = tokens.unsafe_ptr()
        var bias_ptr = biases.unsafe_ptr()
        var mask_ptr = masks.unsafe_ptr()
        var slice_ptr = untracked(slices.unsafe_ptr())

        @always_inline
        def edit[
            space: AddressSpace, //, on_gpu: Bool
        ](
            e: Int,
            marks: Pointer[Int32, MutUntrackedOrigin, address_space=space],
        ) {var}:
            var row = Int(row_ptr[unsafe_offset=e])
            var width = Int(vocab) + padding
            comptime if has_slices:
                invalidate(slice_ptr, row, width)
            var last = Int32(-1)
            if id_ptr[unsafe_offset=row] < 0:
                last = last_ptr[unsafe_offset=Int(slot_ptr[unsafe_offset=row])]
            _edit_row[on_gpu=on_gpu](
                logit_ptr.unsafe_offset(row * width),
                Int(vocab),
                marks,
                last,
                span_ptr.unsafe_offset(e * 2 * _SPANS),
                penalty_ptr.unsafe_offset(e * 3),
                token_ptr,
                bias_ptr,
                mask_ptr,
            )

        comptime if target == "cpu":
            var tasks = num_tasks(num_rows * Int(vocab))

            def edit_share(task: Int) {imm}:
                var marks = unsafe_alloc[Int32](min(TILE, Int(vocab)))
                for e in range(
                    task * num_rows // tasks, (task + 1) * num_rows // tasks
                ):
                    edit[on_gpu=False](
                        e, marks.unsafe_origin_cast[MutUntrackedOrigin]()
                    )
                marks.unsafe_free()

            sync_parallelize(edit_share, tasks)
        else:

            def edit_block() {var}:
                start_after_last[pdl]()
                var marks = unsafe_stack_allocation[
                    TILE, Int32, address_space=AddressSpace.SHARED
                ]().unsafe_origin_cast[MutUntrackedOrigin]()
                edit[on_gpu=True](Int(block_idx.x), marks)

            ctx.enqueue_function(
                edit_block,
                grid_dim=num_rows,
                block_dim=_BLOCK,
                attributes=launch_attributes[pdl](),
            )
