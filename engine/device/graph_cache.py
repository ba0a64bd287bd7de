"""Compiled graphs on disk: compile once per model shape and machine, read ever after.

The key covers everything a compiled graph depends on: the model's shape and dtype, the sources of
graph and kernels, the MAX version, the device or the level of the processor. Graphs that came with
the program are looked for first. What has no file of its key is built, which takes seconds, and
compiled only if no graph in the folder was made of the same: another name in Python costs no
compile. Whoever wants a graph that another process is compiling waits for it; a file that is
damaged or cannot be read is compiled anew. A note beside each file says what it is, and what its
bytes are; since whoever can write one can write the other, and a graph is machine code, neither is
read where others may write. Weights are bound later.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from max.driver import Device
from max.dtype import DType
from max.engine import CompiledModel, InferenceSession, read
from max.graph import Graph, Module

from srm.engine import messages, metrics
from srm.engine.config import ModelConfig
from srm.engine.device import kernels, linear, model, processor, products
from srm.engine.device.linear import KERNELS
from srm.engine.device.model import build_slot_graphs, build_step_graph, graph_shape
from srm.engine.device.products import NO_VARIANTS, Product, Variants
from srm.engine.messages import MAX_LOGPROBS
from srm.errors import UNDECODABLE, ConfigError
from srm.files import open_file, read_file
from srm.metrics_memory import COMPILES
from srm.progress import count_seconds

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 30.0

RELEASED_GRAPHS = Path(__file__).resolve().parents[2] / "models" / "graphs"
"""The bundled model's graphs, which a wheel or an image has beside the program. Those of a source
tree are as old as its last `make graphs`, but what they were compiled from is in their names."""

SOURCES = [Path(module.__file__ or "") for module in (kernels, linear, messages, model, products)]
"""What builds graphs."""
Built = tuple[Graph | Module, list[Path]]
"""What is to be compiled, and compiled kernels that it needs beside those it names itself."""


class GraphNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a compiled graph, in `<file>.json` beside `<file>.mef`."""

    name: str
    shape: str  # a Python literal of everything the graph depends on but code and device
    code: str  # the `code_version` it was compiled from
    device: str  # label and architecture of the device it was compiled for, as MAX names them
    sha256: str  # of the file: what a graph runs is machine code, which nothing else checks
    made_of: str = ""  # `digest_of` the graphs; empty in notes of earlier versions


class GraphCache(NamedTuple):
    """Where the compiled graphs of a device are kept, and what compiles those that are not."""

    session: InferenceSession
    device: Device
    folder: Path
    shipped: Path | None = None
    """Looked into first, and only read."""

    def step(
        self,
        config: ModelConfig,
        dtype: DType,
        product: Product | None = None,
        max_logprobs: int = MAX_LOGPROBS,
        variants: Variants = NO_VARIANTS,
    ) -> CompiledModel:
        """Return this model shape's step graph."""

        def build() -> Built:
            how: dict[str, Any] = {"product": product, "max_logprobs": max_logprobs}
            return build_step_graph(config, dtype, self.device, **how, variants=variants), []

        return self.load("step", graph_shape(config, dtype, product, max_logprobs, variants), build)

    def slots(self) -> CompiledModel:
        """Return the graphs of `build_slot_graphs`."""
        return self.load("slots", (), lambda: build_slot_graphs(self.device))

    def load(
        self, name: str, shape: tuple[object, ...], build: Callable[[], Built]
    ) -> CompiledModel:
        """Return graphs of a kind and shape, read from `shipped` or `folder`, or compiled and kept
        in `folder`. Raises ConfigError if others may write there, but for graphs beside the
        program."""
        shipped = self.shipped and cache_path(name, shape, self.device, self.shipped)
        if shipped and (graph := _read(shipped)) is not None:
            return graph
        if self.device.is_host:
            processor.compile_for_level()
        path = cache_path(name, shape, self.device, self.folder)
        if (graph := _read(path)) is not None:
            return graph
        with _alone(path.with_suffix(".lock")):
            check_owned(path.parent)  # before minutes are spent on what would not be read again
            return _read(path) or self._compile(name, shape, build, path)

    def _compile(
        self, name: str, shape: tuple[object, ...], build: Callable[[], Built], path: Path
    ) -> CompiledModel:
        with _progress(COMPILES):
            graphs, libraries = build()
            made_of = digest_of(graphs, self.device)
            same = _find(made_of, path.parent)
            compiled = _read(same) if same else None
            if compiled is None:
                same, compiled = None, self.session.compile(graphs, custom_extensions=libraries)
        try:
            partial = path.with_suffix(".partial")
            if same:
                shutil.copyfile(same, partial)
            else:
                compiled.export_mef(partial)
            what = (name, repr(shape), code_version(), describe_device(self.device))
            note = GraphNote(*what, sha256=_sha256(partial), made_of=made_of)
            path.with_suffix(".json").write_bytes(msgspec.json.encode(note))
            for file in (path.with_suffix(".json"), partial):
                file.chmod(0o644)  # whatever the umask: what others may write is not read
            partial.replace(path)
        except OSError as error:
            raise _unkept(path, error) from None
        return compiled


def _read(path: Path) -> CompiledModel | None:
    if path.exists():
        file = path.resolve()  # a graph that another name was given to has one note
        if path.parent != RELEASED_GRAPHS:
            check_owned(path.parent, file.with_suffix(".json"), file)
        try:
            note = msgspec.json.decode(read_file(file.with_suffix(".json")), type=GraphNote)
            if note.sha256 != _sha256(file):
                raise ValueError("its bytes are not those that were written")
            return read(path)
        except (*UNDECODABLE, ValueError, RuntimeError, OSError) as error:
            log.warning("cannot read the compiled graph %s (%s): compiling again", path, error)
    return None


def check_owned(*paths: Path) -> None:
    """Raise ConfigError unless only this user and root may write these paths, and replace them.

    The group may too, where it is root's or has this user's number: so user-private groups are, and
    the `fsGroup` of our manifests. Others may in a folder above that is sticky, such as /tmp: they
    cannot replace what lies there and is not theirs.
    """
    own = {0, os.geteuid()}
    for path in map(Path.resolve, paths):
        for place in (path, *path.parents):
            try:
                info = place.stat()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ConfigError(f"{place}: {error.strerror}") from None
            mode = stat.S_IMODE(info.st_mode)
            is_open = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and info.st_gid not in own)
            is_kept = place != path and mode & stat.S_ISVTX
            if info.st_uid not in own or (is_open and not is_kept):
                raise ConfigError(
                    f"{place}: others may write there (owner {info.st_uid}, group {info.st_gid}, "
                    f"mode {mode:o}), and compiled graphs, which are code, are kept in it: take "
                    "that from them with chmod and chown, or set cache_dir or graphs_dir to a "
                    "folder that is yours alone"
                )


def _sha256(file: Path) -> str:
    with open_file(file) as opened:
        return hashlib.sha256(opened.read()).hexdigest()


def _find(made_of: str, folder: Path) -> Path | None:
    """Return a graph that was made of this, whatever it is called."""
    for path in folder.glob("*.mef"):
        with suppress(*UNDECODABLE, OSError):
            note = msgspec.json.decode(read_file(path.with_suffix(".json")), type=GraphNote)
            if note.made_of == made_of:
                return path
    return None


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold a lock against other processes. Its empty file stays: removing it may let two in."""
    try:
        if not lock.parent.exists():
            lock.parent.mkdir(parents=True, exist_ok=True)  # another process may be making it
            lock.parent.chmod(0o755)  # whatever the umask
        file = lock.open("wb")
    except OSError as error:
        raise _unkept(lock, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with _progress(f"waiting for the process that compiles this: {lock}"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unkept(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cache_dir = {path.parent}: cannot keep the compiled graph: {error}")


def cache_path(name: str, shape: tuple[object, ...], device: Device, folder: Path) -> Path:
    """Path of kept graphs: the name holds a digest of all that a compiled graph depends on."""
    facts = (shape, _target(device), importlib.metadata.version("max"))
    return folder / f"{name}-{_digest(repr(facts), SOURCES)}.mef"


def _target(device: Device) -> tuple[str, str]:
    # `sm_90` of `sm_90a`: the letter says which instructions may be used, not which GPU it is.
    return device.label, (
        processor.target() if device.is_host else str(device.architecture_name).rstrip("abcdef")
    )


def code_version() -> str:
    """A digest of MAX's version and of the sources that graphs are compiled from."""
    return _digest(importlib.metadata.version("max"), SOURCES)


def digest_of(graphs: Graph | Module, device: Device) -> str:
    """A digest of all that the compiler gets: MAX's version, the kind of device, the sources of
    kernels, and the graphs as MAX has them; of the Python that built them it has nothing."""
    module = graphs.module if isinstance(graphs, Graph) else graphs
    _, _, text = str(module.mlir_module).partition("\n")  # the first line names this very device
    text = re.sub(r"_kernel_library_paths = \[.*?\]", "", text)
    return _digest(repr((text, _target(device), importlib.metadata.version("max"))))


def describe_device(device: Device) -> str:
    """Describe a device for people: `cpu`, or what MAX calls a GPU and its architecture."""
    return device.label if device.is_host else f"{device.label} {device.architecture_name}"


def _digest(facts: str, sources: Sequence[Path] = ()) -> str:
    """A digest of facts, of these files and of the kernels."""
    digest = hashlib.sha256(facts.encode())
    for source in [*sources, *sorted(KERNELS.rglob("*.mojo"))]:
        digest.update(source.name.encode() + read_file(source))
    return digest.hexdigest()[:20]


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Say what takes long: one counted line of a terminal, or a line of the log now and then."""

    def log_seconds(seconds: float) -> None:
        # A warning: commands that say nothing else are not to look as if they hung.
        log.warning("%s: %.0f s so far", what, seconds)

    started = time.monotonic()
    log.info("%s", what)
    metrics.COMPILING.set(1)
    try:
        with count_seconds(what, log_seconds, PROGRESS_EVERY_S):
            yield
    finally:
        metrics.COMPILING.set(0)
    log.info("%s: took %.0f s", what, time.monotonic() - started)
