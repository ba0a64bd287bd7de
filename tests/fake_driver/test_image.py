"""The image's environment, user, volumes and health check on a GPU node, without an engine.

A mount namespace has the tree and Python where the image has them, and the fake driver's libraries
where NVIDIA's container toolkit mounts the host's: among the system's, and named by no variable. Of
the toolkit's devices there is nothing to see, since the fake driver opens none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.deploy.test_image import SERVER, environment
from tests.kit.fake_driver.driver import LIBRARIES, RUN_S, FakeDriver, launches_of, read_log
from tests.kit.serving import ROOT, free_port, wait_until

USER = re.findall(r"^USER (\d+):\d+$", SERVER, re.M)[0]
HEALTH = json.loads(re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", SERVER, re.M)[0])
AS_USER = (
    *("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"),
    *("--bounding-set=-all", "--no-new-privs"),
)
ENTER = r"""
set -eu
root=$1 added=$2 graphs=$3 tree=$4 venv=$5 python=$6 volumes=$7; shift 7
mount -t tmpfs -o mode=755 tmpfs "$root"
mkdir "$root/usr"
mount -t overlay overlay -o "lowerdir=$added:/usr" "$root/usr"
for name in bin lib lib64 sbin; do ln -s "usr/$name" "$root/$name"; done
show() { mkdir -p "$root$2" && mount --bind "$1" "$root$2" && mount -o remount,bind,ro "$root$2"; }
show /etc /etc; show /sys /sys
show "$tree" /opt/srm; show "$graphs" /opt/graphs; show "$venv" /opt/venv; show "$python" "$python"
mkdir -p "$root/dev/shm" "$root/proc" "$root/tmp" "$root/var/lib/srm"
mount -t tmpfs -o size=64k,mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t proc proc "$root/proc"
for name in null zero urandom; do
  touch "$root/dev/$name" && mount --bind "/dev/$name" "$root/dev/$name"
done
mount --bind "$volumes" "$root/var/lib/srm"
mount -o remount,ro "$root"
exec chroot "$root" "$@"
"""
"""As `docker run --read-only --tmpfs /tmp`, with volumes and /dev/shm of 64 KiB."""


@pytest.fixture(scope="module", autouse=True)
def _may_mount() -> None:
    tried = ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if os.geteuid() or subprocess.run(tried, check=False).returncode:
        pytest.skip("needs root and mount namespaces")


class Container:
    """A process that runs as the image's would."""

    def __init__(self, process: subprocess.Popen[str], variables: dict[str, str]) -> None:
        self.process, self._variables = process, variables
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: children.read_text().split() or process.poll() is not None)
        self.pid = int(next(iter(children.read_text().split()), "0"))

    def run(self, *command: str) -> int:
        """Run a command inside, as the image's user; return its exit code."""
        entered = ("nsenter", f"--target={self.pid}", "--mount", "--pid", "--root", "--wd=/")
        return subprocess.run(
            [*entered, *AS_USER, *command], env=self._variables, check=False
        ).returncode


@contextmanager
def container(
    where: Path, fake: FakeDriver | None, graphs: Path, **variables: str
) -> Iterator[Container]:
    """`srm serve` in the image; without a fake driver it has no libraries of a GPU."""
    graphs.chmod(0o755)
    (root := where / "root").mkdir()
    added = where / "added" / "lib" / "x86_64-linux-gnu"
    added.mkdir(parents=True)
    driver = fake.environment()["LD_LIBRARY_PATH"] if fake else ""
    for name in LIBRARIES if fake else ():
        shutil.copy(Path(driver) / name, added)
    inside = environment(SERVER) | {"SRM_GRAPHS_DIR": "/opt/graphs", "SRM_DEVICE": "gpu"}
    inside["PATH"] = f"/opt/venv/bin:{os.environ['PATH']}"
    inside |= variables
    places = (root, where / "added", graphs, ROOT, sys.prefix, sys.base_prefix, where / "volumes")
    namespaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
    command = [*namespaces, "sh", "-c", ENTER, "enter", *map(str, places), *AS_USER]
    with subprocess.Popen(
        [*command, "/opt/venv/bin/python3", "-m", "srm", "serve"],
        env=inside,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield Container(process, inside)
        finally:
            process.kill()


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A folder with the volumes, which belong to the image's user as in a new container."""
    for name in ("graphs", "data", "snapshots"):
        (tmp_path / "volumes" / name).mkdir(parents=True)
        os.chown(tmp_path / "volumes" / name, int(USER), int(USER))
    (tmp_path / "volumes" / "log").touch()
    os.chown(tmp_path / "volumes" / "log", int(USER), int(USER))
    return tmp_path


def test_the_image_serves_on_two_gpus_as_its_user_and_is_healthy(
    where: Path, fake: FakeDriver, graphs: Path
) -> None:
    port = free_port()
    variables = {"FAKE_CUDA_LOG": "/var/lib/srm/log", "FAKE_CUDA_DEVICES": "2"}
    variables |= {"SRM_PORT": f"{port}", "SRM_HOST": "127.0.0.1", "SRM_ENGINES": "2"}
    with container(where, fake, graphs, **variables) as served:
        wait_until(lambda: served.process.poll() is not None or not served.run(*HEALTH), RUN_S)
        assert served.process.poll() is None, served.process.communicate()[0]
        status = Path(f"/proc/{served.pid}/status").read_text()
        assert re.findall(r"^(?:Uid|Gid|CapBnd|NoNewPrivs):\s+(\w+)", status, re.M) == [
            *(USER, USER, "0" * 16, "1")
        ]
        body = {"prompt": "a", "n": 16, "max_tokens": 2, "ignore_eos": True}
        reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=RUN_S)
        assert reply.json()["usage"]["completion_tokens"] == 32, reply.text
        launches = launches_of(read_log(where / "volumes" / "log"))
        assert {launch["device"] for launch in launches} == {0, 1}
        assert not list((where / "volumes" / "graphs").glob("*.mef")), "nothing was compiled"
        os.kill(served.pid, 15)
        text = served.process.communicate()[0]
        assert served.process.returncode == 0, text
        assert "Serving demo on" in text


@pytest.mark.parametrize(
    ("has_driver", "owner", "reason"),
    [
        (False, int(USER), "device = gpu"),
        (True, 0, "data_dir = /var/lib/srm/data: /var/lib/srm/data cannot be written into"),
    ],
    ids=["no driver", "a volume of root's"],
)
def test_what_the_image_lacks_is_named(
    where: Path, fake: FakeDriver, graphs: Path, has_driver: bool, owner: int, reason: str
) -> None:
    os.chown(where / "volumes" / "data", owner, owner)
    with container(
        where, fake if has_driver else None, graphs, SRM_PORT=f"{free_port()}"
    ) as refused:
        text = refused.process.communicate(timeout=RUN_S)[0]
    assert refused.process.returncode == 2 and reason in text, text
