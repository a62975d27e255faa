"""A draft model beside the model: it finds the guesses that a plan leaves open, then the step runs.

Two executors, each with weights and a cache of its own. A plan says for whom the draft model
guesses (`StepPlan.model_drafts`); that takes one pass over what it does not know of those texts
yet, and one for each further guess. Each guess is drawn with the request's own parameters, at
the position that it is for, so with the very random numbers that the model will draw with.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from hotbatch.core.plan import (
    ModelDraft,
    PlannedRequest,
    SampleSpec,
    StepPlan,
    StepResult,
)
from hotbatch.engine.protocol import Executor, ExecutorInfo

_WRONG = 0  # is guessed where the draft model has no token that the model knows


class DraftingExecutor:
    """Runs plans on `model`, with the guesses of `draft_model`."""

    def __init__(self, model: Executor, draft_model: Executor) -> None:
        self._model = model
        self._draft_model = draft_model
        self._vocab_size = model.info.vocab_size

    @property
    def info(self) -> ExecutorInfo:
        return self._model.info

    @property
    def draft_model(self) -> Executor:
        return self._draft_model

    def run(self, plan: StepPlan) -> StepResult:
        if not plan.model_drafts:
            return self._model.run(plan)
        guesses, seconds = self._guess(plan)
        result = self._model.run(_with_guesses(plan, guesses))
        return replace(result, draft_seconds=tuple(seconds))

    def close(self) -> None:
        self._draft_model.close()
        self._model.close()

    def _guess(self, plan: StepPlan) -> tuple[dict[int, list[int]], list[float]]:
        """The drafts by place in the plan, and the seconds of each pass."""
        num_drafts = {
            draft.place: plan.requests[draft.place].num_drafts if draft.sample is not None else 0
            for draft in plan.model_drafts
        }
        guesses: dict[int, list[int]] = {draft.place: [] for draft in plan.model_drafts}
        asked: Sequence[ModelDraft] = plan.model_drafts
        seconds: list[float] = []
        while asked:
            started = time.perf_counter()
            work = [
                _planned(plan, draft, guesses[draft.place], num_drafts[draft.place])
                for draft in asked
            ]
            result = self._draft_model.run(StepPlan(plan.step_id, tuple(work)))
            for draft, outcome in zip(asked, result.requests, strict=True):
                if num_drafts[draft.place]:
                    guesses[draft.place].append(self._token(outcome.token_ids))
            asked = [one for one in asked if len(guesses[one.place]) < num_drafts[one.place]]
            seconds.append(time.perf_counter() - started)
        return guesses, seconds

    def _token(self, token_ids: Sequence[int]) -> int:
        """The guess; vocabularies may be padded to different lengths."""
        return token_ids[0] if token_ids and token_ids[0] < self._vocab_size else _WRONG


def _planned(
    plan: StepPlan, draft: ModelDraft, guesses: Sequence[int], num_drafts: int
) -> PlannedRequest:
    """The next pass of one request: over what is unknown at first, then over the last guess."""
    start, tokens = draft.start, draft.tokens
    if guesses:
        start, tokens = start + len(tokens) + len(guesses) - 1, (guesses[-1],)
    sample = None
    if draft.sample is not None and num_drafts:
        sample = _after(draft.sample, guesses)
    name = plan.requests[draft.place].request_id
    return PlannedRequest(name, start, tokens, draft.block_ids, sample)


def _after(spec: SampleSpec, guesses: Sequence[int]) -> SampleSpec:
    """How the token is drawn that follows these guesses."""
    if not guesses:
        return spec
    history = (*spec.history, *guesses) if spec.history else ()
    return spec._replace(position=spec.position + len(guesses), history=history)


def _with_guesses(plan: StepPlan, guesses: dict[int, list[int]]) -> StepPlan:
    requests = list(plan.requests)
    for place, drafts in guesses.items():
        if drafts:
            planned = requests[place]
            known = planned.tokens[: len(planned.tokens) - planned.num_drafts]
            requests[place] = planned._replace(tokens=(*known, *drafts))
    return replace(plan, requests=tuple(requests))
