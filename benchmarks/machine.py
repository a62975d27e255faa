"""What a figure must be printed with: the machine, the versions, the settings."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path

from hotbatch.executor.cpu_executor import usable_cpus
from hotbatch.kernels import _native


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe(**settings: object) -> str:
    """One line a fact; `settings` are what the command was run with."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("hotbatch", "numpy", "torch"))
    lines = [
        f"machine   {cpu_model()}, {usable_cpus()} CPUs, {_native.best_isa()}, "
        f"{platform.system()} {platform.release()}",
        f"versions  Python {sys.version.split()[0]}, {versions}",
        "settings  " + ", ".join(f"{name} {value}" for name, value in settings.items()),
    ]
    return "\n".join(lines)


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"
