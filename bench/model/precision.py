"""`srm bench precision`: errors from narrow dtypes, by kind of tensor and position.

Every case runs the engine's step with its roundings (`rounded.py`) on the same tokens as an oracle,
the torch model in float64 on the same weights. Cases vary one kind of tensor at a time, then
combine them as devices would; combinations that no device would choose are left out. With random
weights only the errors are meaningful: the distributions are nearly flat.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.frame import Record, Settings, run
from bench.model.divergence import Oracle, largest_value, octaves
from bench.model.precision_tables import markdown
from bench.model.rounded import Precision, RoundedModel
from engine.config import DEMO_MODEL, Mixer, ModelConfig
from engine.errors import ConfigError
from engine.weights.checkpoint import load_checkpoint, read_model
from engine.weights.random_model import write_random_model
from engine.weights.weights import Weights, fold
from training.checkpoint import load_model
from training.data import END_ID, encode
from training.tasks import Problem, problems, reward

ANSWER_TOKENS = 96
"""Greater than the length of any solution."""


def random_tokens(shape: ModelConfig, count: int, seed: int) -> Tensor:
    """Return uniformly random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, shape.vocab_size, (shape.n_ctx, count), generator=generator)


def problem_tokens(shape: ModelConfig, tokenizer: Tokenizer, count: int, seed: int) -> Tensor:
    """Return held-out problems with their solutions, concatenated."""
    ids: list[int] = []
    stream = problems("held-out", seed)
    while len(ids) < count * shape.n_ctx:
        ids += encode(tokenizer, [next(stream)])[0]
    return torch.tensor(ids[: count * shape.n_ctx]).view(count, shape.n_ctx).T


def sampled_tokens(weights: Weights, count: int, seed: int) -> Tensor:
    """Return texts that the model samples at temperature 1 in float32, concatenated."""
    shape = weights.config
    generator = torch.Generator().manual_seed(seed)
    model = RoundedModel(weights, Precision())
    state = model.empty_state(count)
    ids = torch.full((shape.n_ctx, count), shape.bos_token_id)
    for position in range(shape.n_ctx - 1):
        logits = model.run(ids[position : position + 1], state, position)[0]
        chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids[position + 1] = chosen[:, 0]
    return ids


def answers(
    model: RoundedModel, shape: ModelConfig, tokenizer: Tokenizer, drawn: list[Problem]
) -> list[str]:
    """Return the greedy completion of each problem; all are decoded together, token by token."""
    prompts = [encoding.ids for encoding in tokenizer.encode_batch([p.prompt for p in drawn])]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    length = min(shape.n_ctx, int(lengths.max()) + ANSWER_TOKENS)
    ids = torch.full((length, len(prompts)), END_ID)
    for i, prompt in enumerate(prompts):
        ids[: len(prompt), i] = torch.tensor(prompt)
    state, has_ended = model.empty_state(len(prompts)), torch.zeros(len(prompts), dtype=torch.bool)
    fed, position = 0, int(lengths.min())
    while position < length and not has_ended.all():
        likeliest = model.run(ids[fed:position], state, fed)[-1].argmax(-1)
        is_answer = lengths <= position
        ids[position] = torch.where(is_answer & ~has_ended, likeliest, ids[position])
        has_ended |= is_answer & (ids[position] == END_ID)
        fed, position = position, position + 1
    rows = zip(ids.T.tolist(), prompts, strict=True)
    return tokenizer.decode_batch([row[len(prompt) :] for row, prompt in rows])


F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NARROW = {"bf16": BF16, "fp16": FP16}


def _cases() -> dict[str, Precision]:
    cases = {"float32": Precision()}
    for name, dtype in NARROW.items():
        cases |= {
            f"weights {name}": Precision(weights=dtype),
            f"operands {name}": Precision(operands=dtype),
            f"activations {name}": Precision(operands=dtype, activations=dtype, units=dtype),
            f"units {name}": Precision(units=dtype),
            f"residual {name}": Precision(residual=dtype),
            f"logits {name}": Precision(logits=dtype),
            f"state {name}": Precision(state=dtype),
        }
    for name, dtype in NARROW.items():
        products = Precision(weights=dtype, operands=dtype)
        step = replace(products, activations=dtype, units=dtype, residual=dtype, logits=dtype)
        wide = replace(step, residual=F32, logits=F32)
        combined = {
            f"products {name}": products,
            f"step {name}": step,
            f"step {name}, units f32": replace(step, units=F32),
            f"step {name}, residual f32": replace(step, residual=F32),
            f"step {name}, logits f32": replace(step, logits=F32),
            f"step {name}, residual logits units f32": replace(wide, units=F32),
            f"step {name}, residual logits f32": wide,
        }
        cases |= combined
        for state_name, state in NARROW.items():
            if dtype == BF16 or state == FP16:  # nobody who has fp16 would keep bf16 states
                cases |= {
                    f"{case}, state {state_name}": replace(combined[case], state=state)
                    for case in (f"products {name}", f"step {name}", list(combined)[-1])
                }
    return cases


CASES = _cases()
"""By name: first one kind of tensor at a time, then combinations.

"products" narrows the operands of products, as a CPU would; "step" all that the graph writes, as a
GPU does, except the state unless the name says so.
"""
ANSWERING = [name for name in CASES if name.startswith(("float32", "state", "products", "step"))]
"""Cases in which the checkpoint also answers problems."""


class PrecisionConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench precision`."""

    demo_model: Path = DEMO_MODEL
    """A checkpoint to measure, with a tokenizer; left out where the folder is missing."""
    random_widths: tuple[int, ...] = (512, 1024)
    """d_model of further models, with random weights; of the first also two with two units."""
    sequences: int = 4
    """Sequences of its whole context fed to the checkpoint: of problems, and of its own samples."""
    random_sequences: int = 1
    """Sequences of 1,024 random tokens fed to each model with random weights."""
    problems: int = 200
    """Held-out problems that the checkpoint answers greedily."""
    threads: int = 0
    """CPU threads; 0 is as many as torch chooses."""
    seed: int = 0
    """Of random weights, tokens and problems."""


def main(argv: list[str]) -> int:
    """Measure, write a record and its picture, print its tables."""
    return run(PrecisionConfig, argv, "precision", measure, markdown)


@torch.inference_mode()
def measure(config: PrecisionConfig) -> Record:
    """Return the cases, and the divergence of each model in each."""
    if config.threads:
        torch.set_num_threads(config.threads)
    cases = {
        name: {kind: str(dtype).removeprefix("torch.") for kind, dtype in asdict(one).items()}
        for name, one in CASES.items()
    }
    if not config.demo_model.exists() and not config.random_widths:
        raise ConfigError(f"{config.demo_model} is missing and random_widths empty: nothing to do")
    models = _measure_demo(config) if config.demo_model.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        for index, width in enumerate(config.random_widths):
            for mixer in ("mixed", "combined", "expanded") if index == 0 else ("mixed",):
                shape = _random_shape(width, mixer)
                write_random_model(Path(folder), shape, config.seed)
                ids = random_tokens(shape, config.random_sequences, config.seed)
                name = f"random d {width}" + (f", {mixer}" if mixer != "mixed" else "")
                models.append(measure_model(name, Path(folder), ids))
    return {"cases": cases, "models": models}


def _random_shape(width: int, mixer: Mixer) -> ModelConfig:
    decay = mixer != "expanded"
    sizes: dict[str, Any] = {
        "d_model": width,
        "num_layers": 8,
        "num_heads": 4,
        "n_ctx": 1024,
        "vocab_size": 2048,
    }
    return ModelConfig(**sizes, mixer=mixer, decay=decay, decay_constant=1 + decay)


def measure_model(name: str, folder: Path, ids: Tensor) -> dict[str, Any]:
    """Measure every case on the model in `folder` with int64 tokens [T, B]."""
    files = read_model(folder)
    weights = fold(files.config, files.tensors, files.fingerprint)
    logits, largest = largest_value(load_model(folder).double(), ids.T)
    oracle = Oracle(logits.transpose(0, 1))
    found = []
    for case, precision in CASES.items():
        model = RoundedModel(weights, precision)
        state = model.empty_state(ids.shape[1])
        divergence = oracle.compare(model.run(ids, state))
        found.append(
            {"case": case, **divergence.summary(), "by_position": divergence.by_position()}
        )
        if case == "float32":
            largest_state = float(state.abs().max())
    return {
        "name": name,
        "config": msgspec.to_builtins(weights.config),
        "matrices_stored_as": files.dtypes["output_layer.weight"],
        "positions": list(octaves(len(ids))),
        "sequences": ids.shape[1],
        "largest_logit": round(oracle.largest_logit, 3),
        "largest_activation": round(largest, 3),
        "largest_last_state": round(largest_state, 3),
        "cases": found,
    }


def _measure_demo(config: PrecisionConfig) -> list[dict[str, Any]]:
    """Measure the checkpoint on problems' text and on its own samples, and its answers."""
    folder, count, seed = config.demo_model, config.sequences, config.seed
    weights = load_checkpoint(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = problem_tokens(weights.config, tokenizer, count, seed)
    on_problems = measure_model("demo, problems", folder, text)
    drawn = list(islice(problems("held-out", seed), config.problems))
    found = {
        case: answers(RoundedModel(weights, CASES[case]), weights.config, tokenizer, drawn)
        for case in ANSWERING
    }
    for entry in on_problems["cases"]:
        if entry["case"] in found:
            texts = found[entry["case"]]
            right = [reward(problem, text) for problem, text in zip(drawn, texts, strict=True)]
            same = [a == b for a, b in zip(texts, found["float32"], strict=True)]
            entry["right_answers"] = sum(right) / len(drawn)
            entry["same_answers"] = sum(same) / len(drawn)
    samples = sampled_tokens(weights, count, seed)
    return [on_problems, measure_model("demo, its own samples", folder, samples)]
