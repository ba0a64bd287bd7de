"""`config.json` of a Structured Recurrent Mixer for `transformers`; see `modeling_srm.py`."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name that this version of transformers has for a cache."""
MIXERS = {
    *("mixed", "parallel", "column_heads", "combined", "row", "column", "kernel", "diagonal"),
    "expanded",
}
EVEN_HEADS = {"mixed", "parallel", "diagonal"}
HEADLESS = {"row", "column", "kernel"}
ALWAYS_PROJECTED = {"column_heads", "combined", "diagonal"}
NEVER_DECAYED = {"column_heads", "row", "column", "expanded"}
DEFAULTS: dict[str, Any] = {
    **{"d_model": 256, "num_layers": 8, "num_heads": 4, "n_ctx": 512, "vocab_size": 2048},
    **{"use_projections": True, "decay": True, "decay_constant": 1},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "tie_word_embeddings": False},
    **{"mixer": "mixed", "kernel_size": 1, "combined_row_quirk": False},
}
SET_BY_TRANSFORMERS = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
"""Fields that its own configuration has too, with other defaults."""


class SRMConfig(PreTrainedConfig):
    """`config.json`: the fields of docs/models.md, and those that transformers adds."""

    model_type = "srm"
    keys_to_ignore_at_inference = [CACHE]  # noqa: RUF012 - transformers reads a list
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "n_ctx",
    }

    def __init__(self, **given: Any) -> None:
        """Raises ValueError for what is no model."""
        own = {name: given.pop(name, default) for name, default in DEFAULTS.items()}
        for name, value in own.items():
            setattr(self, name, value)
        super().__init__(**given)
        for name in SET_BY_TRANSFORMERS:
            setattr(self, name, own[name])
        self._check()

    def _check(self) -> None:
        """Raise ValueError for what is no model, as the server does."""
        for name in ("d_model", "num_layers", "num_heads", "n_ctx", "vocab_size", "decay_constant"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.tie_word_embeddings:
            raise ValueError(
                "tie_word_embeddings must be false: embedding and head are two tensors"
            )
        mixer, is_kernel = self.mixer, self.mixer == "kernel"
        for name, is_valid, allowed in (
            ("mixer", mixer in MIXERS, f"one of {', '.join(sorted(MIXERS))}"),
            ("num_heads", self.d_model % self.num_heads == 0, f"a divisor of {self.d_model}"),
            ("num_heads", mixer not in HEADLESS or self.num_heads == 1, "1"),
            ("num_heads", mixer not in EVEN_HEADS or self.num_heads % 2 == 0, "even"),
            ("use_projections", not (self.is_headless and self.use_projections), "false"),
            ("use_projections", mixer not in ALWAYS_PROJECTED or self.use_projections, "true"),
            ("decay", mixer not in NEVER_DECAYED or not self.decay, "false"),
            ("kernel_size", not is_kernel or self.kernel_size > 1, "at least 2"),
            ("kernel_size", is_kernel or self.kernel_size == 1, "1"),
            ("combined_row_quirk", mixer == "combined" or not self.combined_row_quirk, "false"),
        ):
            if not is_valid:
                got = getattr(self, name)
                raise ValueError(f"{name} must be {allowed} where mixer is {mixer}, got {got}")

    @property
    def is_headless(self) -> bool:
        return self.mixer in HEADLESS or (self.mixer == "expanded" and self.num_heads == 1)

    @property
    def units_per_layer(self) -> int:
        """Recurrent units of a layer that each keep a state of d_model."""
        return 2 if self.mixer in {"combined", "expanded"} else 1
