"""A batch on a Ray cluster of this machine's processes, of which a node is killed midway.

Arguments: the root of the source tree, the number of shards at which the node is killed, the folder
of results, and those of `python -m deploy.ray`. The node ends with all its processes at once, as by
a power cut.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

root, shards, output, *arguments = sys.argv[1:]
os.environ |= {"PYTHONPATH": root, "RAY_USAGE_STATS_ENABLED": "0"}  # of Ray's workers too

import psutil  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 128 * 1024**2}
cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
try:
    node = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    os.environ["RAY_ADDRESS"] = cluster.address
    command = [sys.executable, "-m", "deploy.ray", *arguments, f"-o{output}", "--actors=2"]
    with subprocess.Popen(command, cwd=root) as batch:
        while batch.poll() is None and len([*Path(output).glob("batch_*")]) < int(shards):
            time.sleep(0.05)
        if batch.poll() is not None:
            raise SystemExit("the batch ended before the node was killed")
        for raylet in node.all_processes["raylet"]:
            process = psutil.Process(raylet.process.pid)
            for member in [process, *process.children(recursive=True)]:
                os.kill(member.pid, signal.SIGKILL)
        cluster.remove_node(node, allow_graceful=False)
    sys.exit(batch.returncode)
finally:
    cluster.shutdown()
