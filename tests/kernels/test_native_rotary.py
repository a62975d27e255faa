"""Rotation and cache write, native against the reference, on every instruction set here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged_batches import ISAS, Heads, rope_frequencies, rope_tables

from hotbatch.kernels import _native
from hotbatch.kernels.norm.reference import rms_norm
from hotbatch.kernels.rotary.reference import rotate


def unpack_cache(data: np.ndarray, heads: Heads, block_size: int, dtype: str) -> np.ndarray:
    """f32 [2, num_blocks, block_size, kv, dim]: K and V as attention/args.h lays them out."""
    number, pack = {"f32": (np.float32, 1), "bf16": (np.uint16, 2), "int8": (np.uint8, 4)}[dtype]
    part = block_size * heads.dim * 4 // pack
    head_bytes = 2 * part + (8 * block_size if dtype == "int8" else 0)
    per_head = data.reshape(-1, heads.kv, head_bytes)
    groups = block_size // 16
    shape = (len(per_head), heads.kv, groups)

    def numbers(offset: int) -> np.ndarray:
        raw = np.ascontiguousarray(per_head[:, :, offset : offset + part]).view(number)
        if dtype == "bf16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32) - (128 if dtype == "int8" else 0)

    k = numbers(0).reshape(*shape, heads.dim // pack, 16, pack).transpose(0, 1, 2, 4, 3, 5)
    v = numbers(part).reshape(*shape, 16 // pack, heads.dim, pack).transpose(0, 1, 2, 3, 5, 4)
    both = np.stack([x.reshape(*shape, 16, heads.dim) for x in (k, v)])
    if dtype == "int8":
        raw = np.ascontiguousarray(per_head[:, :, 2 * part :]).view(np.float32)
        scales = raw.reshape(*shape, 2, 16).transpose(3, 0, 1, 2, 4)
        both = both * scales[..., None]
    tokens = both.reshape(2, len(per_head), heads.kv, block_size, heads.dim)
    return tokens.transpose(0, 1, 3, 2, 4)


def unpack_queries(q: np.ndarray, heads: Heads, dtype: str) -> np.ndarray:
    per_head = q.reshape(len(q), heads.q, -1)
    if dtype == "f32":
        return per_head.view(np.float32)
    if dtype == "bf16":
        return (per_head.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    numbers = per_head[:, :, : heads.dim].view(np.int8).astype(np.float32)
    scale = np.ascontiguousarray(per_head[:, :, heads.dim : heads.dim + 4]).view(np.float32)
    total = np.ascontiguousarray(per_head[:, :, heads.dim + 4 : heads.dim + 8]).view(np.int32)
    assert np.array_equal(total[..., 0], numbers.sum(-1))
    return numbers * scale


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize(("dim", "block_size"), [(64, 16), (80, 32), (256, 16)])
@pytest.mark.parametrize("normalised", [False, True])
def test_matches_reference(
    isa: str, dtype: str, dim: int, block_size: int, normalised: bool
) -> None:
    heads, rows, blocks = Heads(6, 2, dim), 9, 4
    rng = np.random.default_rng(dim)
    qkv = rng.standard_normal((rows, heads.columns)).astype(np.float32)
    slots = rng.permutation(blocks * block_size)[:rows].astype(np.int32)
    positions = rng.integers(0, 500, rows).astype(np.int32)
    norms = [rng.uniform(0.5, 1.5, dim).astype(np.float32) for _ in range(2)]
    layout = _native.KvLayout(dtype, heads.kv, dim, block_size)
    cache = np.zeros(blocks * layout.block_bytes, np.uint8)
    cos, sin = rope_tables(dim, 500)
    q_norm, k_norm = norms if normalised else (None, None)
    out = _native.rotary_store(
        isa, 2, layout, heads.q, qkv, positions, slots, cos, sin, cache, q_norm, k_norm, 1e-5
    )

    frequencies = torch.from_numpy(rope_frequencies(dim))
    q, k, v = torch.from_numpy(qkv).view(rows, -1, dim).split([heads.q, heads.kv, heads.kv], 1)
    if normalised:
        q, k = (rms_norm(x, torch.from_numpy(w), 1e-5) for x, w in zip((q, k), norms, strict=True))
    q, k = (rotate(x, torch.from_numpy(positions), frequencies).numpy() for x in (q, k))
    got = unpack_cache(cache, heads, block_size, dtype).reshape(2, -1, heads.kv, dim)[:, slots]
    # Relative to the largest number of a head: what one rounding to the format may cost.
    tolerance = {"f32": 2e-5, "bf16": 4e-3, "int8": 4.1e-3}[dtype]
    for native, wanted in (
        (unpack_queries(out, heads, dtype), q),
        (got[0], k),
        (got[1], v.numpy()),
    ):
        peak = np.abs(wanted).max(axis=-1, keepdims=True)
        assert np.all(np.abs(native - wanted) <= tolerance * peak)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
def test_writes_its_own_tokens_only(isa: str, dtype: str) -> None:
    heads = Heads(2, 2, 64)
    layout = _native.KvLayout(dtype, heads.kv, heads.dim, 16)
    rng = np.random.default_rng(1)
    qkv = rng.standard_normal((1, heads.columns)).astype(np.float32)
    cos, sin = rope_tables(heads.dim, 1)
    written = []
    for fill in (0x00, 0xFF):
        cache = np.full(2 * layout.block_bytes, fill, np.uint8)
        _native.rotary_store(
            isa, 1, layout, heads.q, qkv, np.zeros(1, np.int32), np.array([21], np.int32),
            cos, sin, cache,
        )  # fmt: skip
        written.append(cache)
    untouched = written[0] != written[1]  # 0 there and 255 here: neither run wrote it
    size = {"f32": 4, "bf16": 2, "int8": 1}[dtype]
    scales = 2 * 4 * heads.kv if dtype == "int8" else 0
    assert (~untouched).sum() == 2 * heads.kv * heads.dim * size + scales
    assert untouched[: layout.block_bytes].all()


@pytest.mark.parametrize("isa", ISAS)
def test_partial_rotation_leaves_the_rest(isa: str) -> None:
    heads, rotary_dim = Heads(1, 1, 64), 24
    layout = _native.KvLayout("f32", 1, 64, 16)
    rng = np.random.default_rng(2)
    qkv = rng.standard_normal((3, heads.columns)).astype(np.float32)
    positions = np.array([0, 5, 11], np.int32)
    cos, sin = rope_tables(rotary_dim, 12)
    cache = np.zeros(layout.block_bytes, np.uint8)
    out = _native.rotary_store(isa, 1, layout, 1, qkv, positions, positions, cos, sin, cache).view(
        np.float32
    )
    turned = rotate(
        torch.from_numpy(qkv[:, None, :rotary_dim]),
        torch.from_numpy(positions),
        torch.from_numpy(rope_frequencies(rotary_dim)),
    )[:, 0].numpy()
    np.testing.assert_allclose(out[:, :rotary_dim], turned, atol=2e-5)
    assert np.array_equal(out[:, rotary_dim:], qkv[:, rotary_dim:64])


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_does_not_depend_on_its_batch(isa: str) -> None:
    heads = Heads(3, 1, 64)
    layout = _native.KvLayout("bf16", 1, 64, 16)
    rng = np.random.default_rng(3)
    qkv = rng.standard_normal((40, heads.columns)).astype(np.float32)
    positions = np.arange(40, dtype=np.int32)
    cos, sin = rope_tables(64, 40)
    whole, apart = (
        np.zeros(3 * layout.block_bytes, np.uint8),
        np.zeros(3 * layout.block_bytes, np.uint8),
    )
    q = _native.rotary_store(isa, 3, layout, 3, qkv, positions, positions, cos, sin, whole)
    for row in reversed(range(40)):
        one = slice(row, row + 1)
        alone = _native.rotary_store(
            isa, 1, layout, 3, qkv[one], positions[one], positions[one], cos, sin, apart
        )
        assert np.array_equal(alone[0], q[row])
    assert np.array_equal(whole, apart)
