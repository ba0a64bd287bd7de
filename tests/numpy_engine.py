"""`python -m tests.numpy_engine`: the engine process on the numpy runner with random weights.

Takes the flags of `python -m engine`; of the checkpoint it reads only `config.json`.
"""

from __future__ import annotations

import sys

import msgspec

from engine.config import EngineConfig, ModelConfig, load
from engine.engine import Engine
from engine.errors import SRMError
from engine.process import serve
from tests.numpy_runner import NumpyRunner, tiny_weights


def main(argv: list[str]) -> int:
    try:
        config = load(EngineConfig, argv, prog="python -m tests.numpy_engine")
        model = msgspec.json.decode((config.model / "config.json").read_bytes(), type=ModelConfig)
        weights = tiny_weights(config=model)
        runner = NumpyRunner(weights, config.pool_slots)
        return serve(Engine(model, runner, config, weights.fingerprint), config)
    except SRMError as error:
        print(error.message, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
