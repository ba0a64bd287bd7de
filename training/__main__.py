"""`python -m srm.training train COMMAND | evaluate`, which are `srm train …` and `srm evaluate`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec

from srm.errors import ConfigError, did_you_mean
from srm.logs import configure_command
from srm.server.commands.standard_output import INTERRUPTED
from srm.settings import Command, load
from srm.training.finetuning.config import SFTConfig
from srm.training.grpo.config import GRPOConfig
from srm.training.settings import EvaluateConfig, PretrainConfig
from srm.training.text.tokenizer import TokenizerConfig, make_tokenizer


def main(argv: list[str]) -> int:
    """Run the command that argv names with the settings that follow; return the exit code."""
    configure_command()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as SIGINT does
    try:
        return _command(argv)
    except KeyboardInterrupt:
        goes_on = "; the same command goes on from the last save, or begins if there is none"
        print(f"srm {argv[0]}: interrupted{goes_on * (argv[0] == 'train')}", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _command(argv: list[str]) -> int:
    if argv[:1] == ["evaluate"]:
        _evaluate(argv[1:])
        return 0
    if argv[:1] != ["train"]:
        raise ConfigError(f"training has the commands train and evaluate, not {argv[:1]}")
    name = argv[1] if argv[1:] else ""
    if name not in TRAIN:
        near = did_you_mean(name, TRAIN)
        raise ConfigError(f"its commands are {', '.join(TRAIN)}; got {name!r}{near}")
    TRAIN[name](argv[2:])
    return 0


def _imported(name: str) -> Callable[[Any], Any]:
    """Import what runs a command, and torch with it, only when its settings are right."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)  # type: ignore[no-any-return]


def _tokenizer(argv: list[str]) -> None:
    command = Command(
        "srm train tokenizer",
        "Make a byte-level BPE tokenizer of texts.",
        "srm train tokenizer --texts corpus/ --max-vocab-size 8192 --output tokenizer.json",
    )
    config = load(TokenizerConfig, argv, prog=command)
    print(f"{config.output}: {make_tokenizer(config).get_vocab_size()} entries")


def _pretrain(argv: list[str]) -> None:
    command = Command(
        "srm train pretrain",
        "Train a model from nothing, on texts or on generated word problems.",
        "srm train pretrain --texts corpus/ --steps 2000 --output runs/mine",
        "output texts tokenizer steps batch_tokens learning_rate d_model num_layers n_ctx "
        "precision device",
    )
    config = load(PretrainConfig, argv, prog=command)
    losses = _imported("srm.training.pretrain:pretrain")(config).steps
    if _is_first():
        print(f"{config.output}: {len(losses)} steps, last loss {losses[-1]:.4f}")


def _sft(argv: list[str]) -> None:
    command = Command(
        "srm train sft",
        "Fine-tune a model on prompts with completions, or on chats.",
        "srm train sft --model runs/mine --train rows.jsonl --output runs/sft",
        "model train evaluation output epochs batch_rows learning_rate precision device",
    )
    config = load(SFTConfig, argv, prog=command)
    evaluations = _imported("srm.training.finetuning.sft:sft")(config).evaluations
    if _is_first():
        done, least = min(evaluations, key=lambda evaluation_at: evaluation_at[1])
        print(f"{config.output}: least evaluation loss {least:.4f}, after {done} steps")


def _grpo(argv: list[str]) -> None:
    command = Command(
        "srm train grpo",
        "Train a model on rewards of the completions that it samples (GRPO).",
        "srm train grpo --model runs/sft --train questions.jsonl --steps 100 --output runs/grpo",
        "model train reward output steps questions rollouts max_tokens learning_rate precision",
    )
    config = load(GRPOConfig, argv, prog=command)
    times = _imported("srm.training.grpo.command:grpo")(config).summary
    print(
        f"{config.output}: {times.updates} updates, {times.rollout_tokens_per_s:,.0f} tok/s "
        f"sampled, {times.learned_tokens_per_s:,.0f} learned, {times.waiting_share:.0%} of the "
        "time waited for rollouts"
    )


def _evaluate(argv: list[str]) -> None:
    command = Command(
        "srm evaluate",
        "Print greedy accuracy and pass@k of a model on held-out word problems.",
        "srm evaluate --model demo --samples 100   # of a server, by many samples: passk --help",
    )
    config = load(EvaluateConfig, argv, prog=command)
    evaluation = _imported("srm.training.evaluate:evaluate")(config)
    print(msgspec.json.format(msgspec.json.encode(evaluation), indent=2).decode())


TRAIN = {"tokenizer": _tokenizer, "pretrain": _pretrain, "sft": _sft, "grpo": _grpo}


def _is_first() -> bool:
    """Whether this process, of those of one run, is the one that prints the result."""
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
