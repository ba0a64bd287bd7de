"""What tests had MAX and Mojo compile is kept between runs, as `engine.device.graph_cache` does.

The key is a digest of the compilers' versions, of all our kernels and of whatever else is given.
One process compiles; whoever wants the same waits for it. A damaged file is made anew, and one that
was not used for 30 days goes.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from srm.engine.config import EngineConfig
from srm.engine.device.linear import KERNELS

KEEP_S = 30 * 24 * 3600


def cache_folder() -> Path:
    """Return where the engine keeps compiled graphs, unless SRM_CACHE_DIR says another place."""
    return Path(os.environ.get("SRM_CACHE_DIR", EngineConfig().cache_dir)).expanduser()


def keep_compiled(
    name: str,
    sources: Iterable[Path],
    facts: tuple[str, ...],
    make: Callable[[], bytes],
    folder: Path | None = None,
) -> bytes:
    """Return what `make` returned for the same name, sources and facts; if it raises, nothing is
    kept. The folder is `tests` in that of graphs, or the one given."""
    folder = folder or cache_folder() / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{_digest(sources, facts)}.z"
    if (data := _read(path)) is not None:
        return data
    with path.with_suffix(".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (data := _read(path)) is not None:
            return data
        data = make()
        _drop_unused(folder)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".partial", delete=False) as partial:
            partial.write(zlib.compress(data))
        Path(partial.name).replace(path)
    return data


def _digest(sources: Iterable[Path], facts: tuple[str, ...]) -> str:
    versions = [importlib.metadata.version(package) for package in ("max", "mojo")]
    digest = hashlib.sha256(repr((versions, facts)).encode())
    for source in [*sorted(sources), *sorted(KERNELS.parent.rglob("*.mojo"))]:
        text = source.read_bytes()
        digest.update(f"{source.name} {len(text)} ".encode() + text)
    return digest.hexdigest()[:20]


def _read(path: Path) -> bytes | None:
    """What is kept, noted as used; None for what is not there, or is damaged."""
    with suppress(OSError, zlib.error):
        data = zlib.decompress(path.read_bytes())
        os.utime(path)
        return data
    return None


def _drop_unused(folder: Path) -> None:
    """Remove what was not used for KEEP_S, locks among it: at worst two compile the same."""
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - KEEP_S:
                path.unlink()
