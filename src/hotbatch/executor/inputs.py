"""A StepPlan as flat arrays: what every executor, native or torch, feeds to its kernels.

The step is ragged: the new tokens of all requests lie one after another in one row dimension,
request by request in the plan's order. `seq_starts` says where each begins, and the block table
says where its context lives in the paged KV cache. Packing costs a handful of numpy calls a step
and a few Python operations a request, so that it stays far below the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbatch.core.plan import PlannedRequest, StepPlan

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The arrays of one step, all int32 and C-contiguous.

    N new tokens of B requests, S of whose rows need logits.

    token_ids, positions, slots [N]: the token, its place within its request, and where its key
        and value go in the cache (block id * block size + offset).
    seq_starts [B+1]: request i owns rows seq_starts[i] .. seq_starts[i+1]-1.
    context_lens [B]: tokens of each request that are in the cache after this step.
    block_table [B, max_blocks]: cache block ids of each request; unused entries are 0.
    logit_rows [S]: rows whose logits are wanted, ascending.
    logit_starts [B+1]: request i owns entries logit_starts[i] .. logit_starts[i+1]-1 of
        `logit_rows`. If it samples, the last num_drafts+1 of them are sampled from; with
        prompt_logprobs the first len(next_tokens) of them score the prompt.
    """

    token_ids: Int32Array
    positions: Int32Array
    slots: Int32Array
    seq_starts: Int32Array
    context_lens: Int32Array
    block_table: Int32Array
    logit_rows: Int32Array
    logit_starts: Int32Array

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_requests(self) -> int:
        return len(self.context_lens)


def pack(plan: StepPlan, block_size: int) -> StepInputs:
    """Flatten `plan` for a cache of blocks of `block_size` tokens each."""
    requests = plan.requests
    lengths = np.array([len(request.tokens) for request in requests], dtype=np.int32)
    starts = np.array([request.start for request in requests], dtype=np.int32)
    seq_starts = _exclusive_sum(lengths)
    num_tokens = int(seq_starts[-1])

    token_ids = _flatten((request.tokens for request in requests), num_tokens)
    sequence_of_row = np.repeat(np.arange(len(requests), dtype=np.int32), lengths)
    row_offset = starts - seq_starts[:-1]
    positions = np.arange(num_tokens, dtype=np.int32) + row_offset[sequence_of_row]
    block_table = _block_table(requests)
    blocks = block_table[sequence_of_row, positions // block_size]
    slots = blocks * np.int32(block_size) + positions % block_size
    logit_rows, logit_starts = _logit_rows(requests, seq_starts)
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        slots=slots.astype(np.int32, copy=False),
        seq_starts=seq_starts,
        context_lens=starts + lengths,
        block_table=block_table,
        logit_rows=logit_rows,
        logit_starts=logit_starts,
    )


def _exclusive_sum(counts: Int32Array) -> Int32Array:
    sums = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums


def _flatten(rows: Any, count: int) -> Int32Array:
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=count)


def _block_table(requests: tuple[PlannedRequest, ...]) -> Int32Array:
    counts = np.array([len(request.block_ids) for request in requests], dtype=np.int32)
    width = int(counts.max(initial=1))
    table = np.zeros((len(requests), width), dtype=np.int32)
    used = np.arange(width, dtype=np.int32)[None, :] < counts[:, None]
    table[used] = _flatten((request.block_ids for request in requests), int(counts.sum()))
    return table


def _logit_rows(
    requests: tuple[PlannedRequest, ...], seq_starts: Int32Array
) -> tuple[Int32Array, Int32Array]:
    """Rows that need logits, and where each request's share of them begins."""
    rows: list[int] = []
    logit_starts = [0]
    for request, start, end in zip(
        requests, seq_starts[:-1].tolist(), seq_starts[1:].tolist(), strict=True
    ):
        first_sampled = end if request.sample is None else end - request.num_drafts - 1
        if request.prompt_logprobs is not None:
            rows.extend(range(start, min(start + len(request.next_tokens), first_sampled)))
        rows.extend(range(first_sampled, end))
        logit_starts.append(len(rows))
    return np.array(rows, dtype=np.int32), np.array(logit_starts, dtype=np.int32)
