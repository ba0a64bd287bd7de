"""`python -m training train | evaluate`, which are `srm train` and `srm evaluate`."""

from __future__ import annotations

import sys

import msgspec

from engine.errors import ConfigError
from engine.settings import load
from training.evaluate import EvaluateConfig, evaluate
from training.pretrain import TrainConfig, pretrain


def main(argv: list[str]) -> int:
    """Run the command that argv names with the settings that follow; return the exit code."""
    command, settings = (argv[0], argv[1:]) if argv else ("", [])
    if command == "train":
        config = load(TrainConfig, settings, prog="srm train")
        losses = pretrain(config)
        print(f"{config.output}: {len(losses)} steps, last loss {losses[-1]:.4f}")
    elif command == "evaluate":
        found = evaluate(load(EvaluateConfig, settings, prog="srm evaluate"))
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        raise ConfigError(f"training has the commands train and evaluate, not {command!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
