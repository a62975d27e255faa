"""The sampling of one step as flat arrays for the native kernel, and its answer as rows.

Prompt log-probabilities and sampling go through the same kernel: a row that scores a prompt
token names that token as its target. One array a type keeps the crossing into native code cheap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbatch.core.plan import StepPlan
from hotbatch.executor.inputs import Int32Array, StepInputs
from hotbatch.executor.results import LogprobRows, SampleRow, prompt_rows, sample_rows

_NO_LIST = np.zeros(0, dtype=np.int32)
_SEED_MASK = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """What to do with each of the step's S logit rows; see the native SampleBatch for shapes.

    `sampled` [R] and `scored` [P] are the logit rows of `results.sample_rows` and
    `results.prompt_rows`, in their order.
    """

    floats: NDArray[np.float32]
    ints: Int32Array
    seeds: NDArray[np.uint64]
    lists: list[Int32Array]
    bias_values: NDArray[np.float32] | None
    sampled: Int32Array
    scored: Int32Array


def pack_sampling(plan: StepPlan, inputs: StepInputs) -> SampleInputs:
    """Parameters of every logit row, in the order of `inputs.logit_rows`."""
    rows = sample_rows(plan, inputs)
    count = len(inputs.logit_rows)
    sampled = np.array([row.logit_row for row in rows], dtype=np.int32)
    lists, bias_values = _lists(rows, count)
    if len(rows) == count:  # every logit row is sampled from, in order: nearly every step
        floats = np.array(list(zip(*map(_floats, rows), strict=True)), dtype=np.float32)
        ints = np.array(list(zip(*map(_ints, rows), strict=True)), dtype=np.int32)
        seeds = np.array([row.seed & _SEED_MASK for row in rows], dtype=np.uint64)
        return SampleInputs(
            floats.reshape(6, count),
            ints.reshape(5, count),
            seeds,
            lists,
            bias_values,
            sampled,
            _NO_LIST,
        )
    floats = np.zeros((6, count), dtype=np.float32)
    ints = np.full((5, count), -1, dtype=np.int32)
    seeds = np.zeros(count, dtype=np.uint64)
    if rows:
        floats[:, sampled] = np.array([_floats(row) for row in rows], dtype=np.float32).T
        ints[:, sampled] = np.array([_ints(row) for row in rows], dtype=np.int32).T
        seeds[sampled] = [row.seed & _SEED_MASK for row in rows]
    scored, targets = prompt_rows(plan, inputs)
    ints[2, scored] = _prompt_tops(plan)
    ints[3, scored] = targets
    return SampleInputs(floats, ints, seeds, lists, bias_values, sampled, scored)


def _floats(row: SampleRow) -> tuple[float, ...]:
    params = row.params
    return (
        params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )


def _ints(row: SampleRow) -> tuple[int, ...]:
    params = row.params
    logprobs = -1 if params.logprobs is None else params.logprobs
    return (params.top_k, row.position, logprobs, -1, row.num_prompt)


def _prompt_tops(plan: StepPlan) -> list[int]:
    tops: list[int] = []
    for request in plan.requests:
        if request.prompt_logprobs is not None:
            tops.extend([request.prompt_logprobs] * len(request.next_tokens))
    return tops


def _lists(
    rows: list[SampleRow], count: int
) -> tuple[list[Int32Array], NDArray[np.float32] | None]:
    """Biases, banned tokens and histories; a kind that no row uses costs nothing."""
    if not any(row.params.logit_bias or row.banned or row.history for row in rows):
        return [_NO_LIST] * 6, None
    bias: dict[int, Any] = {row.logit_row: row.params.logit_bias for row in rows}
    ids = {row: tuple(token for token, _ in pairs) for row, pairs in bias.items()}
    values = [value for row in sorted(bias) for _, value in bias[row]]
    banned = {row.logit_row: row.banned for row in rows}
    history = {row.logit_row: row.history for row in rows}
    lists = [*_csr(ids, count), *_csr(banned, count), *_csr(history, count)]
    return lists, np.array(values, dtype=np.float32) if values else None


def _csr(entries: dict[int, tuple[int, ...]], count: int) -> tuple[Int32Array, Int32Array]:
    if not any(entries.values()):
        return _NO_LIST, _NO_LIST
    lengths = np.zeros(count + 1, dtype=np.int32)
    flat: list[int] = []
    for row in sorted(entries):
        lengths[row + 1] = len(entries[row])
        flat.extend(entries[row])
    return np.cumsum(lengths, dtype=np.int32), np.array(flat, dtype=np.int32)


class SampleOutputs:
    """Arrays that the native kernel fills for S logit rows, `max_logprobs` alternatives each."""

    def __init__(self, count: int, max_logprobs: int) -> None:
        self.ints = np.zeros((3 + max_logprobs, count), dtype=np.int32)
        self.floats = np.zeros((1 + max_logprobs, count), dtype=np.float32)
        self._shape = (count, max_logprobs)

    def tokens(self, rows: Int32Array) -> Int32Array:
        """The sampled token of each of `rows`; -1 where nothing could be sampled."""
        result: Int32Array = self.ints[0][rows]
        return result

    def logprobs(self, rows: Int32Array) -> LogprobRows:
        top_ids = self.ints[3:].reshape(self._shape)
        top_logprobs = self.floats[1:].reshape(self._shape)
        return LogprobRows(
            logprobs=self.floats[0][rows],
            ranks=self.ints[1][rows],
            top_ids=top_ids[rows],
            top_logprobs=top_logprobs[rows],
        )
