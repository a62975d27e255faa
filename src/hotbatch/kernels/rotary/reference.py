"""Rotary embedding and the write into the paged cache in plain torch: the oracle for both.

A cache is [num_blocks, block_size, Hkv, D]; slot = block id * block_size + offset.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, inverse_frequencies: Tensor) -> Tensor:
    """Turn each head of x by its position, in f32.

    x [N, heads, D], positions [N], inverse_frequencies f32 [D / 2]. Dimension i turns together
    with i + D / 2 (half-split). Source: Su et al., arXiv 2104.09864.
    """
    angles = positions.to(torch.float32)[:, None] * inverse_frequencies  # [N, D / 2]
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def store(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write values [N, Hkv, D] to `slots` [N] of the cache, in the cache's dtype."""
    flat = cache.view(-1, *cache.shape[2:])
    flat[slots.long()] = values.to(cache.dtype)
