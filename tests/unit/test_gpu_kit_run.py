"""`run.sh` of the kit, with archives that hold next to nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from deploy.gpu.pack import compress
from tests.kit.serving import ROOT

PROGRAM = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[2]).mkdir(exist_ok=True)
found = {"argv": sys.argv[1:], "at": os.getcwd(), "path": os.environ["PYTHONPATH"], "is": IS}
found["graphs"] = os.environ["SRM_CACHE_DIR"]
sys.stdout.write(json.dumps(found | {"python": sys.executable}))
"""


def as_another(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """As a normal user packs it."""
    member.uid = member.gid = 1000
    return member


class Kit:
    """A folder that was packed, whose program says what it was given."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.results = folder / "kit", folder / "results"
        self.place = folder / "not" / "there"
        self.folder.mkdir()
        shutil.copy(ROOT / "deploy" / "gpu" / "run.sh", self.folder)
        self.pack("first")

    def pack(self, program: str) -> None:
        source = self.folder.parent / "source"
        (source / "deploy" / "gpu").mkdir(parents=True, exist_ok=True)
        for folder in ("deploy", "deploy/gpu"):  # else an installed tree's package is found first
            (source / folder / "__init__.py").touch()
        (source / "deploy" / "gpu" / "run.py").write_text(PROGRAM.replace("IS", repr(program)))
        version = "{}.{}".format(*sys.version_info)
        with tarfile.open(self.folder / f"max-1-python-{version}.tar.xz", "w:xz"):
            pass
        with tarfile.open(self.folder / "tree.tar.xz", "w:xz") as archive:
            archive.add(source, "source", filter=as_another)

    def run(self, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {"KIT_PLACE": str(self.place), "PYTHON": sys.executable, **environment}
        return subprocess.run(
            ["bash", str(self.folder / "run.sh"), "1", str(self.results), *more],
            env=os.environ | variables,
            capture_output=True,
            check=False,
            text=True,
        )

    def refused(self) -> str:
        end = json.loads((self.results / "call-1.jsonl").read_text())
        assert end["name"] == "unpack" and end["exit"] == 2
        return str(end["last"])


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


def test_a_call_runs_in_a_place_that_was_not_there(kit: Kit) -> None:
    done = kit.run("gpu", "serve", PYTHONPATH="/theirs")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["argv"][:2] == ["deploy/gpu/call-1.txt", str(kit.results)]
    assert document["is"] == "first" and document["argv"][-1] == "--only=serve"
    at = Path(document["at"])
    assert str(at).startswith(str(kit.place)) and at.name == "source"
    assert document["path"] == f"{at.parent / 'site'}:/theirs", "the machine's behind the kit's"
    assert document["graphs"] == str(at.parent / "graphs")
    for path in (kit.place, *at.rglob("*")):  # it belongs to who unpacks it
        assert path.stat().st_uid == os.geteuid() and not path.stat().st_mode & 0o022


def test_graphs_are_packed_as_roots_for_root_alone_to_write(tmp_path: Path) -> None:
    graph = tmp_path / "graphs" / "a.mef"
    graph.parent.mkdir()
    graph.touch()
    graph.chmod(0o666)
    (tmp_path / "models").symlink_to("left-out")  # as srm/models of a tree without them
    compress(tmp_path, tmp_path.with_suffix(".tar.xz"))
    with tarfile.open(tmp_path.with_suffix(".tar.xz")) as archive:
        assert {(stream.name, stream.uid, stream.gid) for stream in archive} >= {
            ("graphs/a.mef", 0, 0),
            ("models", 0, 0),
        }
        assert not any(stream.mode & 0o022 for stream in archive if not stream.issym())


def test_an_archive_that_cannot_be_unpacked_ends_the_call_and_says_so(kit: Kit) -> None:
    whole = (kit.folder / "tree.tar.xz").read_bytes()
    (kit.folder / "tree.tar.xz").write_bytes(whole[:-20])
    for _ in range(2):  # what is half unpacked is not taken for whole
        done = kit.run()
        assert done.returncode == 2 and not done.stdout
        assert "tree.tar.xz cannot be unpacked" in done.stderr
        assert "tree.tar.xz cannot be unpacked" in kit.refused()
        (kit.results / "call-1.jsonl").unlink()
    (kit.folder / "tree.tar.xz").write_bytes(whole)
    assert kit.run().returncode == 0


def test_a_call_finds_the_unpacked_kit_and_a_new_one_beside_it(kit: Kit) -> None:
    first = json.loads(kit.run(PYTHONPATH="").stdout)
    assert first["path"].endswith("/site")
    at = Path(first["at"])
    (at / "left").touch()
    assert json.loads(kit.run().stdout)["at"] == str(at) and (at / "left").exists()
    kit.pack("mended")
    mended = json.loads(kit.run().stdout)
    assert mended["is"] == "mended" and mended["at"] != str(at)


def pythons(folder: Path, **versions: str) -> str:
    """A PATH whose programs of these names say that they are of that version, or run."""
    folder.mkdir()
    for name, version in versions.items():
        says = f"echo {version} /none" if version else f'exec {sys.executable} "$@"'
        (folder / name).write_text(f"#!/bin/sh\n{says}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_the_first_python_of_the_kits_version_runs_it(kit: Kit, tmp_path: Path) -> None:
    named = "python{}.{}".format(*sys.version_info)
    path = pythons(tmp_path / "bin", **{"python3": "3.1", named: ""})
    for other in ("", "python3", "/no/such/python"):
        done = kit.run(PATH=path, PYTHON=other)
        assert Path(json.loads(done.stdout)["python"]).samefile(sys.executable), done.stderr


def test_another_python_ends_the_call_before_anything_is_unpacked(kit: Kit, tmp_path: Path) -> None:
    (runtime,) = kit.folder.glob("max-*")
    runtime.rename(kit.folder / "max-1-python-3.99.tar.xz")
    assert kit.run(PATH=pythons(tmp_path / "bin", python3="3.9")).returncode == 2
    assert kit.refused().startswith("no Python 3.99 here") and not kit.place.exists()


def test_a_place_that_cannot_be_made_ends_the_call_and_says_so(kit: Kit, tmp_path: Path) -> None:
    (tmp_path / "not").write_text("a file")
    assert kit.run().returncode == 2
    assert kit.refused().startswith("cannot make")
