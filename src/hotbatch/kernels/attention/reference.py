"""Causal attention over a paged KV cache in plain torch: the oracle for the native kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_starts: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Each sequence's new tokens attend to all of its cached ones up to themselves.

    The keys and values of the new tokens must be in the cache already. Sequence i owns rows
    seq_starts[i] .. seq_starts[i+1]-1 of q, which are the last of its context_lens[i] tokens.
    Query head h reads key/value head h // (Hq / Hkv).

    Args:
        q: f32 [N, Hq, D], rotated.
        k_cache, v_cache: [num_blocks, block_size, Hkv, D]; read in f32.
        seq_starts [B+1], context_lens [B], block_table [B, max_blocks]: integers.
        window: a query at position p sees keys at p - window + 1 .. p; None for all.
        scale: of the scores; None for 1 / sqrt(D).

    Returns:
        f32 [N, Hq, D].
    """
    block_size = k_cache.shape[1]
    group = q.shape[1] // k_cache.shape[2]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out = torch.empty_like(q)
    starts = seq_starts.tolist()
    for index, context_len in enumerate(context_lens.tolist()):
        rows = slice(starts[index], starts[index + 1])
        blocks = block_table[index, : -(-context_len // block_size)].long()
        keys = k_cache[blocks].flatten(0, 1)[:context_len].to(torch.float32)  # [C, Hkv, D]
        values = v_cache[blocks].flatten(0, 1)[:context_len].to(torch.float32)
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))  # [C, Hq, D]
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * scale
        hidden = ~_visible(scores.shape[1], context_len, window, q.device)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def _visible(
    num_queries: int, context_len: int, window: int | None, device: torch.device
) -> Tensor:
    """bool [num_queries, context_len]: which key each of the last queries may see."""
    queries = torch.arange(context_len - num_queries, context_len, device=device)[:, None]
    keys = torch.arange(context_len, device=device)[None, :]
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)
