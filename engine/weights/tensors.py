"""The tensors of a checkpoint: every name and shape, for every mixer.

They are those of the published checkpoints (blbadger/mrm), so weights move between the two without
renaming. Tensors that the published code stores but never reads, the projections of parallel heads
that have none, are not part of our files.
"""

from __future__ import annotations

from srm.engine.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]

DECAY_RANGE = (0.9, 1.0)
"""Range of λ: one outside it is used as the nearer end, in the precision it is stored in."""


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Return the shape by name of all tensors in `model.safetensors` of such a model."""
    width, inner, vocab = config.d_model, 4 * config.d_model, config.vocab_size
    block = (
        _norm("channel_norm.", width)
        | _linear("channel_mixing_layer.0.", inner, width)
        | _linear("channel_mixing_layer.2.", width, inner)
        | _norm("token_norm.", width)
        | {f"token_mixing_layer.{name}": shape for name, shape in mixer_shapes(config).items()}
    )
    shapes: Shapes = {"input_layer.weight": (vocab, width), "output_layer.weight": (vocab, width)}
    for index in range(config.num_layers):
        shapes |= {f"mixer_blocks.{index}.{name}": shape for name, shape in block.items()}
    return shapes


def mixer_shapes(config: ModelConfig) -> Shapes:
    """Return the shape by name below a block's `token_mixing_layer.`: scalars, then projections."""
    width = config.d_model
    shapes: Shapes = {}
    for prefix in scalar_prefixes(config):
        shapes |= _scalars(prefix, config)
    if config.use_projections:
        for prefix in projection_prefixes(config):
            shapes |= _linear(prefix, width // len(projection_prefixes(config)), width)
        shapes |= _linear("out_proj.", width, width)
    return shapes


def scalar_prefixes(config: ModelConfig) -> list[str]:
    """Return the prefixes of a mixer's scalars: one per head, or one for all of it."""
    if config.is_headless:
        return [""]
    if config.mixer == "parallel":
        return ["mixer_heads."]
    return [f"mixer_heads.{head}." for head in range(config.num_heads)]


def projection_prefixes(config: ModelConfig) -> list[str]:
    """Return the prefixes of the matrices that, one below the other, project into the heads."""
    if config.mixer == "parallel":
        return ["in_proj."]
    return [f"proj_head.{head}." for head in range(config.num_heads)]


def is_scalar(name: str) -> bool:
    """Whether a tensor holds α, β, λ or δ of a mixer, which stay float32: 0.999 is 1.0 in bf16."""
    return ".token_mixing_layer." in name and "proj" not in name


def _scalars(prefix: str, config: ModelConfig) -> Shapes:
    n_ctx = config.n_ctx
    if config.mixer == "expanded":
        return {
            f"{prefix}{stage}.{name}": (1, n_ctx) for stage in (0, 2) for name in ("weight", "bias")
        }
    rows = {
        "parallel": config.num_heads,
        "combined": 2,  # row, column
        "kernel": config.kernel_size,
    }.get(config.mixer, 1)
    is_parallel = config.mixer == "parallel"
    shapes: Shapes = {
        f"{prefix}weight": (rows, n_ctx),
        f"{prefix}bias": (rows, n_ctx) if is_parallel else (n_ctx,),
    }
    if config.decay:
        # Combined: row, column. Parallel and kernel: only the second of the two is ever read.
        is_pair = config.mixer in {"combined", "parallel", "kernel"}
        shapes[f"{prefix}decay_value"] = (2, 1) if is_pair else (1,)
    if config.mixer == "diagonal":
        shapes[f"{prefix}diag_weight"] = (1,)
    return shapes


def _linear(prefix: str, rows: int, columns: int) -> Shapes:
    return {f"{prefix}weight": (rows, columns), f"{prefix}bias": (rows,)}


def _norm(prefix: str, width: int) -> Shapes:
    return {f"{prefix}weight": (width,), f"{prefix}bias": (width,)}
