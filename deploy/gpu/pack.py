"""`python -m deploy.gpu.pack`: what every call carries to a GPU machine without MAX.

Writes build/gpu-kit/gpu: `run.sh` beside archives of the source tree with what torch's figures need
besides torch, of MAX's runtime without its compiler, and of the compiled graphs. Says how large
they are; more than `MOST_MIB` fails.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deploy.gpu.graphs import OF_CALLS

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("requirements/serve.lock", "requirements/loadtest.lock", "requirements/dev.lock")
KEPT = ROOT / "deploy" / "gpu" / "kept"
"""Graphs that are kept compiled: those that are of this code are not compiled again."""
MOST_MIB = 62
"""Most MiB that a call may carry. MAX's libraries alone compress to 39, most of it libmax and
libMGPRT, and the bundled models to 10."""
LEFT_OUT = (
    "models/demo-grpo",
    "models/regex/[!d]*",  # all but the tasks that it is asked
    "models/*/*.svg",
    "models/*/losses.json",
    "docs",
    "requirements/*.lock",
    "deploy/image",
    "deploy/gpu/kept",
    "deploy/kubernetes",
    "research/experiments/[bgimrs]*.py",  # all but throughput, coverage, and what it imports
    "research/experiments/c[ao]p*.py",
    "research/records",
    "tests/browser",
    "tests/clients",
    "tests/conformance",
    "tests/integration",
    "tests/property",
    "tests/unit",
)
"""Parts of the source tree that no call reads."""
SMALL = (
    *("msgspec", "fastapi", "starlette", "uvicorn", "httptools", "pyzmq", "google-re2"),
    *("zstandard", "pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    *("python-multipart", "opentelemetry-api", "annotated-doc", "typing-extensions", "anyio"),
    *("h11", "httpx", "httpcore", "llguidance"),
    *("jsonschema", "jsonschema-specifications", "referencing", "rpds-py", "attrs"),
)
"""Packages that calls need, those of the server among them; of others the machine has its own."""
MAX = ("max", "max-core", "max-shmem-libs", "mojo-compiler", "exceptiongroup", "taskgroup")
LIBRARIES = (
    *("libmax", "libMGPRT", "libAsyncRTMojoBindings", "libAsyncRTRuntimeGlobals"),
    *("libKGENCompilerRTShared", "libMSupportGlobals", "libmax_profiler_shim", "libnixl"),
)
"""MAX's libraries that run a compiled graph. Mojo's compiler, the debugger and the assembler of
PTX, libNVPTX, are left out: a compiled graph holds machine code and needs none of them."""
UNUSED = ("pipelines", "serve", "benchmark", "_entrypoints", "nn", "experimental", "include")
"""Parts of the Python package `max` that are left out."""
XZ = ["xz", "--threads=2", "--block-size=116MiB", "--x86", "--lzma2=preset=4,dict=128MiB"]
"""Half of MAX's runtime for each of two cores: what is in more blocks than one is packed twice."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]


def fetch(packages: Sequence[str], site: Path, python_version: str) -> None:
    """Put packages of the locks' versions, for that Python, side by side into a new folder."""
    pins = "\n".join((ROOT / name).read_text() for name in LOCKS)
    names = [rf"^{package.replace('-', '[-_]')}==[^ \n]+" for package in packages]
    results = [re.search(name, pins, re.MULTILINE | re.IGNORECASE) for name in names]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-compile"),
            *("--disable-pip-version-check", "--only-binary=:all:", f"--target={site}"),
            *("--implementation=cp", f"--python-version={python_version}"),
            *(f"--platform={platform}" for platform in PLATFORMS),
            *(wheel[0] if wheel else name for wheel, name in zip(results, packages, strict=True)),
        ],
        check=True,
    )


def slim(site: Path) -> None:
    """Leave of MAX what runs a compiled graph."""
    libraries = site / "modular" / "lib"
    for path in (site / "modular").iterdir():
        if path != libraries:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    members = {f"{name}.so" for name in LIBRARIES}
    for path in libraries.iterdir():
        if path.name not in members:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in UNUSED:
        shutil.rmtree(site / "max" / name)
    # The SDK's root is found by this file, which is never run.
    (site / "modular" / "bin").mkdir()
    (site / "modular" / "bin" / "mojo").touch(0o755)


def put_tree(into: Path) -> None:
    """Put the source tree of HEAD there, and which commit that is."""
    left_out = [f":!{pattern}" for pattern in LEFT_OUT]
    archive = subprocess.run(
        ["git", "archive", "HEAD", "--", ".", *left_out], cwd=ROOT, check=True, capture_output=True
    ).stdout
    into.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", into], input=archive, check=True)
    (into / "COMMIT").write_text(_git("rev-parse", "--short", "HEAD"))


def compress(folder: Path, archive: Path) -> None:
    """Archive what a folder holds, without what Python compiled. The largest files come first:
    much of libMGPRT's code is at the end of libmax's too."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    paths.sort(key=lambda path: (-(path.lstat().st_size >> 24), path))
    names = [str(path.relative_to(folder)) for path in paths]
    # Root, who unpacks them, is refused graphs that another user may write.
    owner = ["--owner=0", "--group=0", "--mode=go-w"]
    tar = ["tar", "-C", str(folder), *owner, "--no-recursion", "-c", *names]
    with archive.open("wb") as file, subprocess.Popen(tar, stdout=subprocess.PIPE) as packing:
        subprocess.run(XZ, stdin=packing.stdout, stdout=file, check=True)
    if packing.returncode:
        raise SystemExit(f"tar of {folder} failed")


def pack_runtime(work: Path, archive: Path, python_version: str) -> None:
    """Archive MAX's runtime, unless it is there: it stays the same until MAX is another."""
    if archive.exists():
        return
    sys.stdout.write("compressing MAX's runtime: one to two minutes of two cores, once\n")
    sys.stdout.flush()
    fetch(MAX, work / "site", python_version)
    slim(work / "site")
    compress(work, partial := archive.with_suffix(".partial"))
    partial.replace(archive)


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def pack(folder: Path, python_version: str, graphs: Path) -> int:
    """Write what a call carries; return 1 if it is too large."""
    runtime = folder.parent / f"max-{_pinned('max')}-python-{python_version}.tar.xz"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as beside:
        work = Path(name)
        packed = beside.submit(pack_runtime, work / "max", runtime, python_version)
        fetch(SMALL, work / "tree" / "site", python_version)
        put_tree(work / "tree" / "source")
        graphs_copy = work / "graphs" / "graphs"
        shutil.copytree(graphs, graphs_copy, ignore=shutil.ignore_patterns("*.lock", "*.partial"))
        for each in ("tree", "graphs"):
            compress(work / each, folder / f"{each}.tar.xz")
        packed.result()
    shutil.copy(runtime, folder)
    shutil.copy(ROOT / "deploy" / "gpu" / "run.sh", folder)
    sizes = {path.name: path.stat().st_size / 2**20 for path in sorted(folder.iterdir())}
    kit = sum(sizes.values())
    text = ", ".join(f"{name} {size:.1f}" for name, size in sizes.items())
    sys.stdout.write(f"{folder}: {kit:.1f} MiB, at most {MOST_MIB} ({text})\n")
    return int(kit > MOST_MIB)


def _pinned(package: str) -> str:
    pins = (ROOT / LOCKS[0]).read_text()
    match = re.search(rf"^{package}==([^ \n;]+)", pins, re.MULTILINE)
    return match[1] if match else "unpinned"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.gpu.pack", allow_abbrev=False)
    parser.add_argument("--python-version", default="3.12", help="of the machine")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu-kit")
    parser.add_argument("--call", choices=OF_CALLS, help="one that needs other graphs, alone")
    parser.add_argument("--graphs", type=Path, help="folder of graphs compiled before")
    given = parser.parse_args(argv)
    if _git("status", "--porcelain", "--untracked-files=no"):
        sys.stderr.write("Commit your changes first: the kit holds HEAD, and graphs of that.\n")
        return 2
    of_call = ["--call", given.call] if given.call else []
    graphs = given.graphs or given.output / "-".join(["graphs-gpu", *of_call[1:]])
    notes = "srm.engine.device.graph_notes"
    compiled = ["deploy.gpu.graphs", "--output", str(graphs), *of_call]
    for module in (
        [notes, "unpack", str(KEPT), str(graphs)],
        compiled,
        [notes, "prune", str(graphs)],
    ):
        if status := subprocess.run([sys.executable, "-m", *module], check=False).returncode:
            return status
    return pack(given.output / "gpu", given.python_version, graphs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
