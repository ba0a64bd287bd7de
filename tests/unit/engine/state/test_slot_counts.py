"""How many slots there can be: as many as fit, unless someone said."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from max.driver import Device

from srm import memory
from srm.engine.config import EngineConfig
from srm.engine.device.state_pool import free_memory, gpu_workspace_bytes
from srm.engine.state.slot_counts import CPU_SLOTS, count_slots, slot_bytes
from srm.engine.state.slots import SlotTable
from srm.engine.state.tables import TABLE_ENTRIES
from srm.errors import ConfigError
from tests.kit.engines.numpy_runner import TINY

Available = Callable[[int], None]
SLOT = slot_bytes(TINY) + SlotTable(1, TINY.n_ctx).nbytes


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """available(2**30): let the system say that so many bytes are."""

    def set_available(num_bytes: int) -> None:
        kib = num_bytes // 1024
        text = f"MemTotal: 9 kB\nMemAvailable:   {kib} kB\nBuffers: 1 kB\n"
        (tmp_path / "meminfo").write_text(text)

    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    return set_available


def gpu_with(free_memory: int) -> Device:
    return cast(Device, SimpleNamespace(is_host=False, stats={"free_memory": free_memory}))


def test_as_many_slots_as_fit(available: Available) -> None:
    available(2**20)
    half = EngineConfig(memory_fraction=0.5, prefix_slots=100)
    assert count_slots(half, TINY) == (2**20 - 100 * slot_bytes(TINY)) // 2 // SLOT
    available(2**40)
    assert count_slots(half, TINY) == CPU_SLOTS
    assert count_slots(EngineConfig(max_slots=100), TINY) == 100
    assert count_slots(EngineConfig(num_slots=10**6), TINY) == 10**6


def test_too_many_slots_are_refused_with_numbers(available: Available) -> None:
    available(2**30)
    fitting = (2**30 - EngineConfig().prefix_slots * slot_bytes(TINY)) // SLOT
    assert count_slots(EngineConfig(num_slots=fitting), TINY) == fitting
    expected = f"num_slots = {fitting + 1} does not fit, at most {fitting} do: a slot takes {SLOT} "
    with pytest.raises(ConfigError, match=re.escape(expected)):
        count_slots(EngineConfig(num_slots=fitting + 1), TINY)
    available(0)
    with pytest.raises(ConfigError, match="at most 0 do"):
        count_slots(EngineConfig(), TINY)


def test_a_gpus_slots_are_limited_by_what_its_host_keeps(
    available: Available,
) -> None:
    config = EngineConfig(device="gpu", memory_fraction=1.0, prefix_slots=99)
    for_steps = 2 * gpu_workspace_bytes(config, TINY)
    memory = 2**30 + for_steps + 2 * TABLE_ENTRIES
    gpu = gpu_with(memory)
    on_host = SlotTable(1, TINY.n_ctx).nbytes
    fitting = (2**30 - 100 * slot_bytes(TINY)) // slot_bytes(TINY)  # a spare one besides
    available(fitting * on_host + 1024)
    assert count_slots(config, TINY, free_memory(config, TINY, gpu)) == fitting
    available(2**20)
    assert count_slots(config, TINY, free_memory(config, TINY, gpu)) == 2**20 // on_host


def test_a_gpus_host_with_too_little_memory_is_a_warning(
    available: Available, caplog: pytest.LogCaptureFixture
) -> None:
    """Machines whose memory grows as it is used say that they have little."""
    gpu = gpu_with(2**36)
    available(2**20)
    config = EngineConfig(device="gpu", num_slots=100_000)
    assert count_slots(config, TINY, free_memory(config, TINY, gpu)) == 100_000
    assert "num_slots = 100000: if every sequence fills its context" in caplog.text
    with pytest.raises(ConfigError, match="does not fit"):
        count_slots(EngineConfig(num_slots=100_000), TINY)


def test_a_gpu_keeps_room_for_two_steps(available: Available) -> None:
    available(2**40)
    config = EngineConfig(device="gpu", max_step_rows=65_536)
    model = msgspec.structs.replace(TINY, d_model=1_024, num_layers=8, vocab_size=8_192)
    bytes_of_a_token = 2 * (5 * 1_024 + 4_096 + 8_192) + 20 * 8
    assert gpu_workspace_bytes(config, model) == 2 * 65_536 * bytes_of_a_token
    gpu = gpu_with(8 * 2**30)
    message = r"0\.00 GiB are free besides prefix_slots = 1024 and two"
    with pytest.raises(ConfigError, match=message):
        count_slots(config, model, free_memory(config, model, gpu))


def test_the_limit_of_a_container_counts_as_its_memory(
    available: Available, tmp_path: Path
) -> None:
    assert memory.available_memory() > 2**28
    available(2**30)
    assert memory.available_memory() == 2**30
    for most, used, left in (("max", 4096, 2**30), (8192, 4096, 4096), (8192, 9000, 0)):
        (tmp_path / "memory.max").write_text(f"{most}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        assert memory.available_memory() == left
    for name in ("memory.max", "memory.current"):  # of cgroup v2; v1 has others
        (tmp_path / name).unlink()
    (tmp_path / "memory").mkdir()
    for bound, used, left in ((2**63 - 4096, 4096, 2**30), (8192, 4096, 4096)):
        (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{bound}\n")
        (tmp_path / "memory" / "memory.usage_in_bytes").write_text(f"{used}\n")
        assert memory.available_memory() == left
