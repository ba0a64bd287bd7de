"""`python -m training`, which is `srm train`."""

from __future__ import annotations

import sys

from engine.config import load
from training.pretrain import TrainConfig, pretrain


def main(argv: list[str]) -> int:
    """Pretrain with the settings given; return the exit code."""
    config = load(TrainConfig, argv, prog="srm train")
    losses = pretrain(config)
    print(f"{config.output}: {len(losses)} steps, last loss {losses[-1]:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
