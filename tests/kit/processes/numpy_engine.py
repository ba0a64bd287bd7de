"""`python -m tests.kit.processes.numpy_engine`: the engine process on numpy, with random weights.

Takes the flags of `python -m srm.engine`; a folder may have a `seed` in place of weights, or `nan`
there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np

from srm.engine.config import ModelConfig, read_model_config
from srm.engine.process.engine import Engine
from srm.engine.process.process import serve
from srm.engine.process.weights_note import first_weights, started_folder
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.weights import Weights
from srm.engine.wiring import EngineWiring
from srm.errors import SRMError
from srm.settings import load as load_config
from tests.kit.engines.numpy_runner import TINY, NumpyRunner, tiny_weights


def seed_folder(folder: Path, seed: int, model: ModelConfig = TINY) -> Path:
    """Make a model's folder whose weights are the random ones of this seed."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(msgspec.json.encode(model))
    (folder / "seed").write_text(str(seed))
    return folder


def load(folder: Path) -> Weights:
    """The checkpoint in a folder, or random weights of the seed in its file `seed`, if any."""
    if (folder / "model.safetensors").exists():
        return load_checkpoint(folder)
    model = read_model_config(folder)[0]
    seed = folder / "seed"
    if (text := seed.read_text() if seed.exists() else "0") == "nan":
        (weights := tiny_weights(0, model)).head[:] = np.nan
        return weights
    return tiny_weights(int(text), model)


def main(
    argv: list[str],
    make_runner: type[NumpyRunner] = NumpyRunner,
    make_engine: type[Engine] = Engine,
) -> int:
    try:
        config = load_config(EngineWiring, argv, prog="python -m tests.kit.processes.numpy_engine")
        weights, note = first_weights(config, load)
        runner = make_runner(weights, config.num_slots or config.max_slots)
        own = msgspec.structs.replace(config, model=started_folder(config))
        named = note.fingerprint, note.weights_version, note.label
        engine = make_engine(weights.config, runner, own, *named)
        return serve(engine, config, load)
    except SRMError as error:
        print(error.message, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
