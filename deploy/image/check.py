"""`python -m deploy.image.check`: builds the image, runs it, and checks what docs/deploy.md says.

For machines without Docker and a registry, as root: buildah builds on a Debian that `base.sh` made,
podman and runc run the result without privileges. `install.sh` installs these. Docker's own command
talks to podman's socket. Each part that fails is said; the exit status counts them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from deploy.image.podman import (
    CONTAINERS_CONF,
    CheckFailed,
    Container,
    demand,
    free_port,
    inspect,
    run,
    wait_until_ready,
)
from srm.loadtest.records import ROOT
from srm.server.supervise.launch import QUESTION

log = logging.getLogger(__name__)

NAME = f"srm-check-{os.getpid()}"
BASE, IMAGE, LOADTEST = "localhost/srm-base:trixie", "localhost/srm", "localhost/srm-loadtest"
MOST_BYTES = 10**9
"""Largest size of the image without its base, unpacked, in bytes."""
MOST_START_S = 5.0
"""Most processor seconds of a start whose graph is there: its time depends on what else
runs, and is not more than this where nothing does."""
WIDE_MODEL = """
from pathlib import Path
from srm.engine.config import ModelConfig
from srm.engine.weights.random_model import write_random_model
write_random_model(Path("/made"), ModelConfig(d_model=96, num_layers=2, num_heads=4, n_ctx=64,
    vocab_size=512, use_projections=True, decay=True, mixer="mixed", kernel_size=1))
"""
"""Writes a model whose graph the image does not have."""


class Check:
    """One run of the parts, in the order of `PARTS`."""

    def __init__(self, base: str, folder: Path) -> None:
        self.base, self.folder = base, folder

    def build(self) -> None:
        """The image and the harness are built, and add little to the base."""
        if not run("podman", "images", "--quiet", self.base).strip():
            run(str(ROOT / "deploy/image/base.sh"), self.base, timeout_s=900)
        options = ["--build-arg", f"BASE={self.base}", *self._secrets()]
        for target, tag in (("server", IMAGE), ("loadtest", LOADTEST)):
            run(
                *("buildah", "bud", "--layers", "--isolation", "chroot", "--network", "host"),
                *("--format", "docker", "--target", target, "--tag", tag, *options, str(ROOT)),
                timeout_s=3600,
            )
        sizes = {name: inspect("image", name) for name in (self.base, IMAGE, LOADTEST)}
        for tag in (IMAGE, LOADTEST):
            added = sizes[tag]["Size"] - sizes[self.base]["Size"]
            demand(added < MOST_BYTES, f"{tag} adds {added} bytes, allowed are {MOST_BYTES}")
        demand(sizes[IMAGE]["User"] == "10001:10001", "the image's user is not 10001")

    def _secrets(self) -> list[str]:
        """Return the options that give the build this machine's certificates, which it forgets."""
        bundle = os.environ.get("SSL_CERT_FILE")
        if bundle is None:
            return []
        settings = self.folder / "pip.conf"
        settings.write_text("[global]\ncert = /run/ca.pem\ntimeout = 180\n")
        return ["--secret", f"id=pip,src={settings}", "--secret", f"id=ca,src={bundle}"]

    def start(self) -> None:
        """Hardened, it answers README's curl, is healthy, and has no rights; twice, it is quick."""
        readme = (ROOT / "README.md").read_text()
        curl, reply = re.findall(r"```sh\n(curl .*?)```\n\n```json\n(.*?)```", readme, re.S)[0]
        wanted = json.loads(reply)["choices"]
        for which in ("first", "second"):
            with Container(NAME, IMAGE) as server:
                used_s = server.processor_s
                demand(used_s < MOST_START_S, f"the {which} start took {used_s:.1f} s")
                output = json.loads(run("bash", "-c", curl.replace("8000", str(server.port))))
                demand(output["choices"] == wanted, f"README's curl was answered with {output}")
                run("podman", "healthcheck", "run", server.name)
                self._has_no_rights(server)
                code = server.stop(60)
                demand(code == 0, f"exit code {code} after SIGTERM")
                demand("compiling" not in server.log, "a graph was compiled that should be there")

    def _has_no_rights(self, server: Container) -> None:
        status = dict(
            line.split(":\t", 1)
            for line in server.execute("cat", "/proc/1/status").splitlines()
            if ":\t" in line
        )
        for field, value in (("Uid", "10001"), ("CapEff", "0" * 16), ("NoNewPrivs", "1")):
            demand(status[field].split()[0] == value, f"{field} of the server is {status[field]}")
        for path in ("/opt/srm", "/opt/srm/models", "/etc"):
            writes = run("podman", "exec", server.name, "touch", f"{path}/x", can_fail=True)
            demand("Read-only file system" in writes, f"{path} can be written into: {writes}")

    def unhealthy(self) -> None:
        """HEALTHCHECK notices a server that does not answer."""
        with Container(NAME, IMAGE) as server:
            for pid in server.children("server\0api"):
                os.kill(pid, signal.SIGSTOP)
            output = run("podman", "healthcheck", "run", server.name, can_fail=True)
            demand(
                re.search("unhealthy|exceeded timeout", output) is not None,
                f"HEALTHCHECK says of a server that does not answer: {output}",
            )

    def other_model(self) -> None:
        """A model without a graph is compiled in the container, shown, and kept in the volume."""
        made, graphs = self.folder / "model", self.folder / "graphs"
        for folder in (made, graphs):
            folder.mkdir()
            os.chown(folder, 10001, 10001)
        run(
            *("podman", "run", "--rm", "--volume", f"{made}:/made", "--entrypoint", "python"),
            *("--workdir", "/opt/srm", IMAGE, "-c", WIDE_MODEL),
        )
        volumes = (
            "--volume",
            f"{made}:/made:ro",
            "--env",
            "SRM_MODEL=/made",
            "--volume",
            f"{graphs}:/var/lib/srm/graphs",
        )
        with Container(NAME, IMAGE, *volumes) as server:
            demand("compiling the step graph" in server.log, "nothing was said of the compilation")
            demand(any(graphs.glob("*.mef")), "no graph is in the volume")
        with Container(NAME, IMAGE, *volumes) as server:
            demand("compiling" not in server.log, "it was compiled again")
        with Container(
            "srm-check", IMAGE, "--volume", f"{graphs}:/var/lib/srm/graphs:ro"
        ) as server:
            demand("compiling" not in server.log, "an unwritable volume hides the image's graphs")

    def secrets(self) -> None:
        """Neither pip, nor what the build was given, nor this machine's name is left inside."""
        top = Path(run("podman", "image", "mount", IMAGE).split()[-1])
        try:
            for path in ("etc/pip.conf", "run/ca.pem", "root/.cache", "root/.config"):
                demand(not (top / path).exists(), f"/{path} is left in the image")
            paths = [str(path) for path in top.rglob("pip") if path.is_dir()]
            demand(not paths, f"pip is left in the image: {paths}")
            for path in ("etc/hostname", "etc/hosts", "etc/resolv.conf"):
                names = (top / path).read_text().split() if (top / path).exists() else []
                demand(socket.gethostname() not in names, f"/{path} names this machine")
                demand(path != "etc/resolv.conf" or not names, f"/{path} names a server")
            bill = json.loads((top / "opt/srm/sbom.cdx.json").read_text())
            installed = {component["name"].lower() for component in bill["components"]}
            demand({"max", "numpy", "uvloop"} <= installed, "the SBOM lacks packages")
        finally:
            run("podman", "image", "unmount", IMAGE)
        config = inspect("image", IMAGE)["Config"]
        demand(not re.search(r"cert|token|secret|passw|proxy", str(config["Env"]), re.I), "Env")

    def docker(self) -> None:
        """The command of docs/deploy.md, by Docker's own program through podman's socket."""
        program = shutil.which("docker")
        demand(program is not None, "there is no docker: its command is untried")
        command = re.findall(
            r"```sh run\n(docker run .*?)\n", (ROOT / "docs/deploy.md").read_text()
        )
        socket_path = f"unix://{self.folder}/podman.sock"
        with subprocess.Popen(
            ["podman", "system", "service", "--time", "0", socket_path],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as service:  # fmt: skip
            try:
                deadline = time.monotonic() + 60
                while not (self.folder / "podman.sock").exists():
                    demand(time.monotonic() < deadline, "podman's service makes no socket")
                    time.sleep(0.05)
                with subprocess.Popen(
                    command[0].split(), env={**os.environ, "DOCKER_HOST": socket_path}
                ) as client:
                    wait_until_ready(8000, lambda: client.poll() is None)
                    _answer(8000)
                    client.send_signal(signal.SIGTERM)
                    demand(client.wait(120) == 0, f"`{command[0]}` exits with {client.returncode}")
            finally:
                service.terminate()

    def compose(self) -> None:
        """Server and load of compose.yaml, by podman-compose; the report is in its folder."""
        program = shutil.which("podman-compose")
        demand(program is not None, "there is no podman-compose: compose.yaml is untried")
        project = self.folder / "project"
        project.mkdir()
        for name in ("compose.yaml", "deploy"):
            (project / name).symlink_to(ROOT / name)
        (project / "runs").mkdir()
        os.chown(project / "runs", 10001, 10001)
        port = free_port()
        variables = {"PORT": str(port), "LOAD_USER": "10001"}
        call = (
            str(program),
            "--project-name",
            "srm-check",
            "--file",
            str(project / "compose.yaml"),
        )
        try:
            run(*call, "up", "--detach", "--no-build", "server", environment=variables)
            wait_until_ready(port, lambda: True)
            _answer(port)
            run(
                *(*call, "--profile", "load", "run", "--rm", "--no-deps", "load"),
                *("loadtest", "run", "--duration-s", "5"),
                environment=variables, timeout_s=300,
            )  # fmt: skip
            report = project / "runs" / "compose" / "report.html"
            demand(report.is_file(), "the load test left no report.html")
        finally:
            run(*call, "down", "--volumes", environment=variables, can_fail=True)


def _answer(port: int) -> None:
    """Ask the server a question whose answer it knows."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(
        "POST", "/v1/completions", f'{{"prompt": {QUESTION}, "temperature": 0, "max_tokens": 64}}',
        {"Content-Type": "application/json"},
    )  # fmt: skip
    output = connection.getresponse().read().decode()
    connection.close()
    demand("#### 42" in output, f"it answers {output}")


PARTS: dict[str, Callable[[Check], None]] = {
    name: getattr(Check, name)
    for name in (
        "build",
        "start",
        "unhealthy",
        "other_model",
        "secrets",
        "docker",
        "compose",
    )
}


def main(argv: list[str]) -> int:
    """Run the parts; return how many failed."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="python -m deploy.image.check", allow_abbrev=False)
    parser.add_argument("--base", default=BASE, help="image to build on; made if it is not there")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; repeatable")
    given = parser.parse_args(argv)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="srm-check-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        settings = folder / "containers.conf"
        settings.write_text(CONTAINERS_CONF)
        os.environ["CONTAINERS_CONF"] = str(settings)
        check = Check(given.base, folder)
        for part in given.only or PARTS:
            started = time.monotonic()
            try:
                PARTS[part](check)
                outcome = "ok"
            except CheckFailed as error:
                outcome, failed = f"FAILED: {error}", failed + 1
            log.info("%s: %s (%.0f s)", part, outcome, time.monotonic() - started)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
