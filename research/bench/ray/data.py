"""`python -m research.bench.ray data`: a batch on a cluster of this machine's processes, beside
`srm batch`.

Answers the same lines by `srm batch`, by one actor, and by one actor on each of several nodes of
which one is killed with all its processes midway. Records how fast each was, and how many lines
were lost, there twice, or other than those of `srm batch`; exit code 1 if any was.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
from ray.cluster_utils import Cluster

from research.bench.ray.config import RayDataConfig
from research.bench.records.figures import ray_data
from srm.engine.config import DEMO_MODEL
from srm.loadtest.records import ROOT, new_record, settings_of, write_record
from srm.settings import load
from tests.kit.serving import free_port

AGENT_PORTS = (
    *("metrics_agent_port", "metrics_export_port"),
    *("runtime_env_agent_port", "dashboard_agent_listen_port"),
)
NAMES = ("Ava", "Ben", "Cleo", "Dan", "Eva", "Finn")


def main(argv: list[str]) -> int:
    """Do it, write a record, print its tables."""
    config = load(RayDataConfig, argv, prog="python -m research.bench.ray data")
    record = new_record(" ".join(["python -m research.bench.ray data", *argv]))
    record["settings"] = settings_of(config)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={**node(), "include_dashboard": False})
    try:
        nodes = [cluster.add_node(**node()) for _ in range(config.nodes - 1)]
        cluster.wait_for_nodes()
        os.environ["RAY_ADDRESS"] = cluster.address
        with tempfile.TemporaryDirectory(prefix="srm-ray-") as name:
            record |= measured(config, Path(name), lambda: kill_node(cluster, nodes[0]))
    finally:
        cluster.shutdown()
    write_record(record, "ray-data", "\n".join(ray_data(record)) + "\n", config.output)
    return 1 if record["lost"] + record["twice"] + record["differing"] else 0


def node() -> dict[str, Any]:
    """Return the settings of a node. A row for each shard is all that its object store holds."""
    # With ports of our choice, Ray does not wait 15 s at most for its agents to say theirs.
    ports = {name: free_port() for name in AGENT_PORTS}
    size = {"num_cpus": 1, "object_store_memory": 128 * 1024**2}
    return size | ports


def request(number: int) -> dict[str, Any]:
    """Return a line: greedy, or sampled by its number or by a seed of its own, once or twice."""
    question = f"{NAMES[number % 6]} has {number % 89 + 2} boxes with {number % 7 + 2} pears each."
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {}, {"seed": number, "n": 2}]
    return {
        "custom_id": f"line {number}",
        "prompt": f"Question: {question} How many pears is that in all?\nAnswer:",
        "max_tokens": 32,
    } | kinds[number % 3]


def measured(config: RayDataConfig, folder: Path, kill: Callable[[], None]) -> dict[str, Any]:
    """Return what each run took, and what became of the lines of those on Ray."""
    encode = msgspec.json.encode
    many, one = folder / "many.jsonl", folder / "one.jsonl"
    many.write_bytes(b"".join(encode(request(n)) + b"\n" for n in range(config.lines)))
    one.write_bytes(encode(request(0)) + b"\n")
    model = [f"--model={DEMO_MODEL}", f"--max-step-rows={config.max_step_rows}"]
    alone = [sys.executable, "-m", "srm", "batch", *model]
    actors = [sys.executable, "-m", "deploy.ray", f"--shard-lines={config.shard_lines}", *model]
    killed = folder / "killed"
    shards = -(-config.lines // config.shard_lines)
    cases = [
        case("`srm batch`", alone, one, many, folder / "alone"),
        case("Ray Data, one actor", actors, one, many, folder / "single"),
        case(
            f"{config.nodes} nodes, an actor each, one node killed",
            *([*actors, f"--actors={config.nodes}"], one, many, killed),
            waiting_for(killed, shards // config.nodes, kill),
        ),
    ]
    expected = records([folder / "alone"])
    single, after_kill = (
        records(list(path.glob("batch_*"))) for path in (folder / "single", killed)
    )
    ids = Counter(decode(line)["custom_id"] for line in after_kill.elements())
    used = [decode(line)["response"]["body"]["usage"]["completion_tokens"] for line in expected]
    return {
        "cases": cases,
        "tokens": sum(used),
        "lost": config.lines - len(ids),
        "twice": ids.total() - len(ids),
        "differing": (after_kill - expected).total() + (single - expected).total(),
    }


def decode(line: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(line)
    return decoded


def case(
    name: str,
    command: list[str],
    one: Path,
    many: Path,
    output: Path,
    meanwhile: Callable[[subprocess.Popen[bytes]], object] = lambda _: None,
) -> dict[str, Any]:
    """Return how long a command took for one line, and for all of them."""
    start_s = timed([*command, str(one), f"-o{output}-one"], lambda _: None)
    return {
        "name": name,
        "start_s": start_s,
        "seconds": timed([*command, str(many), f"-o{output}"], meanwhile),
    }


def timed(command: list[str], meanwhile: Callable[[subprocess.Popen[bytes]], object]) -> float:
    """Run a command and return how long it took. Raises CalledProcessError."""
    started = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT) as process:
        meanwhile(process)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.monotonic() - started


def waiting_for(
    output: Path, files: int, then: Callable[[], None]
) -> Callable[[subprocess.Popen[bytes]], None]:
    """Return what waits until an output has so many shards, and does something then."""

    def wait(process: subprocess.Popen[bytes]) -> None:
        while len(list(output.glob("batch_*"))) < files:
            if process.poll() is not None:
                return
            time.sleep(0.05)
        then()

    return wait


def kill_node(cluster: Any, node: Any) -> None:
    """Kill all processes of a node at once, as a power cut would."""
    for raylet in node.all_processes["raylet"]:
        process = psutil.Process(raylet.process.pid)
        for member in [process, *process.children(recursive=True)]:
            os.kill(member.pid, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


def records(paths: list[Path]) -> Counter[bytes]:
    """Count the lines of files."""
    return Counter(line for path in paths for line in path.read_bytes().splitlines())
