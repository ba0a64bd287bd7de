"""`python -m bench.host.tiny FOLDER`: writes a model so small that the work around it dominates.

It has random weights and two narrow layers; vocabulary, tokenizer and context are the demo model's.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec

from engine.config import DEMO_MODEL, ModelConfig
from engine.weights.random_model import write_random_model


def main(argv: list[str]) -> int:
    """Write the model."""
    folder = Path(argv[0])
    demo = msgspec.json.decode((DEMO_MODEL / "config.json").read_bytes(), type=ModelConfig)
    write_random_model(folder, msgspec.structs.replace(demo, d_model=32, num_layers=2, num_heads=2))
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
