"""A model so small that the work around it dominates.

It has random weights and two narrow layers; vocabulary, tokenizer and context are the demo model's.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from engine.config import DEMO_MODEL, ModelConfig
from engine.weights.random_model import write_random_model


def write_tiny_model(folder: Path) -> None:
    """Write the model."""
    demo = msgspec.json.decode((DEMO_MODEL / "config.json").read_bytes(), type=ModelConfig)
    write_random_model(folder, msgspec.structs.replace(demo, d_model=32, num_layers=2, num_heads=2))
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
