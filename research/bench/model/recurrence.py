"""The decode step of a model in plain PyTorch: the baseline that the engine is measured against.

The blocks are the model's, but for their token mixers, which are optimized for speed: every matrix
is whole and every scalar laid out per channel beforehand, states change in place, and a token is
drawn by one argmax over logits with Gumbel noise, which took less time than `torch.multinomial`
wherever it was tried. All sequences are at one position. Supports only models whose layers have one
unit without γ and taps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from srm.training.huggingface.mixers_srm import TokenMixer, stacked_units
from srm.training.model import SRM


class Recurrence(nn.Module):
    """Takes a model for its own: matrices and activations become `dtype`; states and the mixer's
    scalars stay float32."""

    def __init__(self, model: SRM, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = model.config
        self.layers = model.mixer_blocks
        mixers = [_Mixer(layer.get_submodule("token_mixing_layer"), dtype) for layer in self.layers]
        self.embedding, self.head = model.input_layer.to(dtype), model.output_layer.to(dtype)
        for layer, mixer in zip(self.layers.to(dtype), mixers, strict=True):
            layer.token_mixing_layer = mixer
        self.requires_grad_(False)

    def forward(self, tokens: Tensor, state: Tensor, position: Tensor) -> Tensor:
        """Feed i64[batch] at `position` i64[1]; return the next tokens, sampled at temperature 1.

        state f32[layers, batch, d], zeros before position 0, is updated in place.
        """
        logits = self.logits(tokens, state, position).float()
        noise = -torch.log(-torch.log(torch.rand_like(logits)))
        return (logits + noise).argmax(-1)

    def logits(self, tokens: Tensor, state: Tensor, position: Tensor) -> Tensor:
        """Return the logits [batch, V] of the same step."""
        logits: Tensor = self.head(self.run_layers(tokens, state, position))
        return logits

    def run_layers(self, tokens: Tensor, state: Tensor, position: Tensor) -> Tensor:
        """Return what the last layer gives in the same step, [batch, d]."""
        x: Tensor = self.embedding(tokens)
        for layer, layer_state in zip(self.layers, state, strict=True):
            x, _ = layer(x, position, layer_state)
        return x

    def empty_state(self, batch: int) -> Tensor:
        """Return the state before the first token."""
        shape = (self.config.num_layers, batch, self.config.d_model)
        return torch.zeros(shape, device=self.head.weight.device)


class _Mixer(nn.Module):
    """Stands in a block where the model has its token mixer."""

    alpha_in: Tensor  # [n, d], as the next two
    alpha_out: Tensor
    beta: Tensor
    decay: Tensor  # [1, d]

    def __init__(self, mixer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        assert isinstance(mixer, TokenMixer)
        config, (unit,) = mixer.config, stacked_units([mixer])
        assert unit.beta is not None and unit.gamma is None, "not a plain unit"
        assert config.kernel_size == 1, "a unit with taps"
        named = {"alpha_in": unit.alpha_in, "alpha_out": next(iter(unit.alpha_out), None)}
        for name, value in {**named, "beta": unit.beta, "decay": unit.decay}.items():
            scalars = torch.ones_like(unit.beta) if value is None else value.detach()
            by_head = scalars.reshape(config.num_heads, -1)
            self.register_buffer(name, by_head.T.repeat_interleave(config.head_dim, -1).float())
        self.proj_in: nn.Module = nn.Identity()
        self.proj_out: nn.Module = nn.Identity()
        if config.use_projections:
            self.proj_in = _joined(mixer.in_projections()).to(dtype)
            self.proj_out = mixer.out_proj.to(dtype)

    def forward(self, x: Tensor, position: Tensor, state: Tensor, _: None) -> tuple[Tensor, None]:
        y = self.proj_in(x)
        s = self.alpha_in.index_select(0, position) * y + self.decay * state
        state.copy_(s)
        y = self.alpha_out.index_select(0, position) * s
        y = y + self.beta.index_select(0, position)
        return self.proj_out(y.to(x.dtype)), None


def _joined(projections: Sequence[nn.Linear]) -> nn.Linear:
    """Return one projection to what these give, one behind the other."""
    width = projections[0].in_features
    joined = nn.Linear(width, width, device="meta")
    for name in ("weight", "bias"):
        values = torch.cat([projection.get_parameter(name) for projection in projections])
        setattr(joined, name, nn.Parameter(values))
    return joined
