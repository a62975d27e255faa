"""Token embedding in plain torch: the oracle for the native kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def embed(table: Tensor, token_ids: Tensor) -> Tensor:
    """Rows of `table` [vocab, hidden] at `token_ids` [N]: f32 [N, hidden]."""
    return table[token_ids.long()].to(torch.float32)
