"""Measuring the machine's best: bytes read and operations done per second, and its name.

On a CPU with the native kernels' own loops, that do nothing else (kernels/ceiling); on CUDA with
torch: a large array summed, a large matrix product. The quick form takes a tenth of a second and
is good enough to start with; the full one repeats until a neighbour's noise has passed.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from hotbatch.engine.ceiling import Ceiling

_QUICK_MEGABYTES, _FULL_MEGABYTES = 128, 256  # more than caches hold: 64 on two chips of a server
_QUICK_REPEATS, _FULL_REPEATS = 3, 40
_CUDA_BYTES = 1 << 30
_CUDA_SIZE = 8192  # of the square matrices


def measure_cpu(precision: str, threads: int, *, full: bool = False) -> Ceiling:
    """Args: `precision` of the weights, `threads` that the model runs on."""
    from hotbatch.kernels import _native

    isa = _native.best_isa()
    megabytes = _FULL_MEGABYTES if full else _QUICK_MEGABYTES
    repeats = _FULL_REPEATS if full else _QUICK_REPEATS
    products = "int8" if precision in ("int8", "int4") else precision
    attention = "f32" if precision == "f32" else "bf16"
    return Ceiling(
        bandwidth=_native.measure_read_bandwidth(megabytes, threads, isa, repeats),
        compute=_native.measure_compute(products, threads, isa, 2 * repeats),
        attention_compute=_native.measure_compute(attention, threads, isa, 2 * repeats),
        origin=_origin(full),
    )


def measure_cuda(precision: str, device: str, *, full: bool = False, torch: Any = None) -> Ceiling:
    """The same on a GPU. `torch` is for tests."""
    if torch is None:
        torch = import_module("torch")
    repeats = 20 if full else 5
    dtype = torch.float32 if precision == "f32" else torch.bfloat16
    data = torch.ones(_CUDA_BYTES // 4, dtype=torch.float32, device=device)
    reading = _best_cuda_seconds(torch, lambda: data.sum(), repeats)
    a = torch.ones(_CUDA_SIZE, _CUDA_SIZE, dtype=dtype, device=device)
    computing = _best_cuda_seconds(torch, lambda: a @ a, repeats)
    compute = 2.0 * _CUDA_SIZE**3 / computing
    return Ceiling(
        bandwidth=_CUDA_BYTES / reading,
        compute=compute,
        attention_compute=compute,
        origin=_origin(full),
    )


def _best_cuda_seconds(torch: Any, work: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for repeat in range(repeats + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if repeat:  # the first loads kernels
            best = min(best, time.perf_counter() - started)
    return best


def _origin(full: bool) -> str:
    return "measured by tune" if full else "measured at start"


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def hardware_name(device: str, threads: int) -> str:
    """What a measurement is valid for: the processor, what it can do, and how much of it."""
    if device == "cpu":
        from hotbatch.kernels import _native

        return f"{cpu_name()}, {_native.best_isa()}, {threads} threads"
    import torch

    facts = torch.cuda.get_device_properties(torch.device(device))
    return f"{facts.name}, {facts.total_memory >> 20} MiB"
