"""Recurrent units of a training run by two Triton kernels, one forward and one backward.

A program of a kernel has up to 64 channels of one head and row. It goes over the tokens in chunks,
forward or backward, and holds in float32 what is carried between chunks. Within a chunk inputs are
weighted by powers of the decay relative to its middle, so that their sums are a product with a
triangle of ones, and no matrix of powers is made or rounded: with m the middle,

    Σ_{s≤t} decay^(t-s) α_s x_s = decay^(t-m) Σ_{s≤t} u_s,  u_s = decay^(m-s) α_s x_s

and the same from the end for gradients: g_t = decay^(t-m) α_t ∂L/∂y_t. As decays are 0.9 or more,
these powers are at most 29. With S and U the sums of u and g, what is carried included, the decay's
gradient needs none of a matrix either:

    decay · ∂L/∂decay = Σ_{s≤t} (t - s) u_s g_t = Σ_t t (g_t S_t - u_t U_t)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from srm.errors import ConfigError

from .units_srm import Places, Unit

CHUNK = tl.constexpr(64)
"""Tokens that are summed by one product."""
_SUMS = tl.constexpr(5)
"""Gradients of a token and head: of α_in, α_out, β, γ, and the term of the decay's."""
_WIDEST = 64
WARPS = 8
"""With 4 the kernel backward has no register left, and spills."""


def run_unit(x: Tensor, unit: Unit, places: Places) -> Tensor:
    """Return the unit's y of x [rows, length, H, e], bfloat16 or float16; float32 is for tests.

    Raises ConfigError for rows of several documents, weights of several channels, and float32 on a
    GPU, where it has no tensor cores and 9 KB of a thread's registers spill."""
    is_wide = x.is_cuda and x.dtype not in {torch.bfloat16, torch.float16}
    for what, is_refused in (
        ("separate documents", places.documents is not None),
        ("mixer = kernel", len(unit.alpha_out) > 1),
        ("float32, as mixers without projections have it", is_wide),
    ):
        if is_refused:
            raise ConfigError(f"the Triton kernel cannot train with {what}")
    scalars = unit.alpha_in, *(unit.alpha_out or (None,)), unit.beta, unit.gamma
    placed = [None if row is None else row.squeeze(-1).mT.contiguous() for row in scalars]
    y: Tensor = _Sums.apply(x, unit.decay.contiguous(), *placed)  # type: ignore[no-untyped-call]
    return y


class _Sums(torch.autograd.Function):
    """A unit of x with scalars [H, length]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, decay: Tensor, *scalars: Tensor | None) -> Tensor:
        x = x.contiguous()
        rows, length, heads, width = x.shape
        y = torch.empty_like(x)
        starts = x.new_empty(
            rows, triton.cdiv(length, CHUNK.value), heads, width, dtype=torch.float32
        )
        grid, block = _sizes(x)
        _forward[grid](
            x, y, starts, decay, *scalars, length, heads, width, WIDTH=block, num_warps=WARPS
        )
        ctx.save_for_backward(x, starts, decay, *scalars)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, starts, decay, *scalars = ctx.saved_tensors
        _, length, heads, width = x.shape
        of_x, (grid, block) = torch.empty_like(x), _sizes(x)
        sums = x.new_empty(grid[0] * grid[2], _SUMS.value, heads, length, dtype=torch.float32)
        arrays = x, gradients[0].contiguous(), of_x, starts, sums, decay
        _backward[grid](*arrays, *scalars, length, heads, width, WIDTH=block, num_warps=WARPS)
        total = sums.sum(0)
        of_scalars = total[:-1].to(x.dtype).unbind()
        named = [
            gradient if row is not None else None
            for row, gradient in zip(scalars, of_scalars, strict=True)
        ]
        return of_x, total[-1].sum(-1, dtype=decay.dtype) / decay, *named


def _sizes(x: Tensor) -> tuple[tuple[int, int, int], int]:
    """Return the numbers of programs, and the channels of each, for which a product takes 16."""
    rows, _, heads, width = x.shape
    block = max(16, min(_WIDEST, triton.next_power_of_2(width)))
    return (rows, heads, triton.cdiv(width, block)), block


@triton.jit
def _forward(
    x: tl.tensor,
    y: tl.tensor,
    starts: tl.tensor,
    decay: tl.tensor,
    alpha_in: tl.tensor,
    alpha_out: tl.tensor,
    beta: tl.tensor,
    gamma: tl.tensor,
    length: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Write y, and into `starts` [rows, chunks, H, e] the sum before each chunk."""
    head, channels, row_at, step = _place(length, heads, width, WIDTH)
    rising, falling, near, far, over = _powers(decay + head)
    tokens, is_channel = tl.arange(0, CHUNK), channels < width
    earlier = tl.where(tokens[:, None] >= tokens[None, :], 1.0, 0.0).to(x.dtype.element_ty)
    before = tl.zeros((WIDTH,), tl.float32)
    chunks = tl.cdiv(length, CHUNK)
    for chunk in range(chunks):
        t = chunk * CHUNK + tokens
        mask = (t < length)[:, None] & is_channel[None, :]
        at = row_at + t[:, None] * step + channels[None, :]
        inputs = tl.load(x + at, mask=mask, other=0.0)
        at_scalars = head * length + t
        weight = _scalar(alpha_in, at_scalars, t < length, 1.0) * rising
        u = (weight * inputs).to(inputs.dtype)
        sums = tl.dot(earlier, u, input_precision="ieee") + near * before[None, :]
        result = _scalar(alpha_out, at_scalars, t < length, 1.0) * falling * sums
        result += _scalar(gamma, at_scalars, t < length, 0.0) * inputs
        result += _scalar(beta, at_scalars, t < length, 0.0)
        tl.store(y + at, result.to(inputs.dtype), mask=mask)
        at_start = (tl.program_id(0).to(tl.int64) * chunks + chunk) * step + head * width
        tl.store(starts + at_start + channels, before, mask=is_channel)
        before = over * before + far * tl.sum(u.to(tl.float32), 0)


@triton.jit
def _backward(
    x: tl.tensor,
    of_y: tl.tensor,
    of_x: tl.tensor,
    starts: tl.tensor,
    sums: tl.tensor,
    decay: tl.tensor,
    alpha_in: tl.tensor,
    alpha_out: tl.tensor,
    beta: tl.tensor,
    gamma: tl.tensor,
    length: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Write the gradient of x, and into `sums` [programs, 5, H, length] those of the scalars."""
    head, channels, row_at, step = _place(length, heads, width, WIDTH)
    rising, falling, near, far, over = _powers(decay + head)
    tokens, is_channel = tl.arange(0, CHUNK), channels < width
    earlier = tl.where(tokens[:, None] >= tokens[None, :], 1.0, 0.0).to(x.dtype.element_ty)
    later = tl.where(tokens[:, None] <= tokens[None, :], 1.0, 0.0).to(x.dtype.element_ty)
    behind = tl.zeros((WIDTH,), tl.float32)  # the gradient of what is carried out of a chunk
    chunks = tl.cdiv(length, CHUNK)
    by = heads * length
    program = tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
    sums += program.to(tl.int64) * _SUMS * by
    for number in range(chunks):
        chunk = chunks - 1 - number
        t = chunk * CHUNK + tokens
        is_token = t < length
        mask = is_token[:, None] & is_channel[None, :]
        at = row_at + t[:, None] * step + channels[None, :]
        inputs = tl.load(x + at, mask=mask, other=0.0)
        result = tl.load(of_y + at, mask=mask, other=0.0)
        at_start = (tl.program_id(0).to(tl.int64) * chunks + chunk) * step + head * width
        before = tl.load(starts + at_start + channels, mask=is_channel, other=0.0)
        at_scalars = head * length + t
        weight_in = _scalar(alpha_in, at_scalars, is_token, 1.0) * rising
        weight_out = _scalar(alpha_out, at_scalars, is_token, 1.0) * falling
        u, g = (weight_in * inputs).to(inputs.dtype), (weight_out * result).to(inputs.dtype)
        after = tl.dot(later, g, input_precision="ieee") + far * behind[None, :]
        own = weight_in * after + _scalar(gamma, at_scalars, is_token, 0.0) * result
        tl.store(of_x + at, own.to(inputs.dtype), mask=mask)
        total = tl.dot(earlier, u, input_precision="ieee") + near * before[None, :]
        to = sums + at_scalars
        if alpha_in is not None:
            tl.store(to, tl.sum(rising * after * inputs, 1), mask=is_token)
        if alpha_out is not None:
            tl.store(to + by, tl.sum(falling * total * result, 1), mask=is_token)
        if beta is not None:
            tl.store(to + 2 * by, tl.sum(result.to(tl.float32), 1), mask=is_token)
        if gamma is not None:
            tl.store(to + 3 * by, tl.sum(result.to(tl.float32) * inputs, 1), mask=is_token)
        tl.store(to + 4 * by, t * tl.sum(g * total - u * after, 1), mask=is_token)
        behind = over * behind + near * tl.sum(g.to(tl.float32), 0)


@triton.jit
def _place(length: tl.tensor, heads: tl.tensor, width: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return the program's head, channels, where its first token is, and numbers a token."""
    head, step = tl.program_id(1), heads * width
    channels = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    return head, channels, tl.program_id(0).to(tl.int64) * length * step + head * width, step


@triton.jit
def _powers(decay: tl.tensor) -> tl.tensor:
    """Return powers of the decay: from each token of a chunk to its middle and back; from the chunk
    before to the middle, from there to the last token, and over a chunk."""
    rate = tl.log2(tl.load(decay)).to(tl.float32)
    gaps = (tl.arange(0, CHUNK) - CHUNK // 2)[:, None] * rate
    near, far = tl.exp2(rate * (CHUNK // 2 + 1)), tl.exp2(rate * (CHUNK // 2 - 1))
    return tl.exp2(-gaps), tl.exp2(gaps), near, far, tl.exp2(rate * CHUNK)


@triton.jit
def _scalar(row: tl.tensor, at: tl.tensor, mask: tl.tensor, missing: tl.constexpr) -> tl.tensor:
    """Return scalars of tokens as f32[tokens, 1]; `missing` where the unit has none."""
    if row is None:
        values = tl.full(at.shape, missing, tl.float32)
    else:
        values = tl.load(row + at, mask=mask, other=missing).to(tl.float32)
    return values[:, None]
