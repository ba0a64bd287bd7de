"""The compared models: the cost of a token in each, and the size of a sequence's state.

Counted, not measured. FLOP are multiply-adds of matrix products with weights, two each, output head
included; the further work of attention and scans is left out.
"""

from __future__ import annotations

import msgspec

KINDS = ("srm", "llama", "mamba", "mamba2", "rwkv4", "rwkv7")
LAYERS, HEADS, VOCAB_SIZE, N_CTX = 8, 4, 8192, 512
"""Sizes that are the same in every model, as in the paper."""

_MAMBA_STATE, _MAMBA_CONV, _MAMBA2_HEADS = 16, 4, 8
_RWKV_HEAD, _RWKV_RANK = 64, 64


class Shape(msgspec.Struct, frozen=True):
    """The shape of one model."""

    kind: str
    """Kind of model, one of KINDS. `mamba2` has the paper's state of d_model / 2 in 8 heads,
    `mamba` one of 16."""
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
        d, inner, rank = self.d_model, 2 * self.d_model, self.d_model // 16
        return {
            "srm": (8 + 2) * d * d,  # up and down by 4; into the heads and out
            "llama": (4 + 3 * 4) * d * d,  # q, k, v, o; gate, up and down by 4
            "mamba": 3 * d * inner + 2 * inner * (rank + _MAMBA_STATE),
            "mamba2": 3 * d * inner + d * (2 * (d // 2) + _MAMBA2_HEADS),
            "rwkv4": (4 + 9) * d * d,  # r, k, v, o; key and value by 4, receptance
            "rwkv7": (4 + 8) * d * d + 8 * d * _RWKV_RANK,  # without receptance; 4 low ranks
        }[self.kind]

    def state_bytes(self, width: int = 4) -> int:
        """Return the bytes of a state of N_CTX tokens, in numbers of `width` bytes."""
        d = self.d_model
        numbers = {
            "srm": d,
            "llama": 2 * N_CTX * d,
            "mamba": 2 * d * (_MAMBA_STATE + _MAMBA_CONV - 1),
            "mamba2": 2 * d * (d // 2) + (2 * d + d) * (_MAMBA_CONV - 1),
            "rwkv4": 5 * d,
            "rwkv7": d * _RWKV_HEAD + 2 * d,
        }[self.kind]
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
