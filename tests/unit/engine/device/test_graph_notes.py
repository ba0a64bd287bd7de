"""Graphs compiled elsewhere are found under the name looked for here, if they are of this code."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from max.driver import CPU

from srm.engine.device import graph_notes
from srm.engine.device.graph_cache import GraphNote, cache_path, code_version
from srm.engine.device.graph_notes import adopt, main, prune, read_notes
from srm.errors import ConfigError
from tests.kit.serving import ROOT

SHAPE = (512, "one unit a layer", b"\x00")


@dataclass
class Gpu:
    """What names of graphs depend on."""

    architecture_name: str
    label: str = "gpu"
    is_host: bool = False


def keep(folder: Path, device: Any, code: str = "", made_of: str = "") -> Path:
    """A file as `cached` leaves it, compiled for that device."""
    path = cache_path("step", SHAPE, device, folder)
    note = GraphNote("step", repr(SHAPE), code or code_version(), "somewhere", "", made_of)
    path.with_suffix(".json").write_bytes(msgspec.json.encode(note))
    path.write_bytes(code.encode() + f"{ROOT}/mojo_kernels/srm/a.mojo".encode())
    return path


def test_a_graph_of_a_gpu_is_found_by_one_of_another_name(tmp_path: Path) -> None:
    path = keep(tmp_path, Gpu("sm_90a"))
    same: Any = Gpu("sm_90")
    assert adopt(same, tmp_path) == 0
    assert len(list(tmp_path.glob("*.mef"))) == 1
    other: Any = Gpu("NVIDIA H200")
    wanted = cache_path("step", SHAPE, other, tmp_path)
    assert not wanted.exists()
    assert [adopt(other, tmp_path) for _ in range(2)] == [1, 0]
    assert wanted.samefile(path)


@pytest.mark.parametrize(
    ("code", "message"), [("", "another processor"), ("older", "from code older")]
)
def test_other_code_and_other_processors_are_refused(
    tmp_path: Path, code: str, message: str
) -> None:
    keep(tmp_path, Gpu("sm_90a"), code)
    with pytest.raises(ConfigError, match=message):
        adopt(CPU(), tmp_path)


def test_graphs_where_others_may_write_are_refused_before_any_is_read(tmp_path: Path) -> None:
    graphs = tmp_path / "open" / "graphs"
    graphs.mkdir(parents=True)
    keep(graphs, Gpu("sm_90a"))
    assert adopt(cast(Any, Gpu("sm_90")), graphs) == 0
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match=r"open: others may write there .* chmod"):
        adopt(cast(Any, Gpu("sm_90")), graphs)


def test_pruning_leaves_the_graphs_of_this_code(tmp_path: Path) -> None:
    older, current = keep(tmp_path, Gpu("sm_80"), code="older"), keep(tmp_path, Gpu("sm_90"))
    (tmp_path / "step-unknown.mef").touch()
    assert prune(tmp_path) == [current]
    assert not older.exists()
    assert {path.stem for path in tmp_path.iterdir()} == {current.stem}


def test_graphs_that_are_kept_come_back_and_say_not_where_they_were_made(tmp_path: Path) -> None:
    folder, retained, other = (tmp_path / name for name in ("graphs", "kept", "other"))
    folder.mkdir()
    keep(folder, Gpu("sm_80"), code="older", made_of="2")
    for _ in range(2):
        path = keep(folder, Gpu("sm_90a"), made_of="1")
        graph_notes.keep(folder, retained)
    assert {path.name for path in retained.iterdir()} == {"step-1.xz", "step-1.json"}
    (result,) = graph_notes.unpack(retained, other, code_version())
    data = result.read_bytes()
    assert len(data) == len(path.read_bytes()) and str(ROOT).encode() not in data
    assert data.startswith(b".//") and data.endswith(b"/mojo_kernels/srm/a.mojo")
    (note,) = read_notes(other).values()
    assert (note.made_of, note.sha256) == ("1", hashlib.sha256(data).hexdigest())
    assert adopt(cast(Any, Gpu("NVIDIA H200")), other) == 1


def test_a_folder_without_graphs_is_an_error(tmp_path: Path) -> None:
    assert main(["prune", str(tmp_path)]) == ConfigError.exit_code
    assert main(["adopt", str(tmp_path), "tpu"]) == ConfigError.exit_code
