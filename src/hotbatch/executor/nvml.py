"""What NVIDIA's management library says of a GPU, to stand beside what was measured.

Its utilisation is the share of time in which any kernel ran, however badly; that it says 100
while a tenth of the bandwidth is in use is why hotbatch measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """`bandwidth` in bytes per second is that of the data sheet: the memory's clock times the
    width of its bus, two transfers a cycle. `kernel_share` and `memory_share` (0 to 1) are the
    driver's two utilisations."""

    name: str
    bandwidth: float
    kernel_share: float
    memory_share: float
    memory_used: int
    memory_total: int
    watts: float


def read_device(index: int = 0, nvml: Any = None) -> DeviceFigures | None:
    """The figures of a GPU at this moment; None without the library, a driver or the device.

    `nvml` is the module pynvml (package nvidia-ml-py), or one that speaks like it.
    """
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = nvml.nvmlDeviceGetName(handle)
        clock = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM) * 1e6
        width = nvml.nvmlDeviceGetMemoryBusWidth(handle) / 8
        shares = nvml.nvmlDeviceGetUtilizationRates(handle)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return DeviceFigures(
            name=name.decode() if isinstance(name, bytes) else name,
            bandwidth=2.0 * clock * width,
            kernel_share=shares.gpu / 100.0,
            memory_share=shares.memory / 100.0,
            memory_used=int(memory.used),
            memory_total=int(memory.total),
            watts=nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        )
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
