"""Ten times overload at the door of the real engine, in virtual time: waits keep their limit,
and all is as before soon after. Exact, hence repeatable."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from hotbatch.core.admission import Door, Newcomer, QueueLimits
from hotbatch.core.config import SchedulerConfig
from hotbatch.core.errors import OverloadedError
from hotbatch.core.policies import Policies, full_policies
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.engine import Engine
from hotbatch.engine.step_stats import RequestTimings
from hotbatch.simulator import RooflineStepTime, SimulatedExecutor, VirtualClock

MAX_WAIT = 2.0
BEGIN, END, LAST = 6.0, 16.0, 26.0  # of the overload, and of all arrivals


@dataclass
class Result:
    ended: list[RequestTimings] = field(default_factory=list)
    refused: dict[str, list[float]] = field(default_factory=dict)  # moments, by tenant
    retry_after: list[float] = field(default_factory=list)

    def waits(self, start: float, stop: float, tenant: str = "a") -> list[float]:
        """Sorted times to the first token of those that arrived in between."""
        return sorted(
            timings.first_token - timings.arrival
            for timings in self.ended
            if timings.first_token is not None
            and start <= timings.arrival < stop
            and timings.request_id.startswith(tenant)
        )


def arrivals(rng: random.Random, rate: float, factor: float) -> list[float]:
    now, moments = 1.0, []
    while now < LAST:
        now += rng.expovariate(rate * (factor if BEGIN <= now < END else 1.0))
        moments.append(now)
    return moments


def drive(
    policies: Policies, loads: dict[str, tuple[float, float]], *, seats: int, num_blocks: int
) -> Result:
    """`loads`: usual requests per second and the factor of the overload, by tenant."""
    rng = random.Random(0)
    clock = VirtualClock(1.0)
    executor = SimulatedExecutor(
        num_blocks=num_blocks, step_time=RooflineStepTime(), clock=clock, strict=False
    )
    config = SchedulerConfig(
        num_blocks=num_blocks, max_model_len=4096, max_num_seqs=seats, max_num_batched_tokens=512
    )
    engine = Engine(Scheduler(config, policies), executor, clock, deliver=lambda events: None)
    result = Result()
    engine.request_observers.append(result.ended.append)
    door = Door(QueueLimits(max_wait=MAX_WAIT))
    agenda = sorted(
        (moment, tenant)
        for tenant, (rate, factor) in loads.items()
        for moment in arrivals(rng, rate, factor)
    )
    agenda.reverse()
    while agenda or engine.num_outstanding:
        while agenda and agenda[-1][0] <= clock.now():
            moment, tenant = agenda.pop()
            num_prompt = min(2000, max(5, int(rng.expovariate(1 / 100))))
            try:
                place = door.enter(engine.load(), Newcomer(1, num_prompt, tenant=tenant))
            except OverloadedError as error:
                assert error.retry_after is not None
                result.retry_after.append(error.retry_after)
                result.refused.setdefault(tenant, []).append(moment)
                continue
            num_output = max(1, int(rng.expovariate(1 / 100)))
            request = Request(
                f"{tenant}-{len(agenda)}",
                [rng.randrange(1000) for _ in range(num_prompt)],
                SamplingParams(max_tokens=num_output, ignore_eos=True),
                seed=1,
                arrival=moment,
                tenant=tenant,
            )
            engine.submit(request)
            door.close(place)
        if not engine.tick() and agenda and agenda[-1][0] > clock.now():
            clock.advance_to(agenda[-1][0])
    assert door.num_entering == 0
    return result


@pytest.mark.parametrize(("seats", "num_blocks"), [(32, 4096), (256, 300)])
@pytest.mark.parametrize("policies", [Policies(), full_policies()], ids=["plain", "full"])
def test_waits_keep_their_limit_and_all_is_well_soon_after(
    policies: Policies, seats: int, num_blocks: int
) -> None:
    """Too few seats, or too little memory: whatever it is that lacks."""
    result = drive(policies, {"a": (4.0, 10.0)}, seats=seats, num_blocks=num_blocks)
    before, after = result.waits(1.0, BEGIN), result.waits(END + 5.0, LAST)
    during = result.waits(BEGIN + 3.0, END)
    assert len(result.refused["a"]) > 100
    assert all(BEGIN <= moment < END + 5.0 for moment in result.refused["a"])
    assert all(1.0 <= seconds <= 10.0 for seconds in result.retry_after)
    assert during[len(during) // 2] > 0.5 * MAX_WAIT, "it does not refuse more than it must"
    # How long a request takes is learnt late while the machine fills up, and forecasts of memory
    # leave some of it free.
    assert during[int(0.95 * len(during))] < 2.5 * MAX_WAIT
    assert after[-1] < 2.0 * before[-1] + 0.2
    assert len(after) > 10


def test_a_modest_tenant_is_neither_refused_nor_late() -> None:
    result = drive(full_policies(), {"a": (4.0, 10.0), "b": (2.0, 1.0)}, seats=32, num_blocks=4096)
    assert len(result.refused["a"]) > 100
    assert "b" not in result.refused
    modest = result.waits(BEGIN, END, "b")
    assert modest[len(modest) // 2] < 0.5
