"""A StepPlan as flat arrays: what every executor, native or torch, feeds to its kernels.

The step is ragged: the new tokens of all requests lie one after another in one row dimension,
request by request in the plan's order. `seq_starts` says where each begins, and the block table
says where its context lives in the paged KV cache. Packing costs a few Python
operations a request, so that it stays far below the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

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
    """Flatten `plan` for a cache of blocks of `block_size` tokens each.

    Plain lists, turned into one array at the end: a decode step has few numbers, and a dozen
    numpy calls on caches that the last step has emptied would cost more than all of them.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    seq_starts = [0]
    context_lens: list[int] = []
    logit_rows: list[int] = []
    logit_starts = [0]
    for request in plan.requests:
        start, count = request.start, len(request.tokens)
        row = len(token_ids)
        token_ids.extend(request.tokens)
        if count == 1:
            positions.append(start)
            slots.append(request.block_ids[start // block_size] * block_size + start % block_size)
        else:
            positions.extend(range(start, start + count))
            _extend_slots(slots, request, block_size)
        seq_starts.append(row + count)
        context_lens.append(start + count)
        _extend_logit_rows(logit_rows, request, row)
        logit_starts.append(len(logit_rows))
    block_table, width = _block_table(plan.requests)
    parts = (
        token_ids,
        positions,
        slots,
        seq_starts,
        context_lens,
        block_table,
        logit_rows,
        logit_starts,
    )
    arrays = _arrays(parts)
    arrays[5] = arrays[5].reshape(len(plan.requests), width)
    return StepInputs(*arrays)


def _arrays(parts: tuple[list[int], ...]) -> list[Int32Array]:
    """Each list as an array, all views of one."""
    together = np.array(list(chain.from_iterable(parts)), dtype=np.int32)
    arrays, begin = [], 0
    for part in parts:
        arrays.append(together[begin : begin + len(part)])
        begin += len(part)
    return arrays


def _extend_slots(slots: list[int], request: PlannedRequest, block_size: int) -> None:
    """Where the keys and values of a chunk go, block by block."""
    position, end = request.start, request.context_len
    while position < end:
        block, offset = divmod(position, block_size)
        count = min(block_size - offset, end - position)
        first = request.block_ids[block] * block_size + offset
        slots.extend(range(first, first + count))
        position += count


def _block_table(requests: tuple[PlannedRequest, ...]) -> tuple[list[int], int]:
    """The block tables, one after another, padded with 0 to the longest; and its length."""
    width = max((len(request.block_ids) for request in requests), default=1)
    table: list[int] = []
    for request in requests:
        table.extend(request.block_ids)
        table.extend([0] * (width - len(request.block_ids)))
    return table, width


def _extend_logit_rows(rows: list[int], request: PlannedRequest, start: int) -> None:
    """The rows of a request, whose first is `start`, that need logits."""
    end = start + len(request.tokens)
    first_sampled = end if request.sample is None else end - request.num_drafts - 1
    if request.prompt_logprobs is not None:
        rows.extend(range(start, min(start + len(request.next_tokens), first_sampled)))
    rows.extend(range(first_sampled, end))
