"""From logits to StepResult: which rows are sampled and scored, and whose tokens come out.

Shared by all executors and free of any tensor library but numpy, so that drafts, banned tokens
and log-probabilities mean the same on every device. An executor asks `sample_rows` and
`prompt_rows` what to do with the logits, does it, and hands the arrays to `collect`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotbatch.core.plan import (
    PlannedRequest,
    RequestResult,
    SampleSpec,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.executor.inputs import Int32Array, StepInputs

NO_TOKEN = -1  # what a sampler returns for a row without any finite, permitted logit


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How to sample from row `logit_row` of the step's logits (an index into
    StepInputs.logit_rows). The other fields are SampleSpec's, moved on by the drafts before."""

    logit_row: int
    params: SamplingParams
    seed: int
    position: int
    num_prompt: int
    history: tuple[int, ...]
    banned: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of one chosen token a row, and the K likeliest of that row.

    logprobs f32 [R]; ranks int32 [R], 1 is the likeliest; top_ids int32 [R, K] and
    top_logprobs f32 [R, K], best first, ties by lower id. K is the most any request asked for.
    """

    logprobs: NDArray[np.float32]
    ranks: Int32Array
    top_ids: Int32Array
    top_logprobs: NDArray[np.float32]

    def entry(self, row: int, token_id: int, num_top: int) -> TokenLogprob:
        top_ids = self.top_ids[row, :num_top].tolist()
        top_logprobs = self.top_logprobs[row, :num_top].tolist()
        return TokenLogprob(
            token_id=token_id,
            logprob=float(self.logprobs[row]),
            rank=int(self.ranks[row]),
            top=tuple(zip(top_ids, top_logprobs, strict=True)),
        )


def sample_rows(plan: StepPlan, inputs: StepInputs) -> list[SampleRow]:
    """The rows to sample, in the plan's order: num_drafts + 1 for each request that samples."""
    rows: list[SampleRow] = []
    ends = inputs.logit_starts[1:].tolist()
    for request, end in zip(plan.requests, ends, strict=True):
        spec = request.sample
        if spec is None:
            continue
        first = end - request.num_drafts - 1
        for depth in range(request.num_drafts + 1):
            rows.append(_sample_row(request, spec, first + depth, depth))
    return rows


def _sample_row(request: PlannedRequest, spec: SampleSpec, logit_row: int, depth: int) -> SampleRow:
    """Row `depth` draws the token that follows the first `depth` drafts, exactly as it would
    be drawn in a later step had those drafts been accepted."""
    history, banned = spec.history, spec.banned
    position = spec.position + depth
    if depth:
        if history:
            first_draft = len(request.tokens) - request.num_drafts
            history += request.tokens[first_draft : first_draft + depth]
        if position - spec.num_prompt >= spec.params.min_tokens:
            banned = ()
    return SampleRow(
        logit_row=logit_row,
        params=spec.params,
        seed=spec.seed,
        position=position,
        num_prompt=spec.num_prompt,
        history=history,
        banned=banned,
    )


def prompt_rows(plan: StepPlan, inputs: StepInputs) -> tuple[Int32Array, Int32Array]:
    """Rows of the logits that score prompts, and the prompt token each is to score: two int32
    [P], in the plan's order, with len(next_tokens) entries for each request that asks."""
    rows: list[int] = []
    targets: list[int] = []
    for request, start in zip(plan.requests, inputs.logit_starts[:-1].tolist(), strict=True):
        if request.prompt_logprobs is not None:
            rows.extend(range(start, start + len(request.next_tokens)))
            targets.extend(request.next_tokens)
    return np.array(rows, dtype=np.int32), np.array(targets, dtype=np.int32)


def num_sample_top(plan: StepPlan) -> int | None:
    """The most alternatives any sampled request wants; None if none wants log-probabilities."""
    wanted = (r.sample.params.logprobs for r in plan.requests if r.sample is not None)
    return max((count for count in wanted if count is not None), default=None)


def num_prompt_top(plan: StepPlan) -> int | None:
    """The same for the log-probabilities of prompts."""
    wanted = (r.prompt_logprobs for r in plan.requests)
    return max((count for count in wanted if count is not None), default=None)


def collect(
    plan: StepPlan,
    token_ids: Int32Array,
    seconds: float,
    logprobs: LogprobRows | None = None,
    prompt_logprobs: LogprobRows | None = None,
) -> StepResult:
    """Cut the sampled rows into one RequestResult a request.

    Args:
        token_ids: int32 [R], one a row of `sample_rows`, NO_TOKEN where nothing could be drawn.
        seconds: measured time of the step.
        logprobs: rows parallel to `token_ids`; needed if `num_sample_top` is not None.
        prompt_logprobs: rows parallel to `prompt_rows`; needed if `num_prompt_top` is not None.
    """
    results: list[RequestResult] = []
    sampled = token_ids.tolist()
    row = prompt_row = 0
    for request in plan.requests:
        tokens: tuple[int, ...] = ()
        token_logprobs: tuple[TokenLogprob, ...] = ()
        scored: tuple[TokenLogprob, ...] = ()
        error = None
        if request.sample is not None:
            tokens = _accepted(request, sampled[row : row + request.num_drafts + 1])
            if tokens[-1] == NO_TOKEN:
                error = "The model gave no usable logits: they are not finite, or all banned."
                tokens = tokens[:-1]
            wanted = request.sample.params.logprobs
            if wanted is not None:
                assert logprobs is not None
                token_logprobs = tuple(
                    logprobs.entry(row + depth, token, wanted) for depth, token in enumerate(tokens)
                )
            row += request.num_drafts + 1
        if request.prompt_logprobs is not None:
            assert prompt_logprobs is not None
            scored = tuple(
                prompt_logprobs.entry(prompt_row + index, token, request.prompt_logprobs)
                for index, token in enumerate(request.next_tokens)
            )
            prompt_row += len(request.next_tokens)
        results.append(
            RequestResult(request.request_id, tokens, token_logprobs, scored, error=error)
        )
    assert row == len(sampled)
    return StepResult(plan.step_id, tuple(results), seconds)


def _accepted(request: PlannedRequest, sampled: list[int]) -> tuple[int, ...]:
    """Sampled tokens up to and including the first that differs from its draft: what follows
    was computed after a token that is not there."""
    if not request.num_drafts:
        return (sampled[0],)
    drafts = request.tokens[len(request.tokens) - request.num_drafts :]
    accepted = 0
    while accepted < request.num_drafts and sampled[accepted] == drafts[accepted]:
        accepted += 1
    return tuple(sampled[: accepted + 1])
