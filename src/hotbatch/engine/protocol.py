"""What the engine asks of an executor and of a clock; real and simulated ones both fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hotbatch.core.plan import StepPlan, StepResult
from hotbatch.engine.ceiling import ModelWork


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """Facts about a loaded model that the scheduler and the server need.

    `num_blocks` KV blocks of `block_size` tokens each are usable; `max_model_len` is the
    longest prompt plus output in tokens; `description` is what the ready line shows. `work` is
    what a step needs at least, None where nobody knows.
    """

    model_name: str
    precision: str
    device: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    description: str = ""
    work: ModelWork | None = None

    @property
    def context_len(self) -> int:
        """Tokens that one request can have at most: the model's limit, or the whole cache."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


class Executor(Protocol):
    """Turns a StepPlan into sampled tokens. Called from the engine's thread only."""

    @property
    def info(self) -> ExecutorInfo: ...

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the step. A fault of one request goes into its RequestResult.error;
        an exception means that the whole step failed."""
        ...

    def close(self) -> None: ...


class Clock(Protocol):
    """Seconds since some fixed start, never going back."""

    def now(self) -> float: ...
