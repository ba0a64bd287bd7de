"""What a recurrent unit makes of random inputs, and all of its gradients, by torch or a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from srm.training.huggingface.units_srm import Places, RunUnit, Unit, Units, place_units


def unit_results(
    dtype: torch.dtype, run: RunUnit | None, shape: tuple[int, int, int, int], device: str = "cpu"
) -> dict[str, Tensor]:
    """Its y and gradients in float64, of numbers that 16 bits of either kind have, computed in
    `dtype`; shape is [rows, length, H, e]. Of two decays one is slow."""
    rows, length, heads, width = shape
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator).half().bfloat16()
        return values.to(device, dtype).requires_grad_()

    x, of_y = drawn(rows, length, heads, width), drawn(rows, length, heads, width).detach()
    alpha_in, alpha_out, beta, gamma = (drawn(1, heads, length) for _ in range(4))
    decay = torch.tensor([[0.95, 0.999]], dtype=torch.float64, device=device).requires_grad_()
    leaves = {"decay": decay, "x": x, "α in": alpha_in, "α out": alpha_out}
    leaves |= {"β": beta, "γ": gamma}
    places = Places(slice(length), run=run)
    (placed,) = place_units(
        [Unit(decay.repeat(1, heads // 2), alpha_in, (alpha_out,), beta, gamma)],
        places,
        length,
        dtype,
    )
    y = Units(places, None, placed).run(x)
    assert y.dtype == dtype
    of_leaves = torch.autograd.grad(y, list(leaves.values()), of_y)
    results = {"y": y.detach(), **dict(zip(leaves, of_leaves, strict=True))}
    return {name: values.double().cpu() for name, values in results.items()}


def check_unit(
    dtype: torch.dtype, run: RunUnit, shape: tuple[int, int, int, int], device: str = "cpu"
) -> None:
    """All of it is as near to float64 as by torch, but for a factor of 3, or one step of dtype."""
    expected = unit_results(torch.float64, None, shape)
    result = unit_results(dtype, run, shape, device)
    for name, values in unit_results(dtype, None, shape, device).items():
        largest = expected[name].abs().max()
        of_torch, own = ((some - expected[name]).abs().max() for some in (values, result[name]))
        assert own <= max(3 * of_torch, largest * torch.finfo(dtype).eps), name
