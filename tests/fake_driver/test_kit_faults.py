"""What the kit's results hold of a card that is refused, a product that is wrong and a step that
never ends: enough to mend them from afar."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.fake_driver.driver import FakeDriver
from tests.kit.serving import ROOT

CALL = """
import sys
from dataclasses import replace
from pathlib import Path
from deploy.gpu import run
from deploy.gpu.calls import GPU, SIZES, calls

results, graphs = Path(sys.argv[1]), sys.argv[2]
sizes = SIZES["gpu"] = replace(
    GPU, widths=(512,), first_rows=(2,), first_steps=(256,), first_seconds=0.01, op_seconds=0.001
)
run.wrong_products, judged = (lambda *_: []), run.wrong_products
parts = {one.name: one for one in calls(sizes, graphs)[1]}
wanted = [parts[name] for name in ("opening", "adopt", "products 512")]
call = run.Call(1, "gpu", results, graphs, float("inf"))
call.run([*wanted, replace(parts["decode 512"], attempt_s=4)])
(results / "wrong").write_text("\\n".join(judged("products 512", call._lines_of(wanted[2]))))
"""


@pytest.mark.slow
def test_results_say_what_happened_and_where(
    fake: FakeDriver, graphs: Path, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    never = f"cuEventSynchronize#2~{tmp_path / 'never'}"
    subprocess.run(
        [sys.executable, "-c", CALL, str(results), str(graphs)],
        cwd=ROOT,
        env=os.environ | fake.environment(throttle=0x8, fail=never),
        check=True,
    )
    lines = [json.loads(line) for line in (results / "call-1.jsonl").read_bytes().splitlines()]
    entries = {(line["part"], line["key"]): line for line in lines if not line.get("begun")}

    refused, opened = entries["opening", "as it is"], entries["opening", "health check off"]
    assert not refused["ok"] and "throttled at this moment (HW Slowdown)" in refused["said"]
    assert opened["ok"] and opened["environment"].popitem()[1] == "true"

    up = entries["products 512", "up 2"]  # nothing is computed
    assert (
        not up["ok"] and up["wrong"]["of"] == 2 * 2048 and set(up["wrong"]["by_row"]) == {"0", "1"}
    )
    row, column, got, expected = up["wrong"]["first"][0]
    assert (row, column) == (0, 0) and got != expected
    assert "products 512: up 2" in (results / "wrong").read_text().splitlines()

    hung, log = entries["decode 512", "256 rows"], (results / "call-1.log").read_text()
    assert hung["died"].startswith("exit 1") and "Timeout (0:00:04)!" in log
    assert "in wait" in log.partition("Timeout")[2], "the traceback of who waits"
    again = [line["part"] for line in lines if "again" in line["part"]]
    assert again[0] == "decode 512 again: 256 rows", "in the synchronous mode"
    assert entries["decode 512", "256 rows, top-p 0.9"]["died"], (
        "the next had its turn, and its fate"
    )
