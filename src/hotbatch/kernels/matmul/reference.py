"""Linear layers in plain torch, at each precision with the numerics of the native kernels.

The quantised ones carry integers in f32: sums of int8 products over a group stay far below
2^24, so they are exact, as the native integer sums are.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_INT8 = 64  # inputs that share an activation scale where weights are int8
GROUP_INT4 = 32  # ... and where they are int4


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """x [M, K] @ weight [N, K].T + bias [N] + residual [M, N], all f32."""
    return _finish(x @ weight.T, bias, residual)


def linear_bf16(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """`linear` with inputs rounded to bf16 (weight may be kept so) and sums in f32."""
    rounded = x.to(torch.bfloat16).to(torch.float32)
    return _finish(rounded @ weight.to(torch.float32).T, bias, residual)


def linear_int8(
    x: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    group: int = GROUP_INT8,
) -> Tensor:
    """`linear` with int8 weights, one scale an output, and activations quantised here, one
    scale a row and group of 64 inputs (or of so many as `group` says). Groups add up in ascending
    order.

    weight int8 [N, K] and weight_scales f32 [N] come from `quantize_weight_int8`.
    """
    values, scales = quantize_activation(x, group)
    total = x.new_zeros(x.shape[0], weight.shape[0])
    for index, columns in enumerate(weight.to(torch.float32).split(group, dim=1)):
        first = index * group
        exact = values[:, first : first + columns.shape[1]] @ columns.T
        total = total + exact * scales[:, index, None]
    return _finish(total * weight_scales, bias, residual)


def linear_int4(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """`linear` with weights on a 4-bit grid (decoded to f32) and activations quantised here to
    int8, one scale a row and group of 32 inputs."""
    values, scales = quantize_activation(x, GROUP_INT4)
    rounded = values * scales.repeat_interleave(GROUP_INT4, dim=1)[:, : x.shape[1]]
    return _finish(rounded @ weight.T, bias, residual)


def quantize_weight_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """f32 [N, K] -> symmetric int8 [N, K] and f32 scales [N], one an output: w = scale * q."""
    largest = weight.abs().amax(dim=1)
    return _round_int8(weight, largest[:, None]).to(torch.int8), largest / 127.0


def quantize_activation(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """f32 [M, K] -> whole numbers in -127..127, as f32 [M, K], and f32 scales [M, K / group]
    (the last group may be short): x = scale * q."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % group))
    grouped = padded.unflatten(1, (-1, group))
    largest = grouped.abs().amax(dim=2)
    values = _round_int8(grouped, largest[:, :, None]).flatten(1)[:, : x.shape[1]]
    return values, largest / 127.0


def quantize_weight_int4(weight: Tensor) -> Tensor:
    """f32 [N, K] rounded to Q4_1's grid: in each group of 32 inputs of a row sixteen levels
    from the least to the largest weight, with the step and the least kept in f16. Returns the
    rounded weights, f32 [N, K]."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % GROUP_INT4), mode="replicate")
    grouped = padded.unflatten(1, (-1, GROUP_INT4))
    least, largest = grouped.amin(dim=2, keepdim=True), grouped.amax(dim=2, keepdim=True)
    step = ((largest - least) / 15.0).to(torch.float16).to(torch.float32)
    least = least.to(torch.float16).to(torch.float32)
    levels = torch.where(step > 0, (grouped - least) / step, torch.zeros_like(grouped))
    levels = levels.round().clamp(0, 15)
    return (levels * step + least).flatten(1)[:, : weight.shape[1]]


def _round_int8(x: Tensor, largest: Tensor) -> Tensor:
    inverse = torch.where(largest > 0, 127.0 / largest, torch.zeros_like(largest))
    return (x * inverse).round().clamp(-127, 127)  # halves to even, as the native kernels


def _finish(product: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    if bias is not None:
        product = product + bias
    return product if residual is None else product + residual
