"""Attention over a paged cache against its roofline and against torch, with real models' heads.

Decode steps of some rows at some context, prompts, a prefix shared by all rows, and a step that
mixes a prompt chunk with decodes. For each: the time of one layer, keys and values read a second,
operations a second, and the share of the roofline, which is the larger of the bytes at the
measured bandwidth and the operations at the measured compute, both measured in the same run.
Repeats go through as many layers as fit in memory, so that keys are as cold as in a model.
torch runs `scaled_dot_product_attention` in bf16, a sequence at a time, on contiguous keys.

    python benchmarks/kernels/attention.py [--models smollm2-135m,llama-8b]
        [--kv-dtype bf16] [--threads 2] [--no-torch]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import describe

from hotbatch.executor.cpu_executor import usable_cpus
from hotbatch.kernels import _native
from hotbatch.models.presets import PRESETS

BLOCK = 16
CACHE_BUDGET = 400e6  # bytes
NUMBER_BYTES = {"f32": 4, "bf16": 2, "int8": 1}


@dataclass(frozen=True)
class Case:
    """Sequences as (first, end) positions of their new rows; all share the first tokens."""

    name: str
    parts: tuple[tuple[int, int], ...]
    shared: int = 0

    @property
    def score_count(self) -> int:
        """Pairs of a query row and a key it sees."""
        return sum((first + 1 + end) * (end - first) // 2 for first, end in self.parts)

    @property
    def key_count(self) -> int:
        """Keys that have to be read at least once."""
        return self.shared + sum(end - self.shared for _, end in self.parts)


def cases() -> list[Case]:
    decodes = [(1, 128), (1, 1024), (1, 4096), (16, 256), (64, 256), (32, 1024)]
    return [
        *(Case(f"decode {n} x {c}", ((c - 1, c),) * n) for n, c in decodes),
        Case("decode 32 x 1024, 768 shared", ((1023, 1024),) * 32, shared=768),
        Case("prompt 128", ((0, 128),)),
        Case("prompt 512", ((0, 512),)),
        Case("prompt 2048", ((0, 2048),)),
        *(Case(f"chunk {n} at 2048", ((2048, 2048 + n),)) for n in (8, 16, 24, 32, 64, 128, 512)),
        Case("decode 8 x 512, chunk 24 at 2048", (((511, 512),) * 8) + ((2048, 2072),)),
        Case("decode 32 x 512, chunk 256 at 768", (((511, 512),) * 32) + ((768, 1024),)),
    ]


class NativeStep:
    """One case's step over a cache of several layers, at scattered blocks."""

    def __init__(
        self, case: Case, q_heads: int, kv_heads: int, dim: int, dtype: str, threads: int
    ) -> None:
        layout = _native.KvLayout(dtype, kv_heads, dim, BLOCK)
        counts = [-(-end // BLOCK) for _, end in case.parts]
        ids = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
        table = np.zeros((len(counts), max(counts)), np.int32)
        for row, chunk in zip(table, np.split(ids, np.cumsum(counts)[:-1]), strict=True):
            row[: len(chunk)] = chunk
        table[:, : case.shared // BLOCK] = table[0, : case.shared // BLOCK]
        positions = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in case.parts])
        starts = np.cumsum([0, *(b - a for a, b in case.parts)]).astype(np.int32)
        self._step = _native.AttentionStep(layout, q_heads, 0, threads, positions, starts, table)
        layer_bytes = layout.block_bytes * sum(counts)
        self._layers = max(1, int(CACHE_BUDGET / layer_bytes))
        self._cache = np.full(layer_bytes * self._layers, 60, np.uint8)
        head_bytes = dim * NUMBER_BYTES[dtype] + (16 if dtype == "int8" else 0)
        self._q = np.full((len(positions), q_heads * head_bytes), 60, np.uint8)
        self._scale, self._threads = dim**-0.5, threads
        self.bytes_read = case.key_count * layout.block_bytes / BLOCK

    def seconds(self, budget: float) -> float:
        """Best seconds of one layer."""
        repeats = min(self._layers, 200)
        best, until, runs = float("inf"), time.perf_counter() + budget, 0
        while time.perf_counter() < until or runs < 3:
            start = time.perf_counter()
            self._step.run(
                _native.best_isa(),
                self._threads,
                self._q,
                self._cache,
                self._scale,
                repeats,
                self._layers,
            )
            best = min(best, (time.perf_counter() - start) / repeats)
            runs += 1
        return best


def torch_seconds(
    case: Case, q_heads: int, kv_heads: int, dim: int, threads: int, budget: float
) -> float:
    import torch

    torch.set_num_threads(threads)
    inputs = []
    for first, end in case.parts:
        q = torch.randn(1, q_heads, end - first, dim, dtype=torch.bfloat16)
        k, v = (torch.randn(1, kv_heads, end, dim, dtype=torch.bfloat16) for _ in range(2))
        hidden = None
        if end - first > 1:
            hidden = torch.ones(end - first, end, dtype=torch.bool).tril(diagonal=first)
        inputs.append((q, k, v, hidden))
    best, until, runs = float("inf"), time.perf_counter() + budget, 0
    while time.perf_counter() < until or runs < 3:
        start = time.perf_counter()
        for q, k, v, mask in inputs:
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=q_heads != kv_heads
            )
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="smollm2-135m,llama-8b")
    parser.add_argument("--kv-dtype", choices=sorted(NUMBER_BYTES), default="bf16")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--seconds", type=float, default=0.3, help="of measuring a case")
    parser.add_argument("--no-torch", action="store_true")
    args = parser.parse_args()
    if unknown := set(args.models.split(",")) - set(PRESETS):
        parser.error(
            f"--models: no such shape {', '.join(unknown)}; there are {', '.join(PRESETS)}"
        )

    isa = _native.best_isa()
    bandwidth = _native.measure_read_bandwidth(256, args.threads, isa, repeats=10)
    compute = _native.measure_compute(args.kv_dtype, args.threads, isa, repeats=20)
    print(describe(**vars(args)))
    print(f"ceiling   {bandwidth / 1e9:.1f} GB/s read, {compute / 1e9:.0f} G op/s {args.kv_dtype}")
    for model in args.models.split(","):
        config = PRESETS[model]
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        print(f"\n{model}: {heads[0]} query heads, {heads[1]} kv heads of {heads[2]}")
        for case in cases():
            step = NativeStep(case, *heads, args.kv_dtype, args.threads)
            seconds = step.seconds(args.seconds)
            operations = 4.0 * case.score_count * heads[0] * heads[2]
            ideal = max(step.bytes_read / bandwidth, operations / compute)
            line = f"{case.name:34s} {seconds * 1e6:9.1f} us {step.bytes_read / seconds / 1e9:6.1f}"
            line += (
                f" GB/s {operations / seconds / 1e9:6.0f} G op/s  roofline {ideal / seconds:4.0%}"
            )
            if not args.no_torch:
                other = torch_seconds(case, *heads, args.threads, args.seconds)
                line += f"   torch {other * 1e6:9.1f} us ({other / seconds:4.1f}x)"
            print(line, flush=True)


if __name__ == "__main__":
    main()
