"""Measuring the machine, on a CPU for real and on CUDA with a stand-in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotbatch.executor import machine
from hotbatch.executor.machine import cpu_name, hardware_name, measure_cpu, measure_cuda
from hotbatch.executor.nvml import read_device
from hotbatch.kernels import _native


@pytest.mark.parametrize("precision", ["int8", "int4", "bf16", "f32"])
def test_a_cpu_is_measured_at_every_precision(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_QUICK_MEGABYTES", 8)
    ceiling = measure_cpu(precision, threads=1)
    for figure in (ceiling.bandwidth, ceiling.compute, ceiling.attention_compute):
        assert 1e8 < figure < 1e15
    assert ceiling.origin == "measured at start"


def test_coarser_numbers_are_not_slower() -> None:
    int8 = measure_cpu("int8", threads=1)
    f32 = measure_cpu("f32", threads=1)
    assert int8.compute > 0.9 * f32.compute


@pytest.mark.parametrize("threads", [1, 2])
def test_handing_out_a_loop_takes_a_while(threads: int) -> None:
    assert 0.0 < _native.measure_loop(threads, repeats=200) < 1.0
    with pytest.raises(ValueError, match="repeats"):
        _native.measure_loop(threads, repeats=0)


def test_the_processor_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nmodel name\t: Some CPU @ 3 GHz\n")
    assert cpu_name(file) == "Some CPU @ 3 GHz"
    assert cpu_name(tmp_path / "missing")
    assert "3 threads" in hardware_name("cpu", 3)


class FakeTorch:
    """Arrays that know their size, on a machine where work takes a known time."""

    float32, bfloat16 = "float32", "bfloat16"

    def __init__(self) -> None:
        self.now = 0.0
        self.dtypes: list[str] = []
        self.cuda = SimpleNamespace(synchronize=lambda: None)

    def ones(self, *shape: int, dtype: str, device: str) -> Any:
        assert device == "cuda"
        self.dtypes.append(dtype)
        fake = self

        class Array:
            def sum(self) -> None:
                fake.now += 0.25

            def __matmul__(self, other: Any) -> None:
                fake.now += 0.5

        return Array()


def test_a_gpu_is_measured_by_reading_and_multiplying(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch()
    monkeypatch.setattr(machine.time, "perf_counter", lambda: torch.now)
    ceiling = measure_cuda("bf16", "cuda", torch=torch)
    assert ceiling.bandwidth == (1 << 30) / 0.25
    assert ceiling.compute == 2 * 8192**3 / 0.5
    assert torch.dtypes == ["float32", "bfloat16"]


class FakeNvml:
    """Speaks like pynvml."""

    NVML_CLOCK_MEM = 2

    class NVMLError(Exception):
        pass

    def __init__(self, *, has_driver: bool = True, has_device: bool = True) -> None:
        self.has_driver, self.has_device = has_driver, has_device
        self.is_open = False

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise self.NVMLError("no driver")
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if not self.has_device:
            raise self.NVMLError("no device")
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        assert kind == self.NVML_CLOCK_MEM
        return 3201

    def nvmlDeviceGetMemoryBusWidth(self, handle: int) -> int:
        return 6144

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=100, memory=35)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=100 << 30, total=141 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 512_300


def test_nvml_s_figures_stand_beside_the_measured_ones() -> None:
    nvml = FakeNvml()
    figures = read_device(0, nvml)
    assert figures is not None
    assert figures.name == "NVIDIA H200"
    assert figures.bandwidth == pytest.approx(4.917e12, rel=0.01)
    assert (figures.kernel_share, figures.memory_share) == (1.0, 0.35)
    assert figures.watts == pytest.approx(512.3)
    assert not nvml.is_open


def test_without_driver_or_device_there_are_no_figures() -> None:
    assert read_device(0, FakeNvml(has_driver=False)) is None
    nvml = FakeNvml(has_device=False)
    assert read_device(0, nvml) is None
    assert not nvml.is_open
