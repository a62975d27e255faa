"""Parts for engine tests: the real scheduler on a simulated machine, and ears for the events."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.plan import FinishReason, StepPlan, StepResult, TokenEvent
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.engine import Engine
from hotbatch.simulator import ConstantStepTime, SimulatedExecutor, TokenModel, VirtualClock

STEP_SECONDS = 0.25


class ProbedExecutor(SimulatedExecutor):
    """Remembers the plans it got; before each step the test may look, wait or raise."""

    def __init__(self, clock: VirtualClock | None) -> None:
        super().__init__(
            num_blocks=64,
            block_size=4,
            max_model_len=256,
            step_time=ConstantStepTime(STEP_SECONDS),
            clock=clock,
        )
        self.plans: list[StepPlan] = []
        self.before_step: Callable[[StepPlan], None] = lambda plan: None
        self.num_closed = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.before_step(plan)
        return super().run(plan)

    def close(self) -> None:
        super().close()
        self.num_closed += 1


class Recorder:
    """Hears the engine's events; `wait_for_end` blocks until a request has ended."""

    def __init__(self) -> None:
        self.deliveries: list[list[TokenEvent]] = []
        self._changed = threading.Condition()

    def __call__(self, events: list[TokenEvent]) -> None:
        with self._changed:
            self.deliveries.append(events)
            self._changed.notify_all()

    @property
    def events(self) -> list[TokenEvent]:
        return [event for events in list(self.deliveries) for event in events]

    def tokens(self, request_id: str) -> list[int]:
        return [
            t for event in self.events if event.request_id == request_id for t in event.token_ids
        ]

    def ends(self, request_id: str) -> list[FinishReason]:
        return [
            event.finish_reason
            for event in self.events
            if event.request_id == request_id and event.finish_reason is not None
        ]

    def wait_for_end(self, request_id: str) -> FinishReason:
        with self._changed:
            assert self._changed.wait_for(lambda: self.ends(request_id), 30), "no end came"
        return self.ends(request_id)[0]


def solo_tokens(request: Request) -> list[int]:
    """What the request yields when it is alone."""
    return TokenModel().continuation(request, 0)[0]


def make_request(
    request_id: str = "a", *, prompt: int = 5, tokens: int = 4, seed: int = 1, start: int = 0
) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(request_id, list(range(start, start + prompt)), params, seed=seed)


def make_scheduler(**options: object) -> Scheduler:
    settings = {"num_blocks": 64, "block_size": 4, "max_model_len": 256, **options}
    return Scheduler(SchedulerConfig(**settings))


class Rig:
    """An engine with its parts in reach. `clock` is virtual unless `real_time`."""

    def __init__(
        self, *, real_time: bool = False, scheduler: Scheduler | None = None, **options: object
    ) -> None:
        self.clock = None if real_time else VirtualClock(100.0)
        self.scheduler = scheduler or make_scheduler()
        self.executor = ProbedExecutor(self.clock)
        self.heard = Recorder()
        self.engine = Engine(
            self.scheduler, self.executor, self.clock, deliver=self.heard, **options
        )

    def run_until_idle(self) -> int:
        """Ticks until no step is left; returns the number of steps."""
        steps = 0
        while self.engine.tick():
            steps += 1
            assert steps < 10_000
        return steps
