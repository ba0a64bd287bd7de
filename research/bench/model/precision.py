"""`srm bench precision`: what bfloat16, float8 and int8 cost in tokens, emulated on a CPU.

A model runs with the roundings of a GPU's step, matrices, activations and logits, but for those
within the sums, and the same in float64 on the same tokens. Norms are folded into the products
behind them, as on an H100. Not emulated are the orders of sums.
What is said of an H100's tensor cores (DeepSeek-V3's report, arXiv 2412.19437, 3.3.2) is that they
keep 14 bits of a sum of float8 products: a case of its own cuts sums to that after each 32 of them.
With random weights distributions are flat, and greedy tokens tie more than in a trained model.
int8 is of channel mixers as float8 is, as its kernels have it and in ways that have none
(`narrow.py`). Channel mixers are compared alone as well.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from research.bench.frame import Record, Settings, run, table
from research.bench.model.narrow import (
    WIDTH,
    Float8Mixer,
    Int8,
    Int8Mixer,
    KernelInt8Mixer,
    Mixer,
    Source,
    measure_mixers,
)
from srm.engine.config import DEMO_MODEL, Dtype, ModelConfig
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.random_model import write_random_model
from srm.engine.weights.tensors import is_scalar, projection_prefixes
from srm.engine.weights.weights import LayerWeights
from srm.errors import ConfigError
from srm.tokenizer_file import read_tokenizer
from srm.training.checkpoint import load_model
from srm.training.data import encode
from srm.training.huggingface.mixers_srm import Block, TokenMixer
from srm.training.huggingface.units_srm import Places
from srm.training.problems.drawn import problems
from srm.training.text.tokenizer import special_ids

SEQUENCES = 4
"""Contexts of solved held-out problems that a checkpoint is fed."""
SEEN = 8
"""Further contexts, by which scales of int8 are fixed."""
PARTS = "weight", "bias"


class Case(NamedTuple):
    """Roundings to emulate."""

    dtype: Dtype
    mixer: Callable[[LayerWeights], Mixer] | None = None  # in place of those in dtype


CASES = {
    "float32": Case("float32"),
    "bfloat16": Case("bfloat16"),
    "float8": Case("bfloat16", Float8Mixer),
    "float8, sums of 14 bits": Case("bfloat16", partial(Float8Mixer, sum_bits=14)),
    "int8": Case("bfloat16", partial(Int8Mixer, way=Int8())),
    "int8, h fixed": Case("bfloat16", partial(Int8Mixer, way=Int8(True))),
    "int8, h fixed and turned": Case("bfloat16", partial(Int8Mixer, way=Int8(True, "h"))),
    "int8, h fixed, h and x turned": Case("bfloat16", partial(Int8Mixer, way=Int8(True, "hx"))),
    "int8, as in the kernel": Case("bfloat16", KernelInt8Mixer),
}


class PrecisionConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench precision`."""

    demo_model: Path = DEMO_MODEL
    """Checkpoint to measure, with a tokenizer; left out where the folder is missing."""
    random_widths: tuple[int, ...] = (1024,)
    """Values of d_model of further models, with random weights, 8 layers, context 512 and
    vocabulary 8192."""
    threads: int = 0
    """CPU threads; 0: torch chooses."""


def main(argv: list[str]) -> int:
    """Measure, write a record, print its tables."""
    return run(PrecisionConfig, argv, "precision", measure, markdown)


@torch.inference_mode()
def measure(config: PrecisionConfig) -> Record:
    """Return the divergence of each model in each case."""
    if config.threads:
        torch.set_num_threads(config.threads)
    models, sources = [], {}
    if config.demo_model.exists():
        ids = _solved_problems(config.demo_model, 0, SEQUENCES)
        seen = _solved_problems(config.demo_model, 1, SEEN)
        models.append(_measure_model("demo", config.demo_model, ids, seen))
        sources["demo"] = _layers_of(config.demo_model, ids, seen)
    with tempfile.TemporaryDirectory() as folder:
        for width in config.random_widths:
            shape = ModelConfig(
                d_model=width, num_layers=8, num_heads=4, n_ctx=512, vocab_size=8192
            )
            write_random_model(Path(folder), shape)
            rng = np.random.default_rng(0)
            ids, seen = (
                torch.tensor(rng.integers(shape.vocab_size, size=(count, shape.n_ctx)))
                for count in (1, SEEN)
            )
            models.append(_measure_model(f"random d {width}", Path(folder), ids, seen))
    if not models:
        raise ConfigError(
            f"{config.demo_model} is missing, and random_widths is empty: nothing to do"
        )
    cases = {name: case.mixer for name, case in CASES.items() if case.mixer}
    return {"models": models, "mixers": measure_mixers(sources, cases)}


def markdown(record: Record) -> list[str]:
    """Render a table for each model."""
    lines = [
        "Errors of logits are in units of the largest exact one. Greedy: the share of positions",
        "whose likeliest token is that of float64. KL: of the distribution at temperature 1 from",
        "that of float64, in nats. Sums of 14 bits are a bound. In int8 x and h, which products",
        "take, have scales by row, or fixed ones by column; turned is by Hadamard transforms of 16",
        "columns. The kernel has both turned, and h fixed by noise. See `precision.py` and",
        "`narrow.py` of `research/bench/model/`.",
    ]
    for model in record["models"]:
        shape = model["config"]
        rows = (
            f"{case['case']} | {case['rms_error']:.1e} | {case['max_error']:.1e} "
            f"| {case['greedy']:.2%} | {case['kl_mean']:.1e} | {case['kl_p99']:.1e}"
            for case in model["cases"]
        )
        lines += [
            *("", f"## {model['name']}", ""),
            f"d {shape['d_model']}, {shape['num_layers']} layers, {model['tokens']:,} tokens, "
            f"largest logit {model['largest_logit']:.1f}.",
            "",
            *table("case | rms error | max error | greedy | mean KL | p99 KL", rows),
        ]
    mixers = record["mixers"]
    errors = (
        " | ".join([case, *(f"{mixer['errors'][case]:.4f}" for mixer in mixers)])
        for case in mixers[0]["errors"]
    )
    return [
        *(*lines, "", "## Channel mixers alone", ""),
        "Rms error in units of the exact output's: of all layers of the demo model on its rows,",
        f"and of a random layer of d {WIDTH}, of Gaussian rows and weights or such with outliers.",
        "",
        *table(" | ".join(["case", *(mixer["name"] for mixer in mixers)]), errors),
    ]


def _solved_problems(folder: Path, seed: int, count: int) -> Tensor:
    """int64[count, n_ctx]: held-out problems with their solutions, one behind the other."""
    size, stream = load_checkpoint(folder).config.n_ctx, problems("held-out", seed)
    tokenizer, ids = read_tokenizer(folder / "tokenizer.json"), list[int]()
    while len(ids) < count * size:
        drawn = [(problem.prompt, problem.solution) for problem in islice(stream, 64)]
        for prompt, solution in encode(tokenizer, drawn, special_ids(tokenizer).end):
            ids += prompt + solution
    return torch.tensor(ids[: count * size]).view(count, size)


def _layers_of(folder: Path, ids: Tensor, seen: Tensor) -> list[Source]:
    """Return a model's layers, and what comes into their channel mixers."""
    model, rows = load_model(folder), list[Tensor]()

    def keep(_: nn.Module, given: tuple[Tensor]) -> None:
        rows.append(given[0].flatten(0, -2))

    for block in model.mixer_blocks:
        assert isinstance(block, Block)
        block.channel_norm.register_forward_pre_hook(keep)
    model(seen)
    model(ids)
    layers = load_checkpoint(folder).layers
    return list(zip(layers, rows[: len(layers)], rows[len(layers) :], strict=True))


def _measure_model(name: str, folder: Path, ids: Tensor, seen: Tensor) -> dict[str, Any]:
    exact = load_model(folder).double()(ids)
    largest, logp = float(exact.abs().max()), exact.log_softmax(-1)
    results = []
    for case, roundings in CASES.items():
        model = RoundedModel(folder, roundings)
        model.fix(seen)
        logits = model(ids).double()
        error = (logits - exact) / largest
        logq = logits.log_softmax(-1)
        # No term is negative, and so no sum is but for its rounding.
        terms = (logp.exp() * (logp - logq)).sum(-1).clamp(min=0).flatten()
        measures = {
            "rms_error": error.square().mean().sqrt(),
            "max_error": error.abs().max(),
            "greedy": (logits.argmax(-1) == exact.argmax(-1)).double().mean(),
            "kl_mean": terms.mean(),
            "kl_p99": terms.quantile(0.99),
        }
        results.append({"case": case} | {key: float(f"{v:.4g}") for key, v in measures.items()})
    return {
        "name": name,
        "config": msgspec.to_builtins(load_checkpoint(folder).config),
        "tokens": ids.numel(),
        "largest_logit": largest,
        "cases": results,
    }


class RoundedModel(nn.Module):
    """The model of a folder in float32, with a step's roundings."""

    def __init__(self, folder: Path, case: Case) -> None:
        super().__init__()
        self._is_wide, self._model = case.dtype == "float32", load_model(folder)
        config, folded = self._model.config, set[nn.Parameter]()
        self._folds = config.use_projections and not self._is_wide
        if self._folds:
            for block in self._model.mixer_blocks:
                assert isinstance(block, Block)
                up = (block.channel_mixing_layer.get_parameter(f"0.{p}") for p in PARTS)
                folded |= _fold_norm(block.channel_norm, *up)
                given = block.token_mixing_layer.get_parameter
                for prefix in projection_prefixes(config):
                    pair = (given(prefix + part) for part in PARTS)
                    folded |= _fold_norm(block.token_norm, *pair)
                for norm in (block.channel_norm, block.token_norm):
                    norm.weight.data.fill_(1)
                    norm.bias.data.fill_(0)
        for name, value in self._model.named_parameters():
            if not is_scalar(name) and value not in folded:
                value.data = self._keep(value.data)
        self._narrow = [case.mixer(layer) for layer in load_checkpoint(folder).layers if case.mixer]
        for block in self._model.mixer_blocks:
            assert isinstance(block, Block)
            mixer = RoundedMixer(config, self._keep)
            mixer.load_state_dict(block.token_mixing_layer.state_dict())
            block.token_mixing_layer = mixer

    def fix(self, seen: Tensor) -> None:
        """Fix the scales of channel mixers by these ids."""
        if any(mixer.is_fixed for mixer in self._narrow):
            self(seen)
            for mixer in self._narrow:
                mixer.fix()

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids int64 [batch, length] to logits [batch, length, vocab]."""
        x, places = self._model.input_layer(ids), Places(slice(ids.shape[1]))
        for index, block in enumerate(self._model.mixer_blocks):
            assert isinstance(block, Block)
            x = self._keep(x + self._mix_channels(index, block, x))
            mixed, _ = block.token_mixing_layer(self._normed(block.token_norm, x), places)
            x = self._keep(x + mixed)
        return self._keep(F.linear(x, self._model.output_layer.weight))

    def _mix_channels(self, index: int, block: Block, x: Tensor) -> Tensor:
        if self._narrow:
            return self._narrow[index].run(x)
        up, act, down = block.channel_mixing_layer
        mixed: Tensor = down(self._keep(act(up(self._normed(block.channel_norm, x)))))
        return mixed

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = norm(x)
        return y if self._folds else self._keep(y)

    def _keep(self, x: Tensor) -> Tensor:
        return x if self._is_wide else x.bfloat16().float()


def _fold_norm(norm: nn.LayerNorm, weight: nn.Parameter, bias: nn.Parameter) -> set[nn.Parameter]:
    """Fold a norm's gain and shift into the product behind it, as `srm_normed_sm90` has them.
    Return what stays float32."""
    bias.data += weight.data @ norm.bias.data
    weight.data *= norm.weight.data
    return {bias}


class RoundedMixer(TokenMixer):
    """A token mixer that keeps what its projections read and write between them."""

    def __init__(self, config: ModelConfig, keep: Callable[[Tensor], Tensor]) -> None:
        super().__init__(config)
        self._keep = keep

    def _project(self, x: Tensor, projections: Sequence[Any]) -> Tensor:
        if projections[0] is self.out_proj:
            return super()._project(self._keep(x), projections)
        return self._keep(super()._project(x, projections))
