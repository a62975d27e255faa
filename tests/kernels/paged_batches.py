"""Ragged steps over a paged cache, for tests of the native attention and rotary kernels.

A `PagedCache` starts out full of NaN, so that a kernel that lets a hidden or stale key count,
even with weight zero, shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hotbatch.kernels import _native
from hotbatch.kernels.attention.reference import paged_attention
from hotbatch.kernels.rotary.reference import rotate, store

ISAS = [name for name in ("avx512bf16", "avx512vnni", "avx2", "portable") if _native.has_isa(name)]
ROPE_BASE = 10000.0


@dataclass(frozen=True)
class Heads:
    """Shape of an attention layer."""

    q: int
    kv: int
    dim: int

    @property
    def columns(self) -> int:
        return (self.q + 2 * self.kv) * self.dim


def rope_frequencies(dim: int) -> np.ndarray:
    return (ROPE_BASE ** (-np.arange(0, dim, 2, dtype=np.float32) / dim)).astype(np.float32)


def rope_tables(dim: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, f32 [positions, dim / 2]."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * torch.from_numpy(
        rope_frequencies(dim)
    )
    return angles.cos().numpy(), angles.sin().numpy()


class PagedCache:
    """One layer's native cache, and the same in torch."""

    def __init__(
        self, heads: Heads, *, dtype: str, num_blocks: int, block_size: int = 16, isa: str
    ) -> None:
        self.heads, self.isa, self.block_size, self.dtype = heads, isa, block_size, dtype
        self.layout = _native.KvLayout(dtype, heads.kv, heads.dim, block_size)
        self.bytes = np.full(num_blocks * self.layout.block_bytes, 0xFF, np.uint8)
        torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        shape = (num_blocks, block_size, heads.kv, heads.dim)
        self.keys = torch.full(shape, torch.nan, dtype=torch_dtype)
        self.values = torch.full(shape, torch.nan, dtype=torch_dtype)

    def store(
        self, qkv: np.ndarray, positions: np.ndarray, blocks: np.ndarray, threads: int = 1
    ) -> np.ndarray:
        """Rotate and store one sequence's rows; returns the native queries [N, bytes]."""
        slots = blocks[positions // self.block_size] * self.block_size
        slots = (slots + positions % self.block_size).astype(np.int32)
        cos, sin = rope_tables(self.heads.dim, int(positions.max()) + 1)
        q = _native.rotary_store(
            self.isa,
            threads,
            self.layout,
            self.heads.q,
            qkv,
            positions,
            slots,
            cos,
            sin,
            self.bytes,
        )
        _, k, v = self.split(qkv, positions)
        store(self.keys, torch.from_numpy(slots), k)
        store(self.values, torch.from_numpy(slots), v)
        return q

    def split(
        self, qkv: np.ndarray, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rotated q and k, and v, as the reference sees them."""
        heads = self.heads
        rows = torch.from_numpy(qkv).view(len(qkv), -1, heads.dim)
        q, k, v = rows.split([heads.q, heads.kv, heads.kv], dim=1)
        frequencies = torch.from_numpy(rope_frequencies(heads.dim))
        q, k = (rotate(x, torch.from_numpy(positions), frequencies) for x in (q, k))
        if self.dtype == "bf16":
            q = q.bfloat16().float()
        return q, k, v


@dataclass
class Sequence:
    """A request: its rows so far, its blocks and its queries in both forms."""

    qkv: np.ndarray
    blocks: np.ndarray
    native_q: np.ndarray
    torch_q: torch.Tensor

    def __len__(self) -> int:
        return len(self.qkv)


class PagedWorld:
    """A cache with some sequences of given lengths in it, at scattered blocks."""

    def __init__(
        self,
        heads: Heads,
        lengths: list[int],
        *,
        dtype: str = "bf16",
        block_size: int = 16,
        isa: str,
        seed: int = 0,
        spare_blocks: int = 8,
    ) -> None:
        rng = np.random.default_rng(seed)
        needed = [-(-length // block_size) for length in lengths]
        order = rng.permutation(sum(needed) + spare_blocks).astype(np.int32)
        self.cache = PagedCache(
            heads, dtype=dtype, num_blocks=len(order), block_size=block_size, isa=isa
        )
        self.sequences: list[Sequence] = []
        for length, count in zip(lengths, needed, strict=True):
            blocks, order = order[:count], order[count:]
            qkv = rng.standard_normal((length, heads.columns)).astype(np.float32)
            positions = np.arange(length, dtype=np.int32)
            native_q = self.cache.store(qkv, positions, blocks)
            torch_q = self.cache.split(qkv, positions)[0]
            self.sequences.append(Sequence(qkv, blocks, native_q, torch_q))
        self.spare = order

    def attend(
        self,
        rows: list[tuple[int, int, int]],
        *,
        window: int = 0,
        threads: int = 1,
        plan_threads: int | None = None,
        stays: bool = False,
        blocks: dict[int, np.ndarray] | None = None,
    ) -> np.ndarray:
        """Native attention of a step of (sequence, first position, end position) parts."""
        step = self.plan(
            rows, window=window, plan_threads=plan_threads or threads, stays=stays, blocks=blocks
        )
        q = np.concatenate([self.sequences[s].native_q[begin:end] for s, begin, end in rows])
        heads = self.cache.heads
        return step.run(self.cache.isa, threads, q, self.cache.bytes, heads.dim**-0.5)

    def plan(
        self,
        rows: list[tuple[int, int, int]],
        *,
        window: int = 0,
        plan_threads: int = 1,
        stays: bool = False,
        blocks: dict[int, np.ndarray] | None = None,
    ) -> _native.AttentionStep:
        positions, seq_starts, table = self._arrays(rows, blocks or {})
        return _native.AttentionStep(
            self.cache.layout,
            self.cache.heads.q,
            window,
            plan_threads,
            positions,
            seq_starts,
            table,
            stays,
        )

    def expected(self, rows: list[tuple[int, int, int]], *, window: int = 0) -> np.ndarray:
        """The same by the reference."""
        _, seq_starts, table = self._arrays(rows, {})
        out = paged_attention(
            torch.cat([self.sequences[s].torch_q[begin:end] for s, begin, end in rows]),
            self.cache.keys,
            self.cache.values,
            torch.from_numpy(seq_starts),
            torch.tensor([end for _, _, end in rows]),
            torch.from_numpy(table),
            window=window or None,
        )
        return out.flatten(1).numpy()

    def _arrays(
        self, rows: list[tuple[int, int, int]], blocks: dict[int, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        positions = np.concatenate(
            [np.arange(begin, end, dtype=np.int32) for _, begin, end in rows]
        )
        counts = [end - begin for _, begin, end in rows]
        seq_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        table = np.zeros((len(rows), max(len(s.blocks) for s in self.sequences)), np.int32)
        for index, (sequence, _, _) in enumerate(rows):
            ids = blocks.get(sequence, self.sequences[sequence].blocks)
            table[index, : len(ids)] = ids
        return positions, seq_starts, table
