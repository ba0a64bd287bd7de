"""`python -m srm.training train COMMAND | evaluate`, which are `srm train …` and `srm evaluate`."""

from __future__ import annotations

import os
import sys

import msgspec

from srm.engine.errors import ConfigError
from srm.engine.logs import configure_command
from srm.engine.settings import load
from srm.server.commands.standard_output import INTERRUPTED
from srm.training.evaluate import EvaluateConfig, evaluate
from srm.training.finetuning.sft import SFTConfig, sft
from srm.training.grpo.command import grpo
from srm.training.grpo.config import GRPOConfig
from srm.training.pretrain import PretrainConfig, pretrain
from srm.training.text.tokenizer import TokenizerConfig, make_tokenizer


def main(argv: list[str]) -> int:
    """Run the command that argv names with the settings that follow; return the exit code."""
    configure_command()
    try:
        return _command(argv)
    except KeyboardInterrupt:
        goes_on = "; the same command goes on from the last save" if argv[0] == "train" else ""
        print(f"srm {argv[0]}: interrupted{goes_on}", file=sys.stderr)
        return INTERRUPTED


def _command(argv: list[str]) -> int:
    command, settings = (argv[0], argv[1:]) if argv else ("", [])
    if command == "train" and settings[:1] == ["pretrain"]:
        config = load(PretrainConfig, settings[1:], prog="srm train pretrain")
        losses = pretrain(config).steps
        if _is_first():
            print(f"{config.output}: {len(losses)} steps, last loss {losses[-1]:.4f}")
    elif command == "train" and settings[:1] == ["sft"]:
        tuning = load(SFTConfig, settings[1:], prog="srm train sft")
        evaluations = sft(tuning).evaluations
        if _is_first():
            done, least = min(evaluations, key=lambda evaluation_at: evaluation_at[1])
            print(f"{tuning.output}: least evaluation loss {least:.4f}, after {done} steps")
    elif command == "train" and settings[:1] == ["grpo"]:
        learning = load(GRPOConfig, settings[1:], prog="srm train grpo")
        times = grpo(learning).summary
        print(
            f"{learning.output}: {times.updates} updates, {times.rollout_tokens_per_s:,.0f} tok/s "
            f"sampled, {times.learned_tokens_per_s:,.0f} learned, {times.waiting_share:.0%} of the "
            "time waited for rollouts"
        )
    elif command == "train" and settings[:1] == ["tokenizer"]:
        made = load(TokenizerConfig, settings[1:], prog="srm train tokenizer")
        print(f"{made.output}: {make_tokenizer(made).get_vocab_size()} entries")
    elif command == "train":
        raise ConfigError(
            f"srm train has the commands pretrain, sft, grpo and tokenizer; got {settings[:1]}"
        )
    elif command == "evaluate":
        evaluation = evaluate(load(EvaluateConfig, settings, prog="srm evaluate"))
        print(msgspec.json.format(msgspec.json.encode(evaluation), indent=2).decode())
    else:
        raise ConfigError(f"training has the commands train and evaluate, not {command!r}")
    return 0


def _is_first() -> bool:
    """Whether this process, of those of one run, is the one that prints the result."""
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
