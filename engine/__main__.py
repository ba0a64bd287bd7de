"""`python -m engine`: load a checkpoint, compile the step graph, serve it to API processes."""

from __future__ import annotations

import logging
import sys

from engine import logs
from engine.device.libc import keep_freed_memory, wait_busily_for_less
from engine.device.runner import ModelRunner
from engine.errors import SRMError
from engine.memory import collect_rarely
from engine.process.engine import Engine
from engine.process.process import serve
from engine.process.weights_note import first_weights
from engine.settings import load
from engine.weights.checkpoint import load_checkpoint
from engine.wiring import EngineWiring

logger = logging.getLogger("engine")


def main(argv: list[str]) -> int:
    """Run the engine process until it is told to stop; return its exit code."""
    logs.configure("info", "text")  # until it is known what is wanted
    keep_freed_memory()
    wait_busily_for_less()
    try:
        config = load(EngineWiring, argv, prog="python -m engine")
        logs.configure(config.log_level, config.log_format)
        logger.info("loading %s", config.model)
        weights, version = first_weights(config, load_checkpoint)
        runner = ModelRunner(weights, config)
        collect_rarely()
        engine = Engine(weights.config, runner, config, weights.fingerprint, version)
        return serve(engine, config)
    except SRMError as error:
        logger.error("%s", error.message)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
