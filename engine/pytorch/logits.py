"""PyTorch's edits, tables, sampling and scores of logits; `mojo_kernels/srm/logits` has the same as
kernels. The draw of a token is a function of its row's seed and position here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from srm.engine.messages import MAX_LOGPROBS
from srm.engine.pytorch.model import put
from srm.engine.state.tables import TURN
from srm.engine.steps.batch import Batch, Edits, Records, Span

SLICE = 256
"""Columns of logits that are summed together, before one of these slices is looked into."""
_BLOCK = 2**25
"""Most logits that are sampled at once: their copies take memory too."""
_WORD = 0xFFFFFFFF


class Ways(NamedTuple):
    """How D rows sample: the fields of SAMPLING that a draw needs, on the device."""

    temperature: Tensor  # f32[D]
    top_k: Tensor  # i64[D]
    top_p: Tensor  # f32[D]
    min_p: Tensor  # f32[D]
    seed: Tensor  # i64[D, 2] lower and upper half


def ways_of(records: Records) -> Ways:
    """Return them on the host."""
    seeds = records["seed"]
    halves = np.stack([seeds & _WORD, seeds >> np.uint64(32)], 1).astype(np.int64)
    return Ways(
        torch.from_numpy(records["temperature"].copy()),
        torch.from_numpy(records["top_k"].astype(np.int64)),
        torch.from_numpy(records["top_p"].copy()),
        torch.from_numpy(records["min_p"].copy()),
        torch.from_numpy(halves),
    )


def truncates(records: Records) -> bool:
    """Whether some row samples from a part of the vocabulary."""
    of_any = (records["top_k"] > 0) | (records["top_p"] < 1) | (records["min_p"] > 0)
    return bool((of_any & (records["temperature"] > 0)).any())


def draw_uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return f64[D] in [0, 1), by Philox4x32-10 (Salmon et al. 2011) of seed and position."""
    a, zero = positions, torch.zeros_like(positions)
    b, c, d = zero, zero, zero
    k, m = seeds.unbind(1)
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, c = (second >> 32) & _WORD ^ b ^ k, (first >> 32) & _WORD ^ d ^ m
        b, d = second & _WORD, first & _WORD
        k, m = (k + 0x9E3779B9) & _WORD, (m + 0xBB67AE85) & _WORD
    return ((a >> 5) * 2**26 + (b >> 6)).double() / 2**53


def sample(logits: Tensor, ways: Ways, positions: Tensor, has_parts: bool) -> tuple[Tensor, Tensor]:
    """Return the tokens i32[D], -1 where the logits f32[D, V] are not finite, and their
    log-probabilities f32[D]. `has_parts`: some rows sample from a part of the vocabulary."""
    if not len(logits):
        return torch.empty(0, dtype=torch.int32), torch.empty(0)
    uniforms = draw_uniforms(ways.seed, positions)
    tokens, logprobs = _in_blocks(
        partial(_sample_block, has_parts), logits.shape[1], logits, uniforms, *ways
    )
    return tokens, logprobs


def _in_blocks(
    compute: Callable[..., tuple[Tensor, ...]], vocab: int, *rows: Tensor
) -> Iterator[Tensor]:
    """Return what is computed of all rows, of as many at once as there is memory for."""
    count = max(1, _BLOCK // vocab)
    blocks = (
        compute(*(tensor[at : at + count] for tensor in rows))
        for at in range(0, len(rows[0]), count)
    )
    return map(torch.cat, zip(*blocks, strict=True))


def _sample_block(
    has_parts: bool, logits: Tensor, uniforms: Tensor, *fields: Tensor
) -> tuple[Tensor, Tensor]:
    ways = Ways._make(fields)
    largest, likeliest = logits.max(1)  # the first of equal ones; NaN if there is any
    is_greedy = ways.temperature == 0
    divisor = torch.where(is_greedy, 1.0, ways.temperature)[:, None]
    weights = ((logits - largest[:, None]) / divisor).exp()
    total = weights.sum(1, dtype=torch.float64)
    drawn_from = weights
    if has_parts:
        least = _least_logits(logits, divisor, ways)
        drawn_from = torch.where(logits >= least[:, None], weights, 0.0)
    is_finite = largest.isfinite()
    tokens = torch.where(is_greedy, likeliest, _draw(drawn_from, uniforms))
    tokens = torch.where(is_finite, tokens, 0)
    of_token = logits.gather(1, tokens[:, None])[:, 0]
    logprobs = (of_token - largest) / divisor[:, 0] - total.log().float()
    return torch.where(is_finite, tokens, -1).int(), torch.where(is_finite, logprobs, 0.0)


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token i64[D] at which the sum of weights f32[D, V] passes that fraction."""
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[1] % SLICE))
    slices = padded.view(len(weights), -1, SLICE)
    sums = slices.sum(2, dtype=torch.float64).cumsum(1)
    total = sums[:, -1]
    mass = uniforms * total
    end = (sums < total[:, None]).sum(1)  # the last slice of some weight
    chosen = torch.minimum((sums <= mass[:, None]).sum(1), end)
    before = torch.where(chosen > 0, sums.gather(1, (chosen - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    own = slices[torch.arange(len(weights), device=weights.device), chosen].double()
    passed = (own.cumsum(1) <= (mass - before)[:, None]) | (own == 0)
    # The sums of slices and of tokens are rounded apart: the last token of some weight is the end.
    last = SLICE - 1 - (own > 0).flip(1).int().argmax(1)
    return chosen * SLICE + torch.where(passed.all(1), last, (~passed).int().argmax(1))


def _least_logits(logits: Tensor, divisor: Tensor, ways: Ways) -> Tensor:
    """Return the least logit f32[D] that each row may sample: by min_p, then the top_k of those,
    then the fewest of these that weigh top_p together. Equal logits are in or out together."""
    ordered = logits.sort(1, descending=True).values
    weights = ((ordered - ordered[:, :1]) / divisor).exp().double()
    last = (weights >= ways.min_p[:, None]).sum(1) - 1
    by_rank = torch.where(ways.top_k > 0, ways.top_k, logits.shape[1]) - 1
    least = ordered.gather(1, torch.minimum(last, by_rank).clamp(min=0)[:, None])
    masses = torch.where(ordered >= least, weights, 0.0).cumsum(1)
    wanted = ways.top_p.double() * masses[:, -1]
    place = (masses < wanted[:, None]).sum(1).clamp(max=logits.shape[1] - 1)
    by_mass = ordered.gather(1, place[:, None])[:, 0]
    return torch.where(ways.top_p < 1, torch.maximum(by_mass, least[:, 0]), least[:, 0])


def edit(logits: Tensor, edits: Edits, last: Tensor) -> None:
    """Edit the rows of logits in place, in the order of `engine.steps.batch.Edits`. `last` i64[E]
    is the token sampled last, -1 before the first."""
    device, (count, vocab) = logits.device, (len(edits.rows), logits.shape[1])
    rows = put(edits.rows, device).long()
    own = logits.index_select(0, rows)

    def entries(span: Span) -> tuple[Tensor, Tensor]:
        """The row among the edited, and the place in `tokens`, of each entry of such a list."""
        starts, stops = edits.spans[:, 2 * span], edits.spans[:, 2 * span + 1]
        owners = np.repeat(np.arange(count), stops - starts)
        ranges = [np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)]
        places = np.concatenate(ranges).astype(np.int64)
        return put(owners, device), put(places, device)

    tokens = put(edits.tokens, device).long()
    owners, places = entries(Span.BIASED)
    biases = put(edits.biases, device)
    own[owners, tokens[places]] += biases[places]
    sampled = torch.zeros(count, vocab, device=device)
    owners, places = entries(Span.SAMPLED)
    sampled.index_put_((owners, tokens[places]), torch.ones((), device=device), accumulate=True)
    sampled.scatter_add_(1, last.clamp(min=0)[:, None], (last >= 0).float()[:, None])
    is_seen = sampled > 0
    owners, places = entries(Span.PROMPT)
    is_seen[owners, tokens[places]] = True
    repetition, frequency, presence = (put(edits.penalties, device)[:, None, at] for at in range(3))
    own = torch.where(is_seen, torch.where(own > 0, own / repetition, own * repetition), own)
    own = own - torch.where(sampled > 0, frequency * sampled + presence, 0.0)
    is_banned = torch.zeros_like(is_seen)
    owners, places = entries(Span.ALLOWED)
    is_banned[owners] = True
    is_banned[owners, tokens[places]] = False
    owners, places = entries(Span.BANNED)
    is_banned[owners, tokens[places]] = True
    owners, places = entries(Span.PAIRS)
    is_pair = tokens[places[::2]] == last[owners[::2]]
    is_banned[owners[::2][is_pair], tokens[places[1::2]][is_pair]] = True
    for row, (start, stop) in enumerate(edits.spans[:, -2:].tolist()):
        if start < stop:
            bits = np.unpackbits(edits.masks[start:stop].view(np.uint8), bitorder="little")
            is_banned[row] |= put(bits[:vocab] == 0, device)
    logits.index_copy_(0, rows, own.masked_fill(is_banned, -torch.inf))


def constrain(
    logits: Tensor,
    records: Records,
    states: Tensor,
    last: Tensor,
    positions: Tensor,
    tables: Tensor,
) -> None:
    """Ban in the rows of logits what their tables forbid, and move their automata.

    `records` of D rows; `states` i64[D] is what the device knows of each automaton, and changed in
    place; `last` i64[D] the tokens sampled last. A table is laid out as `engine.state.tables` says.
    """
    rows = put(np.flatnonzero(records["table"]), logits.device)
    if not len(rows):
        return

    def entries(places: Tensor) -> Tensor:
        return tables[places].long() & 0xFFFF  # of 16 bits, without a sign

    def of_rows(name: str) -> Tensor:
        return put(records[name], logits.device).long()[rows]

    vocab = logits.shape[1]
    begin = of_rows("table")
    num_classes, num_states = entries(begin), entries(begin + 1)
    class_of = begin + TURN
    after = class_of + -(-vocab // TURN) * TURN
    distance = after + num_states * num_classes
    state = states[rows]
    of_last = after + state.clamp(min=0) * num_classes + entries(class_of + last[rows].clamp(min=0))
    state = torch.where(state < 0, ~state, entries(of_last))
    states[rows] = state
    left = of_rows("last_position") - positions[rows] + 1
    limit = torch.where(entries(distance + state) <= left, left, 65_535)
    count = max(1, _BLOCK // 8 // vocab)
    for at in range(0, len(rows), count):
        part = slice(at, at + count)
        classes = entries(class_of[part, None] + torch.arange(vocab, device=logits.device))
        targets = entries((after + state * num_classes)[part, None] + classes)
        is_allowed = entries(distance[part, None] + targets) < limit[part, None]
        logits[rows[part]] = logits[rows[part]].masked_fill(~is_allowed, -torch.inf)


def score(logits: Tensor, batch: Batch, temperatures: Tensor, tokens: Tensor) -> Iterator[Tensor]:
    """Return the fields of `Scores` of the batch's `score_rows`, on the device. `temperatures`
    f32[D] and `tokens` i32[D], what they sampled, are those of the rows that decode."""
    device, decode = logits.device, batch.num_decode
    rows = put(batch.score_rows, device).long()
    divisors = torch.ones(len(logits), device=device)
    divisors[:decode] = torch.where(temperatures == 0, 1.0, temperatures)
    targets = torch.cat([tokens.long(), put(batch.targets[1:], device).long()])
    named, widths = _named(batch)
    return _in_blocks(
        partial(_score_block, logits, max(MAX_LOGPROBS, *widths, 0)),
        logits.shape[1],
        *(rows, divisors[rows], targets[rows]),
        *(put(batch.num_top, device), put(named, device)),
    )


def _named(batch: Batch) -> tuple[np.ndarray[Any, np.dtype[np.int64]], list[int]]:
    """Return the tokens that each scored row names, i64[Q, most], -1 behind them; and how many
    alternatives each has."""
    lists = [
        batch.named[~top + 1 : ~top + 1 + batch.named[~top]] if top < 0 else np.empty(0, np.int32)
        for top in batch.num_top.tolist()
    ]
    named = np.full((len(lists), max(map(len, lists), default=0)), -1, np.int64)
    for row, ids in enumerate(lists):
        named[row, : len(ids)] = ids
    widths = np.where(batch.num_top < 0, [*map(len, lists)], batch.num_top)
    return named, widths.tolist()


def _score_block(
    all_logits: Tensor,
    width: int,
    rows: Tensor,
    divisors: Tensor,
    targets: Tensor,
    num_top: Tensor,
    named: Tensor,
) -> tuple[Tensor, ...]:
    logits = all_logits[rows]
    is_finite = logits.max(1).values.isfinite()
    logprobs = (logits / divisors[:, None]).log_softmax(1)
    safe = targets.clamp(min=0)[:, None]
    of_target = logits.gather(1, safe)
    ids = torch.arange(logits.shape[1], device=logits.device)
    is_before = (logits > of_target) | ((logits == of_target) & (ids < safe))
    ranks = torch.where(is_finite, is_before.sum(1) + 1, 0).int()
    columns = torch.arange(width, device=logits.device)
    # In a stable order equal ones are by id.
    likeliest = logits.sort(dim=1, descending=True, stable=True).indices[:, :width]
    likeliest = torch.nn.functional.pad(likeliest, (0, width - likeliest.shape[1]), value=-1)
    likeliest = torch.where(columns < num_top[:, None], likeliest, -1)
    named = torch.nn.functional.pad(named, (0, width - named.shape[1]), value=-1)
    top_ids = torch.where(num_top[:, None] < 0, named, likeliest)
    top_ids = torch.where(is_finite[:, None], top_ids, -1)
    top = torch.where(top_ids >= 0, logprobs.gather(1, top_ids.clamp(min=0)), 0.0)
    of_target = torch.where(is_finite, logprobs.gather(1, safe)[:, 0], torch.nan)
    return of_target, ranks, top_ids.int(), top
