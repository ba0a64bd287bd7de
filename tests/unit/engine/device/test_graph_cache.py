"""Models share a compiled graph exactly where their graphs are the same."""

from __future__ import annotations

import importlib.metadata
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest
from max import driver
from max.driver import CPU
from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, ops
from prometheus_client import REGISTRY

from srm.engine.config import ModelConfig
from srm.engine.device import graph_cache, processor
from srm.engine.device.graph_cache import Built, GraphCache, cache_path
from srm.engine.device.model import graph_shape
from srm.errors import ConfigError

MIXED = ModelConfig(d_model=8, num_layers=2, num_heads=4, n_ctx=16, vocab_size=11)
HEADLESS: dict[str, Any] = {"num_heads": 1, "use_projections": False, "decay": False}


class Compiled:
    """A compiled graph, as far as the cache knows one."""

    def export_mef(self, path: Path) -> None:
        path.write_text("the graph")


class Compiler:
    """A session, as far as the cache knows one."""

    def __init__(self) -> None:
        self.compiled: list[Compiled] = []

    def compile(self, graphs: Graph | Module, custom_extensions: list[Path]) -> Any:
        self.compiled.append(Compiled())
        return self.compiled[-1]


def build(output: float = 1.0) -> Built:
    with Graph("a", input_types=[]) as graph:
        graph.output(ops.constant(output, DType.float32, DeviceRef.CPU()))
    return graph, []


def want(compiler: Compiler, folder: Path, name: str = "test", output: float = 1.0) -> Any:
    """What the cache gives for a graph of this name."""
    cache = GraphCache(cast(Any, compiler), CPU(), folder)
    return cache.load(name, (), partial(build, output))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    monkeypatch.setattr(graph_cache, "read", Path.read_text)
    return Compiler()


def path(dtype: DType = DType.float32, **fields: Any) -> Path:
    shape = graph_shape(msgspec.structs.replace(MIXED, **fields), dtype)
    return cache_path("step", shape, CPU(), Path("graphs"))


V4 = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{V4} avx512_bf16 avx512_vnni", "cooperlake"),
        (f"{V4} avx512_vnni", "x86-64-v4"),
        (V4.replace("avx512vl", ""), "x86-64-v3"),
        (V4.replace("fma", ""), ""),
    ],
)
def test_a_processor_takes_the_highest_level_that_it_has(
    flags: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "_facts", lambda: ["model name: X", f"flags\t\t: {flags}"])
    chosen: list[str] = []
    monkeypatch.setattr(driver, "get_virtual_cpu_target", lambda: "".join(chosen))
    monkeypatch.setattr(driver, "set_virtual_cpu_target", chosen.append)
    names = {path(), path(DType.bfloat16)}
    processor.compile_for_level()
    assert "".join(chosen) == processor.level() == expected
    assert (processor.target() == expected) == bool(expected)
    assert len(names | {path(), path(DType.bfloat16)}) == (4 if expected else 2)


def test_a_compile_is_in_the_metrics_while_it_lasts(tmp_path: Path, compiler: Compiler) -> None:
    def compiling() -> float | None:
        return REGISTRY.get_sample_value("srm_engine_compiling")

    seen: list[float | None] = []

    def note_and_build() -> Built:
        seen.append(compiling())
        return build()

    GraphCache(cast(Any, compiler), CPU(), tmp_path).load("test", (), note_and_build)
    assert [*seen, compiling()] == [1, 0]


def test_a_graph_that_was_shipped_is_taken_and_nothing_is_written(
    tmp_path: Path, compiler: Compiler
) -> None:
    retained, shipped = tmp_path / "kept", tmp_path / "shipped"
    shipped.mkdir()
    shape, session = graph_shape(MIXED, DType.float32), cast(Any, compiler)
    GraphCache(session, CPU(), shipped).load("step", shape, build)
    cache = GraphCache(session, CPU(), retained, shipped)
    step: Any = cache.step(MIXED, DType.float32)
    assert (step, retained.exists(), len(compiler.compiled)) == ("the graph", False, 1)


def test_a_graph_of_other_kernels_or_of_another_max_is_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [path()]
    monkeypatch.setattr(graph_cache, "KERNELS", tmp_path)
    for source in ("one", "another"):
        (tmp_path / "op.mojo").write_text(source)
        names.append(path())
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.1")
    assert len({*names, path()}) == 4


def test_what_a_graph_does_not_depend_on_does_not_name_it() -> None:
    assert path(decay=False, eos_token_id=3) == path(decay_constant=2) == path()
    assert path(mixer="parallel") == path(mixer="column_heads", decay=False) == path()
    assert path(mixer="row", **HEADLESS) == path(mixer="column", **HEADLESS)
    assert path(mixer="combined", combined_row_quirk=True) == path(mixer="combined")


def test_what_a_graph_depends_on_names_it() -> None:
    kernel = {"mixer": "kernel", **HEADLESS}
    others: list[dict[str, Any]] = [
        {},
        *({name: value} for name, value in (("d_model", 16), ("num_layers", 3), ("num_heads", 2))),
        *({name: value} for name, value in (("n_ctx", 17), ("vocab_size", 12))),
        {"use_projections": False},
        *({"mixer": mixer} for mixer in ("combined", "diagonal")),
        {"mixer": "expanded", "decay": False},
        {"mixer": "row", **HEADLESS},
        *({**kernel, "kernel_size": size} for size in (2, 3, 4)),
    ]
    assert len({path(**fields) for fields in others}) == len(others)


def test_a_graph_that_others_want_meanwhile_is_compiled_once(
    tmp_path: Path, compiler: Compiler
) -> None:
    results: list[Any] = []
    all_wait = threading.Barrier(4)

    def wait_and_want() -> None:
        all_wait.wait()
        results.append(want(compiler, tmp_path))

    threads = [threading.Thread(target=wait_and_want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (compiled,) = compiler.compiled
    assert sorted(map(str, results)) == sorted([str(compiled), *["the graph"] * 3])


def test_who_waits_for_anothers_compile_says_for_what_and_how_long(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles, has_waited = threading.Event(), threading.Event()
    lines: list[str] = []

    def note(line: str, *values: Any) -> None:
        lines.append(line % values)
        if "waiting" in lines[-1] and "so far" in lines[-1]:
            has_waited.set()

    def compile_late(graphs: Graph | Module, custom_extensions: list[Path]) -> Any:
        compiles.set()
        assert has_waited.wait(120)
        return Compiled()

    monkeypatch.setattr(graph_cache, "PROGRESS_EVERY_S", 0.0)
    monkeypatch.setattr(graph_cache, "log", Mock(info=note, warning=note))
    monkeypatch.setattr(compiler, "compile", compile_late)
    thread = threading.Thread(target=want, args=(compiler, tmp_path))
    thread.start()
    assert compiles.wait(120)
    assert want(compiler, tmp_path) == "the graph"
    thread.join()
    (lock,) = tmp_path.glob("*.lock")
    waiting = [line for line in lines if line.startswith("waiting")]
    assert waiting[0] == f"waiting for the process that compiles this: {lock}"
    assert waiting[1].startswith(f"{waiting[0]}: ") and "took" in waiting[-1]


@pytest.mark.parametrize("suffix", [".mef", ".json"])
def test_a_graph_with_a_flipped_bit_is_compiled_again(
    suffix: str, tmp_path: Path, compiler: Compiler
) -> None:
    want(compiler, tmp_path)
    (file,) = tmp_path.glob(f"*{suffix}")
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if suffix == ".mef" else data.index(b"sha256") + 12] ^= 1
    file.write_bytes(data)
    assert want(compiler, tmp_path) is compiler.compiled[1]
    assert want(compiler, tmp_path) == "the graph"


def test_other_names_in_python_compile_nothing_that_is_there(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They change the name that is looked for; what the compiler would get is the same."""
    want(compiler, tmp_path)
    (tmp_path / "product-1.json").write_text("no note of a graph")
    monkeypatch.setattr(graph_cache, "SOURCES", [])
    assert want(compiler, tmp_path) == "the graph" and len(compiler.compiled) == 1
    assert len(list(tmp_path.glob("*.mef"))) == 2
    assert want(compiler, tmp_path) == "the graph"
    want(compiler, tmp_path, "other", output=2.0)
    assert len(compiler.compiled) == 2
    monkeypatch.setattr(graph_cache, "KERNELS", tmp_path / "kernels")
    want(compiler, tmp_path)
    assert len(compiler.compiled) == 3


def test_a_folder_that_cannot_be_is_said_before_anything_is_compiled(
    tmp_path: Path, compiler: Compiler
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot keep the compiled graph"):
        want(compiler, tmp_path / "file")
    assert not compiler.compiled


def kept_in(folder: Path) -> Path:
    """Keep a graph in the folder; returns its file."""
    want(Compiler(), folder)
    (file,) = folder.glob("*.mef")
    return file


def never() -> Built:
    pytest.fail("built")


@pytest.mark.parametrize(
    ("place", "mode"),
    [
        (".", 0o777),
        (".", 0o1777),  # others can lay graphs beside ours
        ("..", 0o777),  # or another folder in its place
        ("file", 0o666),
        ("note", 0o646),
    ],
)
@pytest.mark.parametrize("is_shipped", [False, True])
def test_a_graph_where_others_may_write_is_neither_read_nor_compiled(
    place: str, mode: int, is_shipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_cache, "read", lambda path: pytest.fail("code of others ran"))
    folder, own = tmp_path / "above" / "cache", tmp_path / "own"
    file = kept_in(folder)
    named = {".": folder, "..": folder.parent, "file": file, "note": file.with_suffix(".json")}
    named[place].chmod(mode)
    folders = (own, folder) if is_shipped else (folder,)
    with pytest.raises(ConfigError, match=f"{named[place]}: others may write there") as error:
        GraphCache(cast(Any, Compiler()), CPU(), *folders).load("test", (), never)
    assert f"mode {mode:o}" in error.value.message and "set cache_dir" in error.value.message


def test_an_empty_cache_folder_that_others_may_write_is_refused_before_a_compile(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write there"):
        GraphCache(cast(Any, Compiler()), CPU(), tmp_path).load("test", (), never)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize(
    ("owner", "group", "mode", "is_read"),
    [
        (1234, 0, 0o755, False),
        (0, 1234, 0o775, False),
        (0, 1234, 0o755, True),
        (0, 0, 0o2775, True),  # a volume of Kubernetes: fsGroup is the user's number
    ],
)
def test_whose_the_cache_folder_is_decides_who_may_write(
    owner: int, group: int, mode: int, is_read: bool, tmp_path: Path, compiler: Compiler
) -> None:
    folder = tmp_path / "cache"
    kept_in(folder)
    os.chown(folder, owner, group)
    folder.chmod(mode)
    if is_read:
        assert want(compiler, folder) == "the graph"
    else:
        with pytest.raises(ConfigError, match="others may write there"):
            want(compiler, folder)


def test_a_graph_is_the_users_alone_whatever_the_umask(tmp_path: Path, compiler: Compiler) -> None:
    before = os.umask(0)
    try:
        file = kept_in(tmp_path / "cache")
    finally:
        os.umask(before)
    assert {item.stat().st_mode & 0o777 for item in (file, file.with_suffix(".json"))} == {0o644}
    assert want(compiler, file.parent) == "the graph"


def test_a_bug_in_what_says_how_long_it_takes_ends_no_compile(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[threading.ExceptHookArgs] = []
    has_failed = threading.Event()

    def write(args: threading.ExceptHookArgs) -> None:
        written.append(args)
        has_failed.set()

    def compile_late(graphs: Graph | Module, custom_extensions: list[Path]) -> Any:
        assert has_failed.wait(120)
        return Compiled()

    monkeypatch.setattr(threading, "excepthook", write)
    monkeypatch.setattr(graph_cache, "PROGRESS_EVERY_S", 0.0)
    monkeypatch.setattr(graph_cache.log, "warning", Mock(side_effect=KeyError("a bug")))
    monkeypatch.setattr(compiler, "compile", compile_late)
    assert isinstance(want(compiler, tmp_path), Compiled)
    assert [args.exc_type for args in written] == [KeyError]
