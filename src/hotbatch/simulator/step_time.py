"""Step-time models: how long a simulated step takes, in seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hotbatch.core.plan import StepPlan

StepTime = Callable[[StepPlan], float]


@dataclass(frozen=True, slots=True)
class ConstantStepTime:
    """Every step takes equally long: convenient where only the order of things matters."""

    seconds: float = 0.01

    def __call__(self, plan: StepPlan) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class RooflineStepTime:
    """The larger of reading memory and computing, plus a fixed cost.

    A step reads all weights once and the KV of every context; it computes each token once.
    Below the knee the first term rules and one more token is nearly free; past it each costs
    its share of compute (Williams, Waterman, Patterson: "Roofline", CACM 2009).

    Attributes:
        overhead: seconds a step costs whatever it holds.
        weights: seconds to read all weights.
        per_token: seconds to compute one token.
        per_context_token: seconds to read the KV of one token of context.
    """

    overhead: float = 0.0005
    weights: float = 0.004
    per_token: float = 0.0003
    per_context_token: float = 7e-7

    def __call__(self, plan: StepPlan) -> float:
        context = sum(request.context_len for request in plan.requests)
        memory = self.weights + self.per_context_token * context
        return self.overhead + max(memory, self.per_token * plan.num_tokens)
