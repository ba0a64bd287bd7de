"""`python -m engine.device.graph_notes VERB FOLDER …`: compiled graphs that travel to another
machine.

`prune FOLDER` deletes those that are not of this code. `adopt FOLDER cpu|gpu`, on the machine that
is to run them, gives each graph the name that is looked for there: a GPU may be called otherwise
than the virtual one it was compiled for. A graph of other sources or of another MAX is refused.
"""

from __future__ import annotations

import ast
import logging
import sys
from pathlib import Path

import msgspec
from max.driver import Device

from engine.device.graph_cache import GraphNote, cache_path, code_version, describe_device
from engine.device.runner import open_device
from engine.errors import UNDECODABLE, ConfigError, SRMError
from engine.logs import configure_command

log = logging.getLogger(__name__)


def prune(folder: Path) -> list[Path]:
    """Delete graphs of other code, and those without a note; return the graphs that are left."""
    notes, current = read_notes(folder), code_version()
    kept = {path for path, note in notes.items() if note.code == current}
    for path in set(folder.glob("*.mef")) - kept:
        log.info("%s is not of this code: deleted", path)
        path.unlink()
        path.with_suffix(".json").unlink(missing_ok=True)
    return sorted(kept)


def adopt(device: Device, folder: Path) -> int:
    """Link every graph to the name that is looked for here; return how many needed it.

    Raises ConfigError for a graph of other code, and on a CPU for one of another processor, whose
    instructions this one may not have.
    """
    current, linked = code_version(), 0
    log.info("the device is %s", describe_device(device))
    for path, note in read_notes(folder).items():
        if note.code != current:
            raise ConfigError(f"{path} was compiled from code {note.code}, here is {current}")
        try:
            shape = ast.literal_eval(note.shape)
        except (SyntaxError, MemoryError, *UNDECODABLE) as error:
            raise ConfigError(f"{path}: shape = {note.shape!r} is none: {error}") from None
        wanted = cache_path(note.name, shape, device, folder)
        if wanted.exists():
            continue
        if device.is_host:
            raise ConfigError(f"{path} was compiled for another processor")
        log.warning("%s, compiled for %s, is taken for %s", path.name, note.device, wanted.name)
        wanted.symlink_to(path.name)
        linked += 1
    return linked


def read_notes(folder: Path) -> dict[Path, GraphNote]:
    """Read the notes of all graphs that have one. Raises ConfigError for none, or a damaged one."""
    paths = [path for path in sorted(folder.glob("*.mef")) if path.with_suffix(".json").exists()]
    if not paths:
        raise ConfigError(f"{folder} holds no compiled graphs with notes")
    return {path: _read_note(path.with_suffix(".json")) for path in paths}


def _read_note(path: Path) -> GraphNote:
    try:
        return msgspec.json.decode(path.read_bytes(), type=GraphNote)
    except UNDECODABLE as error:
        raise ConfigError(f"{path} is no note of a compiled graph: {error}") from None


def main(argv: list[str]) -> int:
    """Run one verb; return its exit code."""
    configure_command()
    try:
        match argv:
            case ["prune", folder]:
                graphs = prune(Path(folder))
                log.info("%d graphs, %d bytes", len(graphs), sum(p.stat().st_size for p in graphs))
            case ["adopt", folder, "cpu" | "gpu" as device]:
                log.info("%d graphs taken over", adopt(open_device(device), Path(folder)))
            case _:
                raise ConfigError("give prune FOLDER, or adopt FOLDER cpu|gpu")
    except SRMError as error:
        log.error("graph_notes: %s", error.message)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
