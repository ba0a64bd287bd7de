"""An engine process of a command's own: started, talked to, and gone when the command is through.

It is restarted after a crash only for a command that can go on; one that crashes again and again
with nothing done in between is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, TypeVar

import msgspec

from srm.engine.client.client import EngineClient
from srm.engine.config import EngineConfig
from srm.engine.wiring import EngineWiring
from srm.errors import EngineUnavailable
from srm.logs import configure_command
from srm.server.supervise.ends import describe_exit
from srm.server.supervise.launch import child_environment, new_endpoint, python_module, wired
from srm.server.supervise.supervisor import FATAL_CODES, Child
from srm.settings import Command, build, read_settings

log = logging.getLogger(__name__)

PRIVATE = frozenset(
    {
        *("drain_s", "max_slots", "request_timeout_s"),
        *("snapshot_dir", "snapshot_interval_s", "snapshot_s"),
    }
)
"""Settings of the engine that are set here, or mean nothing where nobody else asks."""
MAX_CRASHES = 10
"""Crashes in a row with nothing done in between after which the engine is given up: more than it
takes to find a line that kills it."""
_LONGEST_PAUSE_S = 5.0
_STOP_S = 10.0

Result = TypeVar("Result")
Config = TypeVar("Config", bound=msgspec.Struct)


def command_settings(
    kind: type[Config], argv: list[str], command: Command, is_quiet: bool = True
) -> tuple[Config, EngineConfig]:
    """Read the settings of a command and of its engine, and log on standard error from now on.

    A quiet engine logs warnings alone, unless told otherwise. Raises ConfigError.
    """
    given = read_settings((kind, EngineConfig), argv, command)
    config, quiet = build(kind, given), {"log_level": "warning"} if is_quiet else {}
    engine = build(EngineConfig, {**quiet, **given})
    configure_command()
    return config, engine


async def with_engine(
    config: EngineConfig,
    module: str,
    work: Callable[[EngineClient], Awaitable[Result]],
    progress: Callable[[], int] | None = None,
) -> Result:
    """Run `work` once the engine, `python -m module`, is ready, and return its result.

    `progress` returns how much is done: with it, the engine is restarted when it crashes. Raises
    EngineUnavailable, with the exit code to leave with, if the engine ends for good before, and
    what ended the connection to it.
    """
    # When it is told to stop, all is done or nobody waits any more.
    wiring = wired(EngineWiring, config, endpoint=new_endpoint(), drain_s=0.0)
    child = Child("engine", python_module(module, wiring), child_environment())
    # Its process shows whether it lives: on a busy machine it may be slow to answer.
    client = EngineClient(wiring.endpoint, engine_timeout_s=inf)
    broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(_name: str, error: Exception) -> None:
        if not broken.done():
            broken.set_exception(error)

    await client.connect(fail)
    engine = asyncio.create_task(_keep(child, progress) if progress else child.run_once())
    task = asyncio.ensure_future(_when_ready(client, work))
    try:
        waited: set[asyncio.Future[Any]] = {engine, task, broken}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if broken.done():
            broken.result()
        raise _ended(engine.result())
    finally:
        await client.close()  # first: what is broken off now, the engine puts into its snapshot
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.cancel()  # or it would be started again
        await child.stop(_STOP_S + (config.snapshot_s if config.snapshot_dir else 0.0))
        await asyncio.gather(engine, return_exceptions=True)


async def _when_ready(
    client: EngineClient, work: Callable[[EngineClient], Awaitable[Result]]
) -> Result:
    await client.wait_until_ready(inf)
    return await work(client)


async def _keep(child: Child, progress: Callable[[], int]) -> int:
    """Keep the engine running; returns its exit code once a restart has no point."""
    crashes, done = 0, progress()
    while True:
        code = await child.run_once()
        crashes = 1 if progress() > done else crashes + 1
        done = progress()
        if code in FATAL_CODES:
            return code
        if crashes == MAX_CRASHES:
            log.error("the engine ended %d times with nothing done in between", crashes)
            return code
        pause = min(0.1 * 2**crashes, _LONGEST_PAUSE_S)
        log.warning("the engine ended (%s): restart in %g s", describe_exit(code), pause)
        await asyncio.sleep(pause)


def _ended(code: int) -> EngineUnavailable:
    # The engine itself has reported errors in settings and files: nothing is added to that.
    message = "" if code in FATAL_CODES else f"the engine process ended, {describe_exit(code)}"
    error = EngineUnavailable(message)
    error.exit_code = code if code > 0 else 1
    return error
