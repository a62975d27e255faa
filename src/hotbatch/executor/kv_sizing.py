"""How large the KV cache is when nobody says: a rule a person can check by hand.

    min(a quarter of the free memory, max(512 MiB, two requests of the longest length))

A quarter leaves room for activations, the page cache under the weights and the neighbours.
512 MiB holds 23,000 tokens of the embedded model (23 kB each in bf16), 64 clients of 350
tokens, and keeps its server under 900 MB. A large model gets more, since a cache that cannot
hold two of its longest requests would run them one after the other.

Free memory is what the kernel calls available, or less where a control group of this process
sets a limit, as in a container.
"""

from __future__ import annotations

from pathlib import Path

DEFAULT_CAP_BYTES = 512 * 2**20
FREE_SHARE = 0.25

_NUMBER_BYTES = {"f32": 4, "bf16": 2, "int8": 1}


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, kv_dtype: str) -> int:
    """Bytes of one token's keys and values in all layers; int8 has an f32 scale for each head."""
    scale = 4 if kv_dtype == "int8" else 0
    return 2 * num_layers * num_kv_heads * (head_dim * _NUMBER_BYTES[kv_dtype] + scale)


def default_kv_bytes(free_bytes: int, bytes_per_token: int, max_model_len: int) -> int:
    """Bytes of the KV cache by the rule above; at least one token's."""
    wanted = max(DEFAULT_CAP_BYTES, 2 * max_model_len * bytes_per_token)
    return max(bytes_per_token, min(int(free_bytes * FREE_SHARE), wanted))


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still take, in bytes. `root` is for tests.

    Looks at /proc/meminfo and at every control group from this process's own up to the root,
    version 2 and 1; what cannot be read sets no limit.
    """
    free = [_meminfo_available(root / "proc/meminfo")]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # Inside a container the path may lead outside of what is mounted; the mount's own
        # root is then the group.
        folder = base / path.lstrip("/")
        while True:
            free += _group_free(folder, limit, usage)
            if folder == base:
                break
            folder = folder.parent
    return max(0, min(free))


def _group_free(folder: Path, limit: str, usage: str) -> list[int]:
    """What one group leaves, or nothing if it has no limit. Its file cache can be reclaimed."""
    try:
        most = int((folder / limit).read_text())
        used = int((folder / usage).read_text())
    except (OSError, ValueError):  # no such group, or the limit is "max"
        return []
    cached = 0
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            cached = int(value)
    return [most - used + cached]


def _meminfo_available(path: Path) -> int:
    for line in _lines(path):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 * 2**30  # not Linux, or no /proc: a modest guess


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
