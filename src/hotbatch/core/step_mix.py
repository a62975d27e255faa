"""What a step is made of: how much of it decodes, guesses or repeats, and who was left out.

Said by the scheduler, which knows it while it fills the step; read by whoever accounts for the
step's time. Nothing is decided by it.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from hotbatch.core.cost_model import StepFeatures
from hotbatch.core.plan import PlannedRequest, StepPlan


class HeldBack(enum.Enum):
    """Why requests wait although they could have been in the step."""

    KV = "kv"  # their blocks are not free, or would soon not be
    SEATS = "seats"  # max_num_seqs run, or a closed batch does not take anybody in


class StepMix(NamedTuple):
    """The parts of a step. A named tuple, as one is made in every step.

    Attributes:
        all: every row that somebody asked for.
        decode: the rows of requests that are past their prompt, with their drafts.
        num_drafts: rows that are guesses.
        num_recomputed: tokens that were computed before and lost with their blocks.
        held_back: why others wait; None if nobody does, or only for their turn in the budget.
        ahead: the rows of guessed requests; in none of the others.
    """

    all: StepFeatures
    decode: StepFeatures
    num_drafts: int = 0
    num_recomputed: int = 0
    held_back: HeldBack | None = None
    ahead: StepFeatures = StepFeatures()

    @classmethod
    def of_plan(cls, plan: StepPlan) -> StepMix:
        """The scheduler's word, or what a plan made by hand shows by itself."""
        if plan.mix is not None:
            return plan.mix
        decode = StepFeatures()
        for request in plan.requests:
            if is_decode(request):
                size = len(request.tokens)
                decode = decode.plus_chunk(request.start, size, 1 + request.num_drafts)
        num_drafts = sum(request.num_drafts for request in plan.requests)
        return cls(StepFeatures.of_plan(plan), decode, num_drafts)


def is_decode(request: PlannedRequest) -> bool:
    """One row past the prompt and its drafts. What was lost and is computed again is not."""
    return (
        request.sample is not None
        and len(request.tokens) == 1 + request.num_drafts
        and request.start >= request.sample.num_prompt
    )
