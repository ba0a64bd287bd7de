"""The fake driver, built once, and the graphs that are kept, under the names looked for on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from srm.engine.device.graph_cache import code_version
from srm.engine.device.graph_notes import unpack
from tests.kit.fake_driver.driver import FakeDriver, build
from tests.kit.serving import ROOT

KEPT = ROOT / "deploy" / "gpu" / "kept"


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver(build(tmp_path_factory.mktemp("driver")))


@pytest.fixture(scope="session")
def graphs(fake: FakeDriver, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kept graphs, taken for those of this code: tests/kernels/gpu/test_kept_graphs.py says if
    not."""
    folder = tmp_path_factory.mktemp("graphs")
    unpack(KEPT, folder, code_version())
    subprocess.run(
        [sys.executable, "-m", "srm.engine.device.graph_notes", "adopt", str(folder), "gpu"],
        cwd=ROOT,
        env=os.environ | fake.environment(),
        check=True,
    )
    return folder
