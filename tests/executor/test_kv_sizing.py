"""The KV cache's default size, on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotbatch.executor.kv_sizing import (
    DEFAULT_CAP_BYTES,
    default_kv_bytes,
    free_memory_bytes,
    kv_bytes_per_token,
)

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def meminfo(available: int) -> str:
    return f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n"


def test_plain_machine(tmp_path: Path) -> None:
    assert free_memory_bytes(write(tmp_path, {"proc/meminfo": meminfo(8 * GIB)})) == 8 * GIB


def test_no_proc_is_a_modest_guess(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path) == 4 * GIB


def test_group_version_2_with_reclaimable_cache(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": meminfo(8 * GIB),
            "proc/self/cgroup": "0::/app\n",
            "sys/fs/cgroup/app/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/app/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/app/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
        },
    )
    assert free_memory_bytes(tmp_path) == GIB + GIB // 2


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": meminfo(8 * GIB),
            "proc/self/cgroup": "0::/slice/app\n",
            "sys/fs/cgroup/slice/app/memory.max": "max\n",
            "sys/fs/cgroup/slice/app/memory.current": "1\n",
            "sys/fs/cgroup/slice/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/slice/memory.current": "0\n",
        },
    )
    assert free_memory_bytes(tmp_path) == GIB


def test_container_whose_path_is_not_mounted(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": meminfo(8 * GIB),
            "proc/self/cgroup": "4:cpu:/x\n3:memory:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{4 * GIB}",
        },
    )
    assert free_memory_bytes(tmp_path) == 0


@pytest.mark.parametrize(
    ("free", "per_token", "length", "expected"),
    [
        (24 * GIB, 23040, 8192, DEFAULT_CAP_BYTES),  # the embedded model
        (GIB, 23040, 8192, GIB // 4),  # a small machine
        (64 * GIB, 131072, 32768, 2 * 32768 * 131072),  # an 8B model: two longest requests
        (0, 23040, 8192, 23040),  # nothing free: the executor says what is wrong
    ],
)
def test_rule(free: int, per_token: int, length: int, expected: int) -> None:
    assert default_kv_bytes(free, per_token, length) == expected


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", 23040), ("f32", 46080), ("int8", 12240)])
def test_a_token_of_the_embedded_model(dtype: str, expected: int) -> None:
    assert kv_bytes_per_token(30, 3, 64, dtype) == expected
