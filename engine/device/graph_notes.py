"""`python -m srm.engine.device.graph_notes VERB FOLDER …`: compiled graphs that travel to another
machine.

`prune FOLDER` deletes those that are not of this code. `adopt FOLDER cpu|gpu`, on the machine that
is to run them, gives each graph the name that is looked for there: a GPU may be called otherwise
than the virtual one it was compiled for. A graph of other sources or of another MAX is refused.

`keep FOLDER KEPT` compresses those of this code into a folder that is small enough for git, and
`unpack KEPT FOLDER` does the reverse. Their names say what they were made of: whoever wants a graph
of the same takes it instead of compiling, whatever became of the Python code.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import lzma
import sys
from pathlib import Path

import msgspec
from max.driver import Device

from srm.engine.device.graph_cache import (
    GraphNote,
    cache_path,
    check_owned,
    code_version,
    describe_device,
)
from srm.engine.device.linear import KERNELS
from srm.engine.device.runner import open_device
from srm.errors import UNDECODABLE, ConfigError, SRMError
from srm.files import open_file, read_file
from srm.logs import configure_command

log = logging.getLogger(__name__)

KEPT = ".xz"
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]


def prune(folder: Path) -> list[Path]:
    """Delete graphs of other code, and those without a note; return the graphs that are left."""
    notes, current = read_notes(folder), code_version()
    current_graphs = {path for path, note in notes.items() if note.code == current}
    for path in set(folder.glob("*.mef")) - current_graphs:
        log.debug("%s is not of this code: deleted", path)
        path.unlink()
        path.with_suffix(".json").unlink(missing_ok=True)
    return sorted(current_graphs)


def adopt(device: Device, folder: Path) -> int:
    """Link every graph to the name that is looked for here; return how many needed it.

    Raises ConfigError for a graph of other code, for one that others may write, and on a CPU for
    one of another processor, whose instructions this one may not have.
    """
    current, linked = code_version(), 0
    log.info("the device is %s", describe_device(device))
    for path, note in read_notes(folder).items():
        check_owned(folder, path, path.with_suffix(".json"))  # before each is refused when read
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


def keep(folder: Path, kept_folder: Path) -> None:
    """Compress every graph of this code, unless it is kept.

    What a graph says in errors about lines of ours is put relative to the source tree: where that
    lies on this machine is nobody's business.
    """
    kept_folder.mkdir(parents=True, exist_ok=True)
    here = str(KERNELS.parents[1]).encode()
    for path, note in read_notes(folder).items():
        file = kept_folder / f"{note.name}-{note.made_of}{KEPT}"
        if note.code != code_version() or not note.made_of or file.exists():
            continue
        with open_file(path) as opened:
            graph = opened.read().replace(here, b"." + b"/" * (len(here) - 1))  # of the same size
        digest = hashlib.sha256(graph).hexdigest()
        own = msgspec.structs.replace(note, code="", sha256=digest)
        file.with_suffix(".json").write_bytes(msgspec.json.encode(own))
        file.write_bytes(lzma.compress(graph, filters=FILTERS))
        log.info("%s, %d bytes, is %s", path.name, file.stat().st_size, file.name)


def unpack(kept_folder: Path, folder: Path, code: str = "") -> list[Path]:
    """Write kept graphs there, as ones of this `code`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for file in sorted(kept_folder.glob(f"*{KEPT}")):
        note = msgspec.structs.replace(_read_note(file.with_suffix(".json")), code=code)
        path = folder / file.with_suffix(".mef").name
        path.with_suffix(".json").write_bytes(msgspec.json.encode(note))
        path.write_bytes(lzma.decompress(read_file(file)))
        for written in (path, path.with_suffix(".json")):
            written.chmod(0o644)  # as `graph_cache` wants them, whatever the umask
        paths.append(path)
    return paths


def read_notes(folder: Path) -> dict[Path, GraphNote]:
    """Read the notes of all graphs that have one. Raises ConfigError for none, or a damaged one."""
    paths = [path for path in sorted(folder.glob("*.mef")) if path.with_suffix(".json").exists()]
    if not paths:
        raise ConfigError(f"{folder} holds no compiled graphs with notes")
    return {path: _read_note(path.with_suffix(".json")) for path in paths}


def _read_note(path: Path) -> GraphNote:
    try:
        return msgspec.json.decode(read_file(path), type=GraphNote)
    except UNDECODABLE as error:
        raise ConfigError(f"{path} is no note of a compiled graph: {error}") from None


def main(argv: list[str]) -> int:
    """Run one verb; return its exit code."""
    configure_command()
    try:
        match argv:
            case ["prune", folder]:
                graphs = prune(Path(folder))
                size = sum(path.stat().st_size for path in graphs)
                log.info("%d files of compiled graphs, %.1f MiB", len(graphs), size / 2**20)
            case ["adopt", folder, "cpu" | "gpu" as device]:
                log.info("%d graphs taken over", adopt(open_device(device), Path(folder)))
            case ["keep", folder, retained]:
                keep(Path(folder), Path(retained))
            case ["unpack", retained, folder]:
                paths = unpack(Path(retained), Path(folder))
                log.info("%d files of compiled graphs unpacked", len(paths))
            case _:
                raise ConfigError(
                    "give prune FOLDER, adopt FOLDER cpu|gpu, keep FOLDER KEPT, unpack KEPT FOLDER"
                )
    except SRMError as error:
        log.error("graph_notes: %s", error.message)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
