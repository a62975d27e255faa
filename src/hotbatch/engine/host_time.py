"""What the host adds to a step: planning, booking and delivering, measured with no client there.

A few made-up requests go through an engine of their own on the idle executor, tick by tick. What
its steps take beyond the model's time is what every step will take beyond it, before HTTP.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.policies import full_policies
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.engine.clock import MonotonicClock
from hotbatch.engine.engine import Engine
from hotbatch.engine.protocol import Clock, Executor
from hotbatch.engine.step_stats import StepStats

_MAX_REQUESTS = 16  # of a middling batch
_NUM_PROMPT, _NUM_OUTPUT = 8, 24


def measure_host(
    executor: Executor, config: SchedulerConfig, seconds: float, clock: Clock | None = None
) -> float:
    """Median seconds of the host for each step of a batch that decodes.

    The executor must be idle, and what its cache holds is lost.

    Args:
        config: of the server's scheduler.
        seconds: after which no more steps are made; one at least is.

    Returns:
        0.0 if nothing could be run: the machine holds no such request.
    """
    clock = MonotonicClock() if clock is None else clock
    num_tokens = _NUM_PROMPT + _NUM_OUTPUT
    num_blocks = -(-num_tokens // config.block_size) + 1
    count = min(_MAX_REQUESTS, config.max_num_seqs, config.num_blocks // num_blocks)
    if num_tokens > config.context_len or count == 0:
        return 0.0
    config = replace(
        config, batching="continuous", enable_prefix_caching=False, prefill_ahead=False
    )
    engine = Engine(Scheduler(config, full_policies()), executor, clock, deliver=lambda _: None)
    steps: list[StepStats] = []
    engine.step_observers.append(steps.append)
    for index in range(count):
        engine.submit(
            Request(
                f"host-{index}",
                [(index + position) % executor.info.vocab_size for position in range(_NUM_PROMPT)],
                SamplingParams(temperature=0.0, max_tokens=_NUM_OUTPUT, ignore_eos=True),
                seed=index,
            )
        )
    until = clock.now() + seconds
    while engine.tick() and clock.now() < until:
        pass
    # The first step starts everything, and is like no other.
    return median(
        step.plan_seconds + step.commit_seconds + step.deliver_seconds
        for step in steps[1:] or steps
    )
