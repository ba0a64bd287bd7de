"""Opens a GPU, or says in one line why not and what to do.

MAX's own errors are several lines about every kind of GPU that there may be.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from contextlib import suppress

from max.driver import Accelerator, Device, accelerator_count

from srm.errors import ConfigError, DeviceRefused

log = logging.getLogger(__name__)

OLDEST = 80
"""The architecture `sm_80` of NVIDIA's GPUs: earlier ones do not multiply bfloat16."""
LEAST_FREE = 0.1
"""Least fraction of a GPU's memory that must be free; with less, other processes are meant to have
it."""
SHARED = 0.8
"""Fraction of it below which a log line says that others hold the rest."""
GIB = 2**30
END_THEM = (
    "end the processes that nvidia-smi lists, or choose another GPU with CUDA_VISIBLE_DEVICES"
)
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable that NVIDIA's driver reads once, when MAX opens the first GPU of a process."""


def open_gpu(number: int | None = None) -> Device:
    """Return the GPU of this number, or the first one. Raises ConfigError if there is none that
    could serve, and DeviceRefused if this one could not.

    A compiled graph runs on the first GPU that a process sees, and on no other: of several, this
    process sees that of this number alone from now on.
    """
    if number is not None:
        _show_only(number)
    count = 0
    try:
        count = accelerator_count()
        device = Accelerator() if count else _no_gpu()
    except (ValueError, RuntimeError) as error:
        kind = DeviceRefused if count else ConfigError
        raise kind(f"device = gpu: {_reason(str(error))}") from None
    architecture = str(device.architecture_name)
    version = re.match(r"sm_(\d+)", architecture)
    if not device.is_compatible or (version and int(version[1]) < OLDEST):
        raise ConfigError(
            f"device = gpu: this one is of architecture {architecture}, and NVIDIA's from "
            f"sm_{OLDEST} on (A100, H100, …) are supported; use device = cpu"
        )
    free, total = int(device.stats["free_memory"]), _total_memory(device)
    held = f"only {free / GIB:.1f} of its {total / GIB:.1f} GiB of memory are free"
    if free < LEAST_FREE * total:
        raise DeviceRefused(f"device = gpu: {held}; {END_THEM}")
    if free < SHARED * total:
        log.warning("device = gpu: %s; nvidia-smi lists the processes that hold the rest", held)
    return device


def _show_only(number: int) -> None:
    """Have this process see one of several GPUs. Raises ConfigError if there is none of the number.

    NVIDIA's library is asked, and not MAX: where some GPU of the machine is lost, MAX has the
    driver read VISIBLE when it counts, and every engine would open the first GPU.
    """
    given, count = os.environ.get(VISIBLE), ctypes.c_uint()
    if given is None:
        with suppress(OSError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            library.nvmlInit_v2()
            library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    numbers = (
        [*map(str, range(count.value))] if given is None else [*filter(None, given.split(","))]
    )
    if number >= len(numbers) > 0:
        raise ConfigError(f"devices = {number}: there are the GPUs 0 … {len(numbers) - 1} here")
    if len(numbers) > 1:
        os.environ[VISIBLE] = numbers[number]


def pci_address() -> str:
    """Return the PCI address of the GPU that this process has opened; empty if it is not known."""
    text = ctypes.create_string_buffer(32)
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDeviceGetPCIBusId(text, len(text), 0)
    return text.value.decode()


def _total_memory(device: Device) -> int:
    """Return the bytes that the GPU has. MAX knows those that its memory manager may take."""
    size = ctypes.c_size_t()
    with suppress(OSError):
        if ctypes.CDLL("libcuda.so.1").cuDeviceTotalMem_v2(ctypes.byref(size), 0) == 0:
            return size.value
    return int(device.stats["total_memory"])


def _no_gpu() -> Device:
    """Have MAX say why it counts none, but where the driver is well and shows none: there MAX 26.7
    dies of it."""
    with suppress(OSError):
        if ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2() == 0:
            shown = os.environ.get(VISIBLE)
            why = "the driver shows none" if shown is None else f"{VISIBLE} = {shown!r}"
            raise ConfigError(f"device = gpu, but there is no GPU here ({why}); use device = cpu")
    Accelerator()
    raise ConfigError("device = gpu, but MAX finds no GPU here; use device = cpu")


def _reason(message: str) -> str:
    """Return of MAX's error what a user can do something about."""
    if "driver version is not supported" in message:
        wanted = re.search(r"driver version >= *([\w.]+)", message)
        least = f" to {wanted[1]} or newer" if wanted else ""
        return f"the GPU's driver is too old; update it{least}, or use device = cpu"
    if "OUT_OF_MEMORY" in message or "out of memory" in message:
        return f"its memory is in use; {END_THEM}"
    if match := re.search(r"(\d+) uncorrectable ECC error", message):
        return (
            f"its memory has had {match[0]}s, so that results may be wrong; reset it "
            "(nvidia-smi --gpu-reset) or choose another GPU with CUDA_VISIBLE_DEVICES"
        )
    if match := re.search(r"HW (Slowdown|Thermal Slowdown|Power Brake)", message):
        return (
            f"it is throttled at this moment ({match[0]}), as a GPU is that is too hot or short of "
            "power; see nvidia-smi -q -d PERFORMANCE, or use it all the same with "
            "MODULAR_DEVICE_CONTEXT_DISABLE_HEALTHCHECK=true"
        )
    first = next((line.strip() for line in message.splitlines() if "CUDA information" in line), "")
    seen = first or message.splitlines()[0] if message else "no reason given"
    return (
        f"MAX finds no GPU here ({seen}); if nvidia-smi lists one, look whether this process may "
        "see it (container, CUDA_VISIBLE_DEVICES), else use device = cpu"
    )
