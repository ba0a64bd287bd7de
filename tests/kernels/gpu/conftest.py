"""The graphs that are kept compiled, under the names that an H100 or H200 looks for."""

from __future__ import annotations

from pathlib import Path

import pytest
from max.driver import accelerator_count

from srm.engine.device.graph_cache import code_version
from srm.engine.device.graph_notes import adopt, unpack
from srm.engine.device.runner import open_device
from srm.loadtest.records import ROOT
from tests.kit.kept import cache_folder

KEPT = ROOT / "deploy" / "gpu" / "kept"


@pytest.fixture(scope="session")
def kept_graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if accelerator_count() == 0:
        pytest.skip("no device")
    device = open_device("gpu")
    if not str(device.architecture_name).startswith("sm_90"):
        pytest.skip("they are for sm_90")
    if not KEPT.exists():  # the kit has unpacked and adopted them
        return cache_folder()
    folder = tmp_path_factory.mktemp("graphs")
    unpack(KEPT, folder, code_version())
    adopt(device, folder)
    return folder
