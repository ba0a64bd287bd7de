"""The compared models: the cost of a token in each, and the size of a sequence's state.

Counted, not measured. FLOP are multiply-adds of matrix products with weights, two each, output head
included; the further work of attention is left out.
"""

from __future__ import annotations

from typing import Any

import msgspec

KINDS = ("srm", "llama", "mamba2")
LAYERS, HEADS, VOCAB_SIZE, N_CTX = 8, 4, 8192, 512
"""Sizes that are the same in every model, as in the paper, unless a name says another context."""
MAMBA_LAYERS, MAMBA_STATE, MAMBA_HEAD, MAMBA_KERNEL = 12, 128, 64, 4
"""Mamba 2 has more layers, so that it has as many weights as an SRM of its width."""


class Shape(msgspec.Struct, frozen=True):
    """The shape of one model."""

    kind: str
    """Kind of model, one of KINDS."""
    d_model: int
    n_ctx: int = N_CTX

    @property
    def name(self) -> str:
        """The name, such as `llama-512`, or `llama-512-20480` with another context."""
        return f"{self.kind}-{self.d_model}" + f"-{self.n_ctx}" * (self.n_ctx != N_CTX)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return MAMBA_LAYERS if self.kind == "mamba2" else LAYERS

    @property
    def flops_per_token(self) -> int:
        """FLOP of decoding one token."""
        head = self.d_model * VOCAB_SIZE
        return 2 * (self.num_layers * self._weights_per_layer + head)

    @property
    def _weights_per_layer(self) -> int:
        factors = {
            "srm": 8 + 2,  # up and down by 4; into the heads and out
            "llama": 4 + 3 * 4,  # q, k, v, o; gate, up and down by 4
            "mamba2": 4 + 2,  # x and z, of twice the width; out
        }
        small = 2 * MAMBA_STATE + 2 * self.d_model // MAMBA_HEAD  # B, C, dt
        return (factors[self.kind] * self.d_model + small * (self.kind == "mamba2")) * self.d_model

    def state_bytes(self, width: int = 4) -> int:
        """Return the bytes of a state of the whole context, in numbers of `width` bytes."""
        inner = 2 * self.d_model  # of Mamba 2, whose convolution sees B and C too
        numbers = {
            "srm": self.d_model,
            "llama": 2 * self.n_ctx * self.d_model,
            "mamba2": inner * MAMBA_STATE + (MAMBA_KERNEL - 1) * (inner + 2 * MAMBA_STATE),
        }
        return self.num_layers * numbers[self.kind] * width

    def task(self) -> dict[str, Any]:
        """Return the shape in the form that the programs of peers take."""
        return {
            "kind": self.kind,
            "d_model": self.d_model,
            "num_layers": self.num_layers,
            "num_heads": HEADS,
            "vocab_size": VOCAB_SIZE,
            "n_ctx": self.n_ctx,
            "state_size": MAMBA_STATE,
            "head_size": MAMBA_HEAD,
            "kernel": MAMBA_KERNEL,
        }


def shape_of(name: str) -> Shape:
    """Return the shape of a name such as `llama-512` or `llama-512-20480`."""
    kind, *sizes = name.split("-")
    return Shape(kind, *map(int, sizes))
