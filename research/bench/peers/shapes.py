"""The compared models: the cost of a token in each, and the size of a sequence's state.

Counted, not measured. FLOP are multiply-adds of matrix products with weights, two each, output head
included; the further work of attention is left out.
"""

from __future__ import annotations

import msgspec

KINDS = ("srm", "llama")
LAYERS, HEADS, VOCAB_SIZE, N_CTX = 8, 4, 8192, 512
"""Sizes that are the same in every model, as in the paper."""


class Shape(msgspec.Struct, frozen=True):
    """The shape of one model."""

    kind: str
    """Kind of model, one of KINDS."""
    d_model: int

    @property
    def name(self) -> str:
        """The name, such as `llama-512`."""
        return f"{self.kind}-{self.d_model}"

    @property
    def flops_per_token(self) -> int:
        """FLOP of decoding one token."""
        head = self.d_model * VOCAB_SIZE
        return 2 * (LAYERS * self._weights_per_layer + head)

    @property
    def _weights_per_layer(self) -> int:
        factors = {
            "srm": 8 + 2,  # up and down by 4; into the heads and out
            "llama": 4 + 3 * 4,  # q, k, v, o; gate, up and down by 4
        }
        return factors[self.kind] * self.d_model**2

    def state_bytes(self, width: int = 4) -> int:
        """Return the bytes of a state of N_CTX tokens, in numbers of `width` bytes."""
        numbers = {"srm": 1, "llama": 2 * N_CTX}[self.kind] * self.d_model
        return LAYERS * numbers * width

    def task(self) -> dict[str, int]:
        """Return the shape in the form that the programs of peers take."""
        return {
            "d_model": self.d_model,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "vocab_size": VOCAB_SIZE,
            "n_ctx": N_CTX,
        }


def shape_of(name: str) -> Shape:
    """Return the shape of a name such as `llama-512`."""
    kind, _, width = name.partition("-")
    return Shape(kind, int(width))
