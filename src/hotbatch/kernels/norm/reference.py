"""RMS norm in plain torch: the oracle for the native kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in f32.

    x f32 [..., H], weight f32 [H]. Source: Zhang & Sennrich, arXiv 1910.07467.
    """
    mean_square = x.square().mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(mean_square + eps) * weight
