"""Settings of `srm train pretrain` and `srm evaluate`; checks of numbers; which settings a
run keeps. No torch: `--help` needs none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from srm.engine.config import DEMO_MODEL, Mixer, ModelConfig, find_model
from srm.engine.messages import MAX_TEMPERATURE
from srm.settings import flatten
from srm.training.problems import countdown, regexes
from srm.training.text.tokenizer import MAX_VOCAB_SIZE, MIN_VOCAB_SIZE, OWN_IDS, SpecialIds

Precision = Literal["auto", "bfloat16", "float16", "float32"]
"""Dtype of matrix products in training."""
_EVALUATED = {"problems": 100_000, "samples": 100_000, "temperature": MAX_TEMPERATURE}
"""Largest values of settings of `srm evaluate`; the engine takes no more samples of a prompt, and
no higher temperature."""
MOST_SEED = 2**64 - 1
"""Largest seed that torch takes."""
MOST_FLOAT = 1e18
"""Largest number; the product of two of them still fits float32, in which the optimizer
computes."""
_MOST = {"threads": 4_096, "data_workers": 256, "max_vocab_size": MAX_VOCAB_SIZE}
_MAY_CHANGE = {
    *("steps", "minutes", "epochs", "learning_rate", "warmup_steps", "warmup_share", "decline"),
    *("save_every", "keep_every", "keep_bytes", "evaluate_every", "tensorboard", "wandb"),
    *(
        "threads",
        "data_workers",
        "device",
        "shard",
        "compile",
        "capture",
        "precision",
        "micro_batches",
        "micro_batch_tokens",
    ),
    *("gpu_memory", "reward_limit_s", "model", "train", "evaluation", "texts", "suffix"),
    *("tokenizer", "output", "checkpoint_activations"),
}
MAY_CHANGE = (
    "only steps, minutes or epochs, learning_rate, its warm-up and decline, save_every, "
    "keep_every, evaluate_every, tensorboard, wandb, precision, micro-batches, "
    "checkpoint_activations and what it runs on may change"
)
"""`_MAY_CHANGE` in words for error messages, without files, which are compared by content."""
_LEAST = {"save_every": 1} | dict.fromkeys(
    "learning_rate weight_decay evaluate_every keep_every keep_bytes minutes data_workers "
    "threads".split(),
    0,
)


def check_numbers(config: msgspec.Struct, least: Mapping[str, float]) -> None:
    """Raise ValueError for a number that is not finite or below its least, and for a `seed` or a
    `clip_norm` that is out of range.

    `least` gives lower bounds by name, besides those that all commands share.
    """
    bounds = {**_LEAST, **least}
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}")
        if isinstance(value, float) and abs(value) > MOST_FLOAT:
            raise ValueError(f"{name} must be at most {MOST_FLOAT:g}, got {value}")
        if name in bounds and value < bounds[name]:
            raise ValueError(f"{name} must be at least {bounds[name]}, got {value}")
        if name in _MOST and value > _MOST[name]:
            raise ValueError(f"{name} must be at most {_MOST[name]}, got {value}")
        if name == "seed" and not 0 <= value <= MOST_SEED:
            raise ValueError(f"seed must be 0 … 2**64 - 1, got {value}")
        if name == "clip_norm" and value <= 0:
            raise ValueError(f"clip_norm must be above 0, got {value}")


def _is_weight(value: float) -> bool:
    return 1 / MOST_FLOAT <= value <= MOST_FLOAT


def select_fixed(config: msgspec.Struct) -> dict[str, Any]:
    """Return the settings that may not change when a run is resumed."""
    fixed: dict[str, Any] = msgspec.to_builtins(flatten(config), enc_hook=str)
    return {name: value for name, value in fixed.items() if name not in _MAY_CHANGE}


class UpdateSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of updates that all trainings have."""

    minutes: float = 0.0
    """Minutes from the first update to the end of the last save, including those that a resumed run
    has had; 0: no limit. Where they end the run, the learning rate falls to 0 by the clock."""
    checkpoint_activations: bool = False
    """Whether the backward pass computes each block again, which saves memory and takes longer
    (activation checkpointing)."""
    weight_decay: float = 0.1
    """Weight decay of the AdamW optimizer."""
    clip_norm: float = 0.1
    """Largest norm of all gradients together; larger gradients are scaled down to it."""
    save_every: int = 100
    """Updates between two saves of the run."""
    keep_every: int = 500
    """Updates between two models that are kept, as `step-100` and so on in `output`; 0: none."""
    keep_bytes: int = 2_000_000_000
    """Most bytes of kept models together: the oldest are deleted, never the latest."""
    precision: Precision = "auto"
    """Precision of the matrix products in training, token mixing included; weights and optimizer
    stay float32. auto: bfloat16, or float32 on a processor without instructions for it."""


class RunSettings(UpdateSettings, frozen=True):
    """Settings of a run that learns from rows."""

    micro_batches: int = 1
    """Parts into which a batch is split, computed one after the other to save memory."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Device that trains the model."""
    shard: bool = False
    """Whether weights and optimizer state are divided among the processes (FSDP) instead of copied
    to each."""
    tensorboard: bool = False
    """Whether losses are also written for TensorBoard, into the folder `tensorboard` of
    `output`."""
    wandb: bool = False
    """Whether losses are also sent to Weights & Biases; variables `WANDB_…` say where."""
    threads: int = 0
    """CPU threads; 0: torch chooses."""


class PretrainConfig(RunSettings, frozen=True):
    """Settings of `srm train pretrain`; the defaults are those of the bundled demo model."""

    output: Path = Path("runs/demo")
    """Folder of the run and of the model; an existing run is resumed."""
    texts: tuple[Path, ...] = ()
    """Files and folders of text: .jsonl, .parquet; any other file is one text. Empty: generated
    problems."""
    text_weights: tuple[float, ...] = ()
    """Share of the rows for each of `texts`, times any number; empty: as many as they have."""
    problems: Literal["words", "countdown", "regexes"] = "words"
    """Problems that are generated where there are no texts: `words`, ten kinds of word problems;
    with a tokenizer of their own `countdown`, puzzles that combine numbers to a target, and
    `regexes`, regexes of strings that match."""
    suffix: str = ""
    """End of the names of the files that are read in folders of `texts`; empty: all."""
    text_member: str = "text"
    """Name of the .jsonl member or .parquet column that has the text."""
    tokenizer: str = ""
    """Path of a tokenizer.json, also of another model, or of a folder that has one; empty: a
    tokenizer is trained on the texts."""
    windows: Literal["packed", "documents"] = "packed"
    """What rows of texts begin with: `packed`, any token, and none is in two rows; `documents`, a
    document unless one is longer than a row, and its beginning ends the row before too."""
    separate_documents: bool = False
    """Whether each document of a row is computed as if it stood alone: states and positions begin
    anew with it, and the loss leaves out its begin token."""
    evaluation_share: float = 0.01
    """Fraction of the texts' tokens, taken from the end, that is kept for evaluation."""
    evaluate_every: int = 200
    """Updates between two evaluations on the held-out texts; 0: none."""
    evaluation_batches: int = 16
    """Most batches of one evaluation."""
    steps: int = 0
    """Total updates, including those that a resumed run has made; 0: 5,000, or as many as `minutes`
    has time for."""
    batch_tokens: int = 4_096
    """Approximate tokens of one update, all processes together."""
    data_workers: int = 0
    """Processes that make batches ahead of the updates, as a GPU needs with generated problems; 0:
    each is made between two updates."""
    learning_rate: float = 1.5e-3
    """Peak learning rate: reached after the warm-up, then falling to 0."""
    warmup_steps: int = 200
    """Updates over which the learning rate rises."""
    decline: Literal["linear", "cosine", "wsd"] = "linear"
    """How the learning rate falls after the warm-up; `wsd` (warm-up, stable, decay): linearly over
    the last fifth."""
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    compile: bool = False
    """Whether `torch.compile` compiles the model first."""
    capture: bool = False
    """Whether a CUDA graph of the update is captured, which one launch replays."""
    seed: int = 0
    """Seed of the weights, the problems and the order of texts."""
    d_model: int = 256
    """Width of the model; num_heads must divide it."""
    num_layers: int = 8
    """Number of blocks of the model."""
    num_heads: int = 4
    """Number of heads of a token mixer; some mixers need an even number."""
    n_ctx: int = 512
    """Context of the model, in tokens."""
    mixer: Mixer = "mixed"
    """Token mixer of the blocks."""
    use_projections: bool = True
    """Whether a linear projection stands before the heads of a token mixer, and another one behind
    them."""
    decay: bool = True
    """Whether states decay, each head at a learned rate."""
    kernel_size: int = 1
    """Number of neighbouring channels that mixer = kernel mixes."""
    max_vocab_size: int = 2_048
    """Most entries of a trained tokenizer, which always has every byte and two special tokens."""

    def __post_init__(self) -> None:
        if not self.steps and not self.minutes:
            msgspec.structs.force_setattr(self, "steps", 5_000)
        least = "batch_tokens micro_batches warmup_steps max_vocab_size evaluation_batches"
        check_numbers(self, {"steps": 0, **dict.fromkeys(least.split(), 1)})
        if self.windows == "documents" and not self.texts:
            raise ValueError("windows must be packed where there are no texts, got documents")
        weights = self.text_weights
        if weights and (len(weights) != len(self.texts) or not all(map(_is_weight, weights))):
            raise ValueError(
                f"text_weights must be a number of {1 / MOST_FLOAT:g} … {MOST_FLOAT:g} for each of "
                f"the {len(self.texts)} texts, got {weights}"
            )
        if self.capture:
            for name, is_valid, needed in (
                ("device", self.device == "gpu", "gpu"),
                ("precision", self.precision != "float16", "another"),
                ("texts", bool(self.texts), "given: generated batches differ in shape"),
            ):
                if not is_valid:
                    got = getattr(self, name)
                    raise ValueError(f"{name} must be {needed} where capture is true, got {got}")
        if self.problems != "words":
            if self.texts or self.tokenizer:
                name = "texts" if self.texts else "tokenizer"
                raise ValueError(
                    f"problems must be words where {name} is given, got {self.problems}"
                )
            longest = {"countdown": countdown.LONGEST, "regexes": regexes.LONGEST}[self.problems]
            if self.n_ctx < longest:
                raise ValueError(
                    f"n_ctx must be at least {longest} where problems is {self.problems}, got "
                    f"{self.n_ctx}"
                )
        if not 0 <= self.evaluation_share < 1:
            raise ValueError(f"evaluation_share must lie in [0, 1), got {self.evaluation_share}")
        self.model(MIN_VOCAB_SIZE)  # reports an invalid shape before any work

    @property
    def held_out(self) -> float:
        """Fraction of the texts' tokens that is held out from training."""
        return self.evaluation_share if self.texts and self.evaluate_every else 0.0

    def model(self, vocab_size: int, ids: SpecialIds = OWN_IDS) -> ModelConfig:
        """Return the model's configuration. Raises ValueError for an invalid shape."""
        return ModelConfig(
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            n_ctx=self.n_ctx,
            vocab_size=vocab_size,
            mixer=self.mixer,
            use_projections=self.use_projections,
            decay=self.decay,
            kernel_size=self.kernel_size,
            decay_constant=max(1, self.n_ctx // 512),
            bos_token_id=ids.begin,
            eos_token_id=ids.end,
        )


class EvaluateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm evaluate`."""

    model: Path = DEMO_MODEL
    """Folder with config.json, model.safetensors and tokenizer.json."""
    problems: int = 200
    """Held-out problems to solve."""
    samples: int = 1_000
    """Sampled completions of each problem, besides the greedy one; the largest k of pass@k."""
    temperature: float = 1.0
    """Sampling temperature; the greedy completion is taken without one."""
    seed: int = 0
    """Seed of the problems and of the sampling."""
    against: Path | None = None
    """File with this command's output for another model, whose pass@k is subtracted problem by
    problem."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "model", find_model(self.model))
        check_numbers(self, {"problems": 1, "samples": 1, "temperature": 0})
        for name, most in _EVALUATED.items():
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most:g}, got {getattr(self, name)}")
