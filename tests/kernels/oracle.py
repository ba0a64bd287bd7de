"""What the ops of `mojo_kernels/srm` compute, in float64 numpy with plain loops.

Written from the definitions in the ops' docstrings and nothing else; slow and obvious.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
F64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

MASK_32 = 0xFFFFFFFF
ROUNDS = 8


class Rows(NamedTuple):
    """A step's rows as all ops but `expand` get them."""

    token_ids: Ints  # [T]
    read_slots: Ints  # [R]
    write_slots: Ints  # [R]
    positions: Ints  # [R]
    row_offsets: Ints  # [R + 1]


def expand(
    sampling: Ints, slots: Ints, positions: Ints, new: Ints, prefill: Ints, token_ids: Ints
) -> tuple[Rows, Ints]:
    """The rows, and sampling i32[S, 9] afterwards."""
    after, entries = sampling.copy(), {int(ints[0]): ints for ints in new}
    fed, read = [], []
    for row, slot in enumerate(slots):
        known = [row, slot, -1, *sampling[slot]]
        _, reads, feeds, *after[slot] = entries.get(row, known)
        read.append(reads)
        fed.append(feeds)
    reads, writes, starts, ends = prefill.T
    rows = (
        np.concatenate([np.array(fed, np.int32), token_ids[1:]]),
        np.concatenate([np.array(read, np.int32), reads[1:]]),
        np.concatenate([slots, writes[1:]]),
        np.concatenate([positions, starts[1:]]),
        np.concatenate([np.arange(len(slots)), ends]),
    )
    return Rows(*(row.astype(np.int32) for row in rows)), after


def embed(last_token: Array, token_ids: Array, read_slots: Array, table: Array) -> Array:
    """float[T, d]."""
    return np.array(
        [
            table[last_token[read_slots[t]] if token == -1 else token]
            for t, token in enumerate(token_ids)
        ],
        table.dtype,
    ).reshape(len(token_ids), table.shape[1])


def moments(x: F64, columns: int = 256) -> F64:
    """Of each row and so many columns of x[T, d] the mean, and the sum of squares about it."""
    parts = x.reshape(len(x), x.shape[1] // columns, columns)
    return np.stack([parts.mean(-1), parts.var(-1) * columns], axis=-1)


def layer_norm(x: F64) -> F64:
    """Each row of x[T, d] without gain and shift."""
    centred = x - x.mean(axis=1, keepdims=True)
    normed: F64 = centred / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
    return normed


def mix(
    state: F64,
    unit: int,
    x: F64,
    read_slots: Array,
    write_slots: Array,
    positions: Array,
    row_offsets: Array,
    alpha_in: F64,
    alpha_out: F64,
    beta: F64,
    decay: F64,
    gamma: F64 | None = None,
    silu: bool = False,
) -> tuple[F64, F64]:
    """(y[T, d], state[S, W] afterwards)."""
    width = x.shape[1]
    head = np.arange(width) // (width // decay.shape[1])
    columns = slice(unit * width, (unit + 1) * width)
    y = np.zeros(x.shape)
    after = state.copy()
    for row, position in enumerate(positions):
        s = state[read_slots[row], columns] if position else np.zeros(width)
        for t in range(row_offsets[row], row_offsets[row + 1]):
            p = position + t - row_offsets[row]
            s = alpha_in[head, p] * x[t] + decay.sum(0)[head] * s
            y[t] = alpha_out[head, p] * s + beta[head, p]
            if gamma is not None:
                y[t] += gamma[head, p] * x[t]
            if silu:
                y[t] /= 1 + np.exp(-y[t])
        after[write_slots[row], columns] = s
    return y, after


def taps(
    q: F64, positions: Array, row_offsets: Array, weight: F64, beta: F64, residual: F64
) -> F64:
    """y[T, d]."""
    kernel_size, y = len(weight), np.zeros(q.shape)
    for row, position in enumerate(positions):
        for t in range(row_offsets[row], row_offsets[row + 1]):
            p = position + t - row_offsets[row]
            for j in range(q.shape[1]):
                y[t, j] = beta[p] + residual[t, j]
                for i in range(kernel_size):
                    if j - (kernel_size - 1) + i >= 0:
                        y[t, j] += weight[i, p] * q[t, j - (kernel_size - 1) + i]
    return y


def edit(
    logits: F64,
    last: int,
    spans: Array,
    penalties: Array,
    tokens: Array,
    biases: Array,
    masks: Array,
) -> F64:
    """One row's new logits f64[V]; `last` is -1 if nothing was sampled yet."""
    biased, allowed, banned, pairs, prompt, sampled = (
        tokens[start:stop].tolist() for start, stop in spans.reshape(-1, 2)[:-1].tolist()
    )
    repetition, frequency, presence = (float(penalty) for penalty in penalties)
    if last >= 0:
        sampled = [*sampled, last]
    new = logits.copy()
    for token, bias in zip(biased, biases[spans[0] : spans[1]], strict=True):
        new[token] += bias
    for token in range(len(new)):
        if token in sampled or token in prompt:
            new[token] *= 1 / repetition if new[token] > 0 else repetition
        if token in sampled:
            new[token] -= frequency * sampled.count(token) + presence
        if token in banned or (allowed and token not in allowed):
            new[token] = -np.inf
    for before, token in zip(pairs[::2], pairs[1::2], strict=True):
        if before == last:
            new[token] = -np.inf
    if len(mask := masks[slice(*spans[-2:])]):
        new[~_bits(mask)[: len(new)]] = -np.inf
    return new


def constrain(logits: F64, record: Any, last: int, position: int, tables: Array) -> tuple[F64, int]:
    """A row's new logits f64[V] and state; `record` is its slot's, as a row of SAMPLING."""
    start = int(record["table"])
    if not start:
        return logits, int(record["state"])
    classes, states = (int(size) for size in tables[start : start + 2])
    padded = -(-len(logits) // 8) * 8
    class_of, after, distance = np.split(
        tables[start + 8 :][: padded + states * (classes + 1)].astype(int),
        [padded, padded + states * classes],
    )
    class_of = class_of[: len(logits)]
    after, state = after.reshape(states, classes), int(record["state"])
    state = ~state if state < 0 else int(after[state, class_of[last]])
    left = int(record["last_position"]) - position + 1
    limit = left if distance[state] <= left else 65_535
    return np.where(distance[after[state, class_of]] < limit, logits, -np.inf), state


def _bits(words: Array) -> npt.NDArray[np.bool_]:
    return np.unpackbits(words.view(np.uint8), bitorder="little").astype(np.bool_)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit words of randomness."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (second >> 32 ^ b ^ k, second & MASK_32, first >> 32 ^ d ^ m, first & MASK_32)
        k, m = (k + 0x9E3779B9) & MASK_32, (m + 0xBB67AE85) & MASK_32
    return a, b, c, d


def uniform(seed: int, position: int, round: int = 0) -> float:
    """53 bits in [0, 1)."""
    a, b, _, _ = philox((position, 0, round, 0), (seed & MASK_32, seed >> 32))
    return ((a >> 5) * 2**26 + (b >> 6)) / 2**53


def uniforms(seed: int, position: int) -> F64:
    """Those of all rounds of `reject`, and the one behind them."""
    return np.array([uniform(seed, position, round) for round in range(ROUNDS + 1)])


def softmax(z: F64) -> F64:
    weights: F64 = np.exp(z - z.max())
    weights /= weights.sum()
    return weights


def slices(logits: F64, temperatures: F64, columns: int = 256) -> F64:
    """Of each row and so many logits the largest, and what all weigh against it; f64[H, N, 2]."""
    parts = logits.reshape(len(logits), logits.shape[1] // columns, columns)
    largest = parts.max(-1, keepdims=True)
    scaled = (parts - largest) / np.where(temperatures == 0, 1, temperatures)[:, None, None]
    return np.stack([largest[..., 0], np.exp(scaled).sum(-1)], -1)


def truncated(logits: F64, temperature: float, top_k: int, top_p: float, min_p: float) -> F64:
    """The probabilities that are sampled from, f64[V]; 0 where a token is not kept."""
    p = softmax(logits / temperature)
    retained = p >= min_p * p.max()
    if 0 < top_k < retained.sum():
        retained &= logits >= np.sort(logits[retained])[-top_k]
    p[~retained] = 0
    p /= p.sum()
    if top_p < 1:
        mass = 0.0
        for threshold in np.unique(logits[retained])[::-1]:
            mass += p[retained & (logits == threshold)].sum()
            if mass >= top_p:
                break
        p[logits < threshold] = 0
        p /= p.sum()
    return p


def sample(
    logits: F64, temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> tuple[int, float]:
    """(token, logprob) of one row, for one uniform."""
    if np.isnan(logits).any() or not math.isfinite(logits.max()):
        return -1, 0.0
    if temperature == 0:
        token = int(logits.argmax())
        return token, math.log(softmax(logits)[token])
    p = truncated(logits, temperature, top_k, top_p, min_p)
    token = int(np.flatnonzero(p.cumsum() > u)[0])
    return token, math.log(softmax(logits / temperature)[token])


def reject(
    logits: F64, temperature: float, top_k: int, top_p: float, min_p: float, uniforms: F64
) -> tuple[int, float]:
    """The same by rejection: the first of ROUNDS draws from all tokens that is kept, or else a draw
    from the tokens kept. Where both top_k and top_p truncate, it is `sample`."""
    rounds = 0 if top_k > 0 and top_p < 1 else ROUNDS
    if temperature > 0 and math.isfinite(logits.max()):
        retained = truncated(logits, temperature, top_k, top_p, min_p) > 0
        for u in uniforms[:rounds]:
            token, logprob = sample(logits, temperature, 0, 1, 0, float(u))
            if retained[token]:
                return token, logprob
    return sample(logits, temperature, top_k, top_p, min_p, float(uniforms[rounds]))


def score(
    logits: F64, temperature: float, target: int, num_top: int, named: Sequence[int] = ()
) -> tuple[float, int, list[tuple[int, float]]]:
    """(logprob, rank) of the target and (id, logprob) of the likeliest, or of those in the list at
    ~num_top of `named`; NaN, 0 and none if none."""
    if np.isnan(logits).any() or not math.isfinite(logits.max()):
        return math.nan, 0, []
    z = logits / (temperature or 1.0)
    logprobs = z - z.max() - math.log(np.exp(z - z.max()).sum())
    order = sorted(range(len(z)), key=lambda token: (-logits[token], token))
    begin = ~num_top + 1
    chosen = order[:num_top] if num_top >= 0 else named[begin : begin + named[begin - 1]]
    likeliest = [(int(token), float(logprobs[token])) for token in chosen]
    return float(logprobs[target]), order.index(target) + 1, likeliest
