"""The typed Python face of the Mojo ops of `mojo_kernels/srm`, as graph operations.

T tokens, R rows, D decode rows (the first D rows, one token each, tokens 0 … D - 1), S slots,
W state width, d channels, H heads, n context positions, k kernel size, V vocabulary. What `expand`
makes of a batch is token_ids i32[T], read_slots, write_slots and positions i32[R] (of each row's
first token), and row_offsets i32[R + 1]: row i owns tokens row_offsets[i] … row_offsets[i + 1] - 1.
The graph that an op is added to must have been made with `custom_extensions=kernel_libraries()`.
On a GPU an op with `pdl` starts while the kernel before it ends (`mojo_kernels/srm/_pdl.mojo`).
Indices are not checked on the device: that they lie in range is the scheduler's promise.
"""

from __future__ import annotations

from max.dtype import DType
from max.graph import BufferValue, TensorType, TensorValue, ops

from srm.engine.device.products import ResidualStream, stream_types
from srm.engine.messages import MAX_LOGPROBS


def expand(
    sampling: BufferValue,
    slots: TensorValue,
    positions: TensorValue,
    new: TensorValue,
    prefill: TensorValue,
    token_ids: TensorValue,
) -> tuple[TensorValue, ...]:
    """Write out the rows of a step, and remember how the slots of new ones sample.

    Args:
        sampling: i32[S, 9], mutated at the slots of new rows: records of `batch.SAMPLING`.
        slots, positions: i32[D].
        new: i32[N, 12], `batch.NEW_ROW`; a row of -1 is none.
        prefill: i32[1 + R - D, 4], `batch.PREFILL_ROW`; the first stands for the decode rows.
        token_ids: i32[1 + T - D], prompts' tokens; the first stands for those of the decode rows.

    Returns:
        token_ids, read_slots, write_slots, positions and row_offsets.
    """
    tokens = slots.shape[0] + token_ids.shape[0] - 1
    rows = slots.shape[0] + prefill.shape[0] - 1
    expanded = ops.inplace_custom(
        "srm_expand",
        slots.device,
        [sampling, slots, positions, new, prefill, token_ids],
        out_types=[
            TensorType(DType.int32, [count], slots.device)
            for count in (tokens, rows, rows, rows, rows + 1)
        ],
    )
    return tuple(value.tensor for value in expanded)


def embed(
    last_token: BufferValue,
    token_ids: TensorValue,
    read_slots: TensorValue,
    table: TensorValue,
    pdl: bool = False,
) -> TensorValue:
    """Look tokens up; token t = -1 is `last_token[read_slots[t]]`, allowed for decode rows.

    Args:
        last_token: i32[S], read.
        table: float[V, d].

    Returns:
        float[T, d], the table's dtype.
    """
    return ops.inplace_custom(
        "srm_embed",
        table.device,
        [last_token, token_ids, read_slots, table],
        out_types=[_embedded(token_ids, table)],
        parameters={"pdl": pdl},
    )[0].tensor


def embed_stream(
    last_token: BufferValue,
    token_ids: TensorValue,
    read_slots: TensorValue,
    table: TensorValue,
    pdl: bool = False,
) -> ResidualStream:
    """`embed` on a GPU, of bfloat16, with moments."""
    values, moments = ops.inplace_custom(
        "srm_embed_stream",
        table.device,
        [last_token, token_ids, read_slots, table],
        out_types=stream_types(_embedded(token_ids, table)),
        parameters={"pdl": pdl},
    )
    return ResidualStream(values.tensor, moments.tensor)


def _embedded(token_ids: TensorValue, table: TensorValue) -> TensorType:
    return TensorType(table.dtype, [token_ids.shape[0], table.shape[1]], table.device)


def copy_slots(
    state: BufferValue,
    last_token: BufferValue,
    packed: BufferValue,
    slots: TensorValue,
    *,
    gathers: bool,
) -> None:
    """Gather slots of the pool into a buffer, or scatter the buffer into them.

    Args:
        state: f32[S, W], mutated unless `gathers`.
        last_token: i32[S], mutated unless `gathers`.
        packed: f32[P], mutated where `gathers`; P >= N * (W + 1): N states one after the other,
            then the bits of N last tokens.
        slots: i32[N]; none twice unless `gathers`.
    """
    values, parameters = [state, last_token, packed, slots], {"gathers": gathers}
    ops.inplace_custom("srm_copy_slots", slots.device, values, parameters=parameters)


def mix(
    state: BufferValue,
    unit: TensorValue,
    x: TensorValue,
    read_slots: TensorValue,
    write_slots: TensorValue,
    positions: TensorValue,
    row_offsets: TensorValue,
    alpha_in: TensorValue,
    alpha_out: TensorValue,
    beta: TensorValue,
    decay: TensorValue,
    gamma: TensorValue | None = None,
    residual: TensorValue | None = None,
    silu: bool = False,
    pdl: bool = False,
) -> TensorValue:
    """Run one recurrent unit over a ragged batch and move the states on.

    Per channel of head h at position p: `s = alpha_in[h, p] * x + decay[h] * s` and
    `y = act(alpha_out[h, p] * s + gamma[h, p] * x + beta[h, p]) + residual`, act being SiLU or
    nothing. A row at position 0 starts from zero.

    Args:
        state: float[S, W], mutated: unit u of a slot is columns u * d … (u + 1) * d - 1.
        unit: i32 scalar on the host, counted through all layers.
        x: float[T, d].
        read_slots: where each row's state comes from.
        write_slots: where it goes; no other row may read or write there.
        alpha_in, alpha_out: f32[H, n], 1 in a column head and in a row head.
        beta, gamma: f32[H, n].
        decay: f32[2, H], a float32 and what its rounding left.
        residual: float[T, d], added last.
        silu: whether SiLU follows beta.

    Returns:
        float[T, d], the dtype of `x`.
    """
    # The op does not read a tensor it has been told is absent: any will do in its place.
    return ops.inplace_custom(
        "srm_mix",
        x.device,
        [
            *(state, unit, x, read_slots, write_slots, positions, row_offsets),
            *(alpha_in, alpha_out, beta, decay),
            beta if gamma is None else gamma,
            x if residual is None else residual,
        ],
        out_types=[x.type],
        parameters={
            "has_gamma": gamma is not None,
            "has_residual": residual is not None,
            "silu": silu,
            "pdl": pdl,
        },
    )[0].tensor


def taps(
    q: TensorValue,
    positions: TensorValue,
    row_offsets: TensorValue,
    weight: TensorValue,
    beta: TensorValue,
    residual: TensorValue,
) -> TensorValue:
    """Sum neighbouring channels: channel j of y weighs channels j - k + 1 … j of q.

    At position p: `y[j] = Σ weight[i, p] * q[j - (k - 1) + i] + beta[p] + residual[j]` over i < k,
    where q is 0 left of channel 0.

    Args:
        q, residual: float[T, d].
        weight: f32[k, n].
        beta: f32[n].

    Returns:
        float[T, d], the dtype of `q`.
    """
    return ops.custom(
        "srm_taps",
        q.device,
        [q, positions, row_offsets, weight, beta, residual],
        out_types=[q.type],
    )[0].tensor


def edit(
    last_token: BufferValue,
    logits: TensorValue,
    token_ids: TensorValue,
    read_slots: TensorValue,
    rows: TensorValue,
    spans: TensorValue,
    penalties: TensorValue,
    tokens: TensorValue,
    biases: TensorValue,
    masks: TensorValue,
    *,
    slices: TensorValue | None = None,
    padding: int = 0,
    pdl: bool = False,
) -> None:
    """Change the logits of some decode rows in place, before `sample` and `score` read them.

    What each span and penalty does, and in which order, is in `mojo_kernels/srm/logits/edits.mojo`.
    A row's result depends on that row alone. Comes before `sample` because both take `last_token`.

    Args:
        last_token: i32[S], read.
        logits: float[H, V + padding], mutated at `rows`.
        token_ids, read_slots: those of decode rows are used.
        rows: i32[E], the decode rows to edit, none twice.
        spans: i32[E, 14], starts and stops in `tokens`; the last of them in `masks`.
        penalties: f32[E, 3], repetition (1 is off), frequency and presence (0 is off).
        tokens: i32[N].
        biases: f32[B], of the first B tokens.
        masks: i32[M], a bit for each token.
        slices: of the logits, `head_with_slices`'s; those of `rows` are made invalid.
        padding: columns behind those of tokens.
    """
    lists = [rows, spans, penalties, tokens, biases, masks]
    ops.inplace_custom(
        "srm_edit",
        logits.device,
        [last_token, logits, token_ids, read_slots, *lists, biases if slices is None else slices],
        parameters={"has_slices": slices is not None, "padding": padding, "pdl": pdl},
    )


def constrain(
    last_token: BufferValue,
    sampling: BufferValue,
    logits: TensorValue,
    *rows: TensorValue,
    slices: TensorValue | None = None,
    padding: int = 0,
) -> None:
    """Leave decode rows the tokens that the tables of their slots allow, in place, as `edit` does.

    Tables, and what they allow, are in `mojo_kernels/srm/logits/constraints.mojo`. A row's result
    depends on that row alone.

    Args:
        last_token: i32[S], read.
        sampling: i32[S, 9], mutated at the slots: the state of each one's automaton.
        logits: float[H, V + padding], mutated in the rows of slots that have a table.
        rows: positions and slots i32[D] of the decode rows; tables u16[N], of fewer than 8 entries
            if no slot has one.
        slices: of the logits, `head_with_slices`'s; those of constrained rows are made invalid.
        padding: columns behind those of tokens.
    """
    ops.inplace_custom(
        "srm_constrain",
        logits.device,
        [last_token, sampling, logits, *rows, rows[1] if slices is None else slices],
        parameters={"has_slices": slices is not None, "padding": padding},
    )


def sample(
    last_token: BufferValue,
    logits: TensorValue,
    sampling: BufferValue,
    positions: TensorValue,
    slots: TensorValue,
    slices: TensorValue | None = None,
    *,
    rejects: bool = False,
    padding: int = 0,
    pdl: bool = False,
) -> tuple[TensorValue, TensorValue]:
    """Sample a token for every decode row and remember it in the row's slot.

    A row's result depends on that row alone, and its randomness on seed and position alone. The
    definition of each truncation is in `mojo_kernels/srm/logits/sampler.mojo`.

    Args:
        last_token: i32[S], mutated at the slots: the token, or 0 where there is none.
        logits: float[H, V + padding], H >= D, the first D are used.
        sampling: i32[S, 9], read: how each slot samples, as `expand` left it.
        positions, slots: i32[D], of the decode rows; a row writes its slot.
        slices: of the logits, `head_with_slices`'s; rows without truncations are drawn from them.
        rejects: whether truncated rows are drawn by rejection, and so from slices too: other tokens
            of the same distribution.
        padding: columns behind those of tokens, -inf where there are slices.

    Returns:
        Tokens i32[D], -1 where the logits have NaN or +inf or nothing finite; and
        log-probabilities f32[D], after temperature and before truncation, 0 where the token is -1.
    """
    rows, device = slots.shape[0], logits.device
    tokens, logprobs = ops.inplace_custom(
        "srm_sample",
        device,
        [last_token, logits, sampling, positions, slots, logits if slices is None else slices],
        out_types=[
            TensorType(DType.int32, [rows], device),
            TensorType(DType.float32, [rows], device),
        ],
        parameters={
            "has_slices": slices is not None,
            "rejects": rejects,
            "padding": padding,
            "pdl": pdl,
        },
    )
    return tokens.tensor, logprobs.tensor


def score(
    logits: TensorValue,
    sampling: BufferValue,
    slots: TensorValue,
    tokens: TensorValue,
    targets: TensorValue,
    rows: TensorValue,
    num_top: TensorValue,
    named: TensorValue,
    *,
    most: int = MAX_LOGPROBS,
    padding: int = 0,
    pdl: bool = False,
) -> tuple[TensorValue, ...]:
    """Score what follows some rows of logits, and find the likeliest tokens there.

    Tokens are ordered by logit, the largest first, and equal ones by id. Decode rows are scored
    after temperature, as they are sampled, the others without. A row's result depends on that row
    alone.

    Args:
        logits: float[H, V + padding].
        sampling: i32[S, 9], read; temperature 0 reads as 1.
        slots: i32[D], of the decode rows.
        tokens: i32[D], what they sampled.
        targets: i32[1 + H - D], what follows the others; the first stands for the decode rows.
        rows: i32[Q], the rows to score.
        num_top: i32[Q], likeliest tokens wanted, at most `most`; or ~i for those of a list.
        named: i32[N], lists of at most `most` tokens; a list at i is its length, then its tokens.
        padding: columns behind those of tokens.

    Returns:
        Of what follows: log-probabilities f32[Q] and ranks i32[Q] from 1, NaN and 0 where the
        logits have NaN or +inf or nothing finite; of the likeliest or listed: ids i32[Q, most] and
        log-probabilities f32[Q, most], -1 and 0 where there are no more or none are wanted.
    """
    count, device = rows.shape[0], logits.device
    scores = ops.inplace_custom(
        "srm_score",
        device,
        [logits, sampling, slots, tokens, targets, rows, num_top, named],
        out_types=[
            TensorType(DType.float32, [count], device),
            TensorType(DType.int32, [count], device),
            TensorType(DType.int32, [count, most], device),
            TensorType(DType.float32, [count, most], device),
        ],
        parameters={"padding": padding, "pdl": pdl},
    )
    return tuple(value.tensor for value in scores)
