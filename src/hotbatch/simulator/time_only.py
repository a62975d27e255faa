"""An executor that only takes time: for long simulations that ask when, not what.

`SimulatedExecutor` hashes every token of every context to catch a scheduler that mixes them
up; at a million prompt tokens a run that is most of the work. This one checks nothing, and
every sampled token is the same. Requests end by `max_tokens`, so their lengths are given.
"""

from __future__ import annotations

from hotbatch.core.plan import RequestResult, StepPlan, StepResult
from hotbatch.engine.protocol import ExecutorInfo
from hotbatch.simulator.clock import VirtualClock
from hotbatch.simulator.step_time import ConstantStepTime, StepTime

TOKEN = 1


class TimeOnlyExecutor:
    """Fits `hotbatch.engine.protocol.Executor`; drafts are never accepted."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_model_len: int = 4096,
        step_time: StepTime | None = None,
        clock: VirtualClock | None = None,
    ) -> None:
        self.clock = clock or VirtualClock()
        self.steps_run = 0
        self.busy_seconds = 0.0
        self._step_time = step_time or ConstantStepTime()
        self._info = ExecutorInfo(
            model_name="time only",
            precision="none",
            device="simulated",
            vocab_size=2**31,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            description="simulated executor that only takes time",
        )

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def close(self) -> None:
        pass

    def run(self, plan: StepPlan) -> StepResult:
        seconds = self._step_time(plan)
        self.clock.advance(seconds)
        self.steps_run += 1
        self.busy_seconds += seconds
        return StepResult(
            plan.step_id,
            tuple(
                RequestResult(request.request_id, () if request.sample is None else (TOKEN,))
                for request in plan.requests
            ),
            seconds,
        )
