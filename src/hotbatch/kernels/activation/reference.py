"""The gated activation of the MLP in plain torch: the oracle for the native kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """f32 [N, 2 I] -> silu(first half) * second half, [N, I]. Source: Shazeer, arXiv 2002.05202."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
