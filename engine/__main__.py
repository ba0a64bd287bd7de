"""`python -m srm.engine`: load a checkpoint, compile the step graph, serve it to API processes."""

from __future__ import annotations

import logging
import sys

import msgspec

from srm import logs
from srm.cores import stay_near
from srm.engine.device.gpu import pci_address
from srm.engine.device.libc import keep_freed_memory, wait_busily_for_less
from srm.engine.device.runner import make_runner
from srm.engine.process.engine import Engine
from srm.engine.process.process import serve
from srm.engine.process.weights_note import first_weights, started_folder
from srm.engine.weights.checkpoint import load_checkpoint, with_ends_of
from srm.engine.wiring import EngineWiring
from srm.errors import SRMError
from srm.memory import collect_rarely
from srm.progress import count_seconds
from srm.settings import load

logger = logging.getLogger("srm.engine")


def main(argv: list[str]) -> int:
    """Run the engine process until it is told to stop; return its exit code."""
    logs.configure("info", "text")  # until it is known what is wanted
    keep_freed_memory()
    wait_busily_for_less()
    try:
        config = load(EngineWiring, argv, prog="python -m srm.engine")
        logs.configure(config.log_level, config.log_format)
        logger.info("loading %s", config.model)
        with count_seconds(f"loading {config.model}"):
            weights, note = first_weights(config, load_checkpoint)
        own = msgspec.structs.replace(config, model=started_folder(config))
        weights = with_ends_of(own.model, weights)
        runner = make_runner(weights, config)
        if config.device == "gpu" and (address := pci_address()):
            stay_near(address)
        collect_rarely()
        named = note.fingerprint, note.weights_version, note.label
        engine = Engine(weights.config, runner, own, *named)
        return serve(engine, config)
    except SRMError as error:
        logger.error("%s", error.message)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
