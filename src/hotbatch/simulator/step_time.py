"""Step-time models: how long a simulated step takes, in seconds."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from hotbatch.core.plan import PlannedRequest, StepPlan

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
        per_pair: seconds to compute one pair of a token and one that it attends to.
    """

    overhead: float = 0.0005
    weights: float = 0.004
    per_token: float = 0.0003
    per_context_token: float = 7e-7
    per_pair: float = 0.0

    def __call__(self, plan: StepPlan) -> float:
        context = sum(request.context_len for request in plan.requests)
        memory = self.weights + self.per_context_token * context
        compute = self.per_token * plan.num_tokens
        if self.per_pair:
            compute += self.per_pair * sum(num_pairs(request) for request in plan.requests)
        return self.overhead + max(memory, compute)


@dataclass(frozen=True, slots=True)
class MeasuredStepTime:
    """What was measured for a few numbers of tokens, with straight lines between, and
    attention on top.

    Attention is a request's own: reading its context or computing its pairs, whichever is
    slower. Sampling costs each request that samples.

    Attributes:
        tokens, seconds: the measured curve without attention and sampling, tokens ascending;
            at least two points. Its last piece goes on for ever.
        per_context_token, per_pair: as in `RooflineStepTime`.
        per_sample: seconds a request that samples costs beyond its token.
        overhead: seconds a step costs beyond what was measured.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    per_context_token: float
    per_pair: float
    per_sample: float = 0.0
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if len(self.tokens) < 2 or len(self.tokens) != len(self.seconds):
            raise ValueError("a measured curve needs two points or more, as many seconds as tokens")
        if any(a >= b for a, b in zip(self.tokens, self.tokens[1:], strict=False)):
            raise ValueError(f"tokens must ascend, got {self.tokens}")

    def __call__(self, plan: StepPlan) -> float:
        attention = 0.0
        num_tokens = num_samples = 0
        for request in plan.requests:
            num_tokens += len(request.tokens)
            num_samples += request.sample is not None
            attention += max(
                self.per_context_token * request.context_len, self.per_pair * num_pairs(request)
            )
        rest = self.overhead + self.per_sample * num_samples
        return rest + self.curve(num_tokens) + attention

    def curve(self, num_tokens: int) -> float:
        """Seconds of a step with so many tokens, without attention."""
        index = min(max(bisect_right(self.tokens, num_tokens), 1), len(self.tokens) - 1)
        x0, x1 = self.tokens[index - 1], self.tokens[index]
        y0, y1 = self.seconds[index - 1], self.seconds[index]
        return y0 + (y1 - y0) * (max(num_tokens, self.tokens[0]) - x0) / (x1 - x0)


@dataclass(frozen=True, slots=True)
class UnsteadyStepTime:
    """Another model's time, with a spread as real machines have it: the same at every run.

    Attributes:
        steady: the model.
        spread: sigma of the logarithm; 0.05 makes two of three steps fall within 5 percent.
        hiccup: chance that a step takes `hiccup_seconds` more.
    """

    steady: StepTime
    spread: float = 0.05
    hiccup: float = 0.0
    hiccup_seconds: float = 0.0
    seed: int = 0

    def __call__(self, plan: StepPlan) -> float:
        rng = random.Random(f"{self.seed}:{plan.step_id}")
        seconds = self.steady(plan) * rng.lognormvariate(0.0, self.spread)
        return seconds + (self.hiccup_seconds if rng.random() < self.hiccup else 0.0)


def num_pairs(request: PlannedRequest) -> int:
    """Pairs of a token computed and one that it attends to, itself included."""
    count = len(request.tokens)
    return count * request.start + count * (count + 1) // 2
