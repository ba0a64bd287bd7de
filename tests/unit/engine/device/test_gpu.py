"""A GPU that cannot serve is refused in one line that says what to do."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest

from srm.engine.device import gpu
from srm.engine.device.runner import open_device
from srm.errors import ConfigError

NONE = """failed to create device: No supported "gpu" device available.
  CUDA information: Failed to open library "libnvidia-ml.so.1"
To get more accurate error information, set MODULAR_DEBUG=device-sync-mode.
  HIP information:  Failed to open library "libamdhip64.so": no such file"""
OLD = """failed to create device: Your current NVIDIA GPU driver version is not supported.
  Required: driver version >= 580.65
For information about how to update your driver, see https://modul.ar/gpu-requirements."""
GIB = 2**30


@dataclass
class Gpu:
    """An H200, as MAX describes one."""

    architecture_name: str = "sm_90a"
    is_compatible: bool = True
    stats: dict[str, int] = field(
        default_factory=lambda: {"free_memory": 139 * GIB, "total_memory": 140 * GIB}
    )


def answers(monkeypatch: pytest.MonkeyPatch, count: int, result: Gpu | Exception) -> None:
    """Let MAX count so many GPUs and give this one, or raise."""

    def accelerator() -> Gpu:
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(gpu, "accelerator_count", lambda: count)
    monkeypatch.setattr(gpu, "Accelerator", accelerator)


def test_a_gpu_that_can_serve_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Gpu()
    answers(monkeypatch, 1, result)
    opened: object = open_device("gpu")
    assert opened is result


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, 2, Gpu())
    with pytest.raises(ConfigError, match="devices = 2: MAX finds the GPUs 0 … 1 here"):
        open_device("gpu", 2)
    with pytest.raises(ConfigError, match="only srm serve starts several engines"):
        open_device("gpu", 0, 1)


@pytest.mark.parametrize(
    ("given", "number", "seen"), [(None, 1, "1"), (None, 0, "0"), ("5,GPU-7e", 1, "GPU-7e")]
)
def test_a_process_sees_its_own_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, given: str | None, number: int, seen: str
) -> None:
    """A graph names the first one: it did not run on any other."""
    monkeypatch.setenv(gpu.VISIBLE, given or "")  # and afterwards as it was
    if given is None:
        monkeypatch.delenv(gpu.VISIBLE)
    answers(monkeypatch, 2, Gpu())
    open_device("gpu", number)
    assert os.environ[gpu.VISIBLE] == seen


FULL = {"free_memory": 3 * GIB, "total_memory": 140 * GIB}


@pytest.mark.parametrize(
    ("count", "result", "text"),
    [
        (0, ValueError(NONE), 'no GPU here (CUDA information: Failed to open library "libnvidia'),
        (0, Gpu(), "MAX finds no GPU here; use device = cpu"),
        (0, ValueError(OLD), "the GPU's driver is too old; update it to 580.65 or newer"),
        (1, ValueError(OLD), "the GPU's driver is too old; update it to 580.65 or newer"),
        (1, ValueError("CUDA call failed: CUDA_ERROR_OUT_OF_MEMORY"), "nvidia-smi lists"),
        (1, Gpu(stats=FULL), "only 3.0 of its 140.0 GiB of memory are free; end the processes"),
        (1, Gpu("sm_70"), "architecture sm_70, and NVIDIA's from sm_80 on"),
        (1, Gpu("gfx1100", is_compatible=False), "architecture gfx1100"),
    ],
)
def test_one_that_cannot_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, count: int, result: Gpu | Exception, text: str
) -> None:
    answers(monkeypatch, count, result)
    with pytest.raises(ConfigError) as refused:
        open_device("gpu")
    message = refused.value.message
    assert text in message and message.startswith("device = gpu") and "\n" not in message
