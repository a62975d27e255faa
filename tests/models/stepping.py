"""Driving an executor by hand: sequences in chunks, through blocks scattered over the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotbatch.core.plan import PlannedRequest, StepPlan
from hotbatch.executor.cpu_executor import CpuExecutor
from hotbatch.executor.inputs import pack
from hotbatch.executor.torch_executor import TorchExecutor


def logits_in_steps(
    executor: TorchExecutor | CpuExecutor,
    sequences: Sequence[Sequence[int]],
    steps: Sequence[Sequence[int]],
) -> list[torch.Tensor]:
    """The logits of every position of each sequence, f32 [len, vocab], computed in `steps`: how
    many tokens of each sequence enter each step (0: it sits the step out)."""
    info = executor.info
    blocks = _scattered_blocks(sequences, info.block_size, info.num_blocks)
    done = [0] * len(sequences)
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step_id, counts in enumerate(steps):
        requests, owners = [], []
        for index, count in enumerate(counts):
            if count:
                tokens = tuple(sequences[index][done[index] : done[index] + count])
                requests.append(_scored(index, done[index], tokens, blocks[index]))
                owners.append(index)
                done[index] += count
        plan = StepPlan(step_id, tuple(requests))
        inputs = pack(plan, info.block_size)
        if isinstance(executor, CpuExecutor):
            logits = torch.from_numpy(executor.logits(plan))
        else:
            logits = executor.logits(inputs)
        starts = inputs.logit_starts.tolist()
        for position, index in enumerate(owners):
            rows[index].append(logits[starts[position] : starts[position + 1]])
    assert done == [len(sequence) for sequence in sequences]
    return [torch.cat(parts) for parts in rows]


def _scored(
    index: int, start: int, tokens: tuple[int, ...], blocks: tuple[int, ...]
) -> PlannedRequest:
    # Scoring a prompt is what asks for the logits of every row; the targets do not matter here.
    return PlannedRequest(
        f"request-{index}", start, tokens, blocks, prompt_logprobs=0, next_tokens=tokens
    )


def _scattered_blocks(
    sequences: Sequence[Sequence[int]], block_size: int, num_blocks: int
) -> list[tuple[int, ...]]:
    free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).tolist()
    needed = [-(-len(sequence) // block_size) for sequence in sequences]
    return [tuple(free.pop() for _ in range(count)) for count in needed]
