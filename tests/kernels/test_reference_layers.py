"""The torch references against independent ways to the same result."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from hotbatch.kernels.activation.reference import silu_mul
from hotbatch.kernels.attention.reference import paged_attention
from hotbatch.kernels.embedding.reference import embed
from hotbatch.kernels.matmul import reference as matmul
from hotbatch.kernels.norm.reference import rms_norm
from hotbatch.kernels.rotary.reference import rotate, store


@pytest.fixture
def noise() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def test_rms_norm(noise: torch.Generator) -> None:
    x, weight = torch.randn(5, 24, generator=noise), torch.randn(24, generator=noise)
    expected = torch.nn.functional.rms_norm(x, (24,), weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


def test_embed_decodes_to_f32() -> None:
    table = torch.arange(12.0).reshape(4, 3).to(torch.bfloat16)
    found = embed(table, torch.tensor([3, 0], dtype=torch.int32))
    assert found.dtype == torch.float32 and found.tolist() == [[9, 10, 11], [0, 1, 2]]


def test_silu_mul_takes_the_gate_first() -> None:
    found = silu_mul(torch.tensor([[1.0, -2.0, 3.0, 4.0]]))
    gate = torch.tensor([1.0, -2.0])
    torch.testing.assert_close(found[0], gate / (1 + (-gate).exp()) * torch.tensor([3.0, 4.0]))


def test_rotation_is_that_of_complex_numbers(noise: torch.Generator) -> None:
    x = torch.randn(6, 3, 8, generator=noise)
    positions = torch.tensor([0, 1, 5, 5, 100, 9])
    frequencies = torch.tensor([1.0, 0.3, 0.05, 0.01])
    turned = torch.polar(torch.ones(6, 4), positions[:, None] * frequencies)[:, None, :]
    product = torch.complex(x[..., :4], x[..., 4:]) * turned
    expected = torch.cat([product.real, product.imag], dim=-1)
    torch.testing.assert_close(rotate(x, positions, frequencies), expected)


def test_store_writes_slots_alone() -> None:
    cache = torch.zeros(3, 2, 1, 2, dtype=torch.bfloat16)
    store(cache, torch.tensor([4, 1]), torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]))
    assert cache[2, 0, 0].tolist() == [1, 2] and cache[0, 1, 0].tolist() == [3, 4]
    assert cache.count_nonzero() == 4


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_attention_equals_torch_on_contiguous_keys(
    window: int | None, noise: torch.Generator
) -> None:
    """Three sequences: a decode, a chunk in the middle of a prompt, and a whole prompt."""
    block_size, kv_heads, group, dim = 4, 2, 3, 8
    context_lens, counts = [11, 9, 5], [1, 3, 5]
    k_cache, v_cache = torch.randn(2, 12, block_size, kv_heads, dim, generator=noise)
    blocks = torch.randperm(12, generator=noise)[:9].reshape(3, 3)
    q = torch.randn(sum(counts), kv_heads * group, dim, generator=noise)
    starts = [0, 1, 4, 9]

    found = paged_attention(
        q, k_cache, v_cache, torch.tensor(starts), torch.tensor(context_lens), blocks, window
    )

    for index, (context, count) in enumerate(zip(context_lens, counts, strict=True)):
        slots = [
            int(blocks[index, p // block_size]) * block_size + p % block_size
            for p in range(context)
        ]
        keys, values = (
            cache.reshape(-1, kv_heads, dim)[slots].repeat_interleave(group, dim=1).transpose(0, 1)
            for cache in (k_cache, v_cache)
        )
        last = torch.arange(context - count, context)[:, None]
        seen = torch.arange(context)[None, :]
        visible = (seen <= last) & (last - seen < (window or context + 1))
        rows = slice(starts[index], starts[index + 1])
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[rows].transpose(0, 1), keys, values, attn_mask=visible
        ).transpose(0, 1)
        torch.testing.assert_close(found[rows], expected, atol=1e-5, rtol=1e-5)


def test_linear_adds_bias_and_residual(noise: torch.Generator) -> None:
    x, weight = torch.randn(4, 70, generator=noise), torch.randn(6, 70, generator=noise)
    bias, residual = torch.randn(6, generator=noise), torch.randn(4, 6, generator=noise)
    expected = torch.nn.functional.linear(x, weight, bias) + residual
    torch.testing.assert_close(matmul.linear(x, weight, bias, residual), expected)
    rounded = matmul.linear_bf16(x, weight.to(torch.bfloat16), bias, residual)
    assert 1e-4 < (rounded - expected).norm() / expected.norm() < 1e-2


def test_int8_linear_is_exact_integer_arithmetic(noise: torch.Generator) -> None:
    """Redone with 64-bit integers, in groups of 64 inputs of which the last is short."""
    x, weight = torch.randn(3, 150, generator=noise), torch.randn(5, 150, generator=noise)
    bias = torch.randn(5, generator=noise)
    weight[2] = 0.0
    x[1, 64:128] = 0.0
    quantised, scales = matmul.quantize_weight_int8(weight)
    assert quantised.dtype == torch.int8 and quantised[0].abs().max() == 127

    total = torch.zeros(3, 5)
    for first in (0, 64, 128):
        part = x[:, first : first + 64]
        largest = part.abs().amax(dim=1, keepdim=True)
        inverse = torch.where(largest > 0, 127.0 / largest, torch.zeros_like(largest))
        whole = (part * inverse).round().long()
        sums = whole @ quantised[:, first : first + 64].long().T
        total += sums.float() * (largest / 127.0)
    found = matmul.linear_int8(x, quantised, scales, bias)
    assert torch.equal(found, total * scales + bias)
    exact = torch.nn.functional.linear(x, weight, bias)
    assert (found - exact).norm() / exact.norm() < 0.02


def test_int8_rows_do_not_depend_on_their_neighbours(noise: torch.Generator) -> None:
    x, weight = torch.randn(33, 128, generator=noise), torch.randn(16, 128, generator=noise)
    quantised, scales = matmul.quantize_weight_int8(weight)
    together = matmul.linear_int8(x, quantised, scales)
    for row in (0, 7, 32):
        assert torch.equal(
            matmul.linear_int8(x[row : row + 1], quantised, scales)[0], together[row]
        )


def test_int4_rounding_keeps_what_is_on_the_grid(noise: torch.Generator) -> None:
    weight = torch.randn(6, 96, generator=noise)
    kind = GGMLQuantizationType.Q4_1
    on_grid = torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind))
    again = matmul.quantize_weight_int4(on_grid)
    torch.testing.assert_close(again, on_grid, atol=2e-3, rtol=0)
    rounded = matmul.quantize_weight_int4(weight)
    step = (weight.amax() - weight.amin()) / 15
    assert 0 < (rounded - weight).abs().max() <= step / 2 + 0.01
    x = torch.randn(3, 96, generator=noise)
    expected = x @ rounded.T
    found = matmul.linear_int4(x, rounded)
    assert 0 < (found - expected).norm() / expected.norm() < 0.01
