"""A GPU that cannot serve is refused in one line that says what to do.

`tests/fake_driver/test_opening.py` asks MAX itself, of NVIDIA's cards."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass
class Gpu:
    """One, as MAX describes it."""

    architecture_name: str = "sm_90a"
    is_compatible: bool = True


def answers(monkeypatch: pytest.MonkeyPatch, count: int, result: Gpu | Exception) -> None:
    """Let MAX count so many GPUs and give this one, or raise."""

    def accelerator() -> Gpu:
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(gpu, "accelerator_count", lambda: count)
    monkeypatch.setattr(gpu, "Accelerator", accelerator)


def test_a_gpu_by_its_number_is_of_a_server_with_several_engines() -> None:
    with pytest.raises(ConfigError, match="only srm serve starts several engines"):
        open_device("gpu", 0, 1)


@pytest.mark.parametrize(
    ("count", "result", "text"),
    [
        (0, ValueError(NONE), 'no GPU here (CUDA information: Failed to open library "libnvidia'),
        (0, Gpu(), "MAX finds no GPU here; use device = cpu"),
        (0, ValueError(OLD), "the GPU's driver is too old; update it to 580.65 or newer"),
        (1, ValueError("CUDA call failed: CUDA_ERROR_OUT_OF_MEMORY"), "nvidia-smi lists"),
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
