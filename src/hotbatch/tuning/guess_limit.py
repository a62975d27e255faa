"""How many guessed tokens a step may have: settled on the real engine.

How often guesses come true is a matter of texts, which no workload of lengths has, and what they
cost is priced by the very curve that a simulator would run on, so there it could only agree with
itself. The engine shows whether the prices are right: it answers the same requests under each
limit, in turn, so many rounds. Half of them repeat a list, where most guesses are right, and half
write freely, where few are; few run at a time, as where many do hardly any guess pays. What is
answered is the same whatever is guessed, so the times can be compared as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from statistics import median

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.cost_model import CostModel
from hotbatch.core.policies import full_policies
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.core.speculation import Drafter
from hotbatch.engine.protocol import Executor

Limit = int | None
"""Guessed tokens in a step; None for as many as pay."""

LIMITS: tuple[Limit, ...] = (None, 8, 0)  # as many as pay, few, none
_ROUNDS = 4
_AT_A_TIME = 4  # requests
NUM_OUTPUT = 96  # tokens of each answer: about a list
_QUICKER = 0.95  # of the time without a limit, that one must stay below to be taken
_THINGS = ("bolts", "lamps", "chairs", "kettles", "ropes", "clocks", "saws", "bells")
_TOWNS = ("Vienna", "Oslo", "Lyon", "Porto")


def questions() -> list[str]:
    """What is asked: every other one repeats what it was given."""
    rng = Random(0)
    asked = []
    for town in _TOWNS:
        rows = [
            f"- {rng.randrange(2, 99)} {thing} from {town}, shelf {rng.randrange(10, 99)}"
            for thing in rng.sample(_THINGS, 6)
        ]
        asked.append("Write this list once more, exactly as it is.\n\n" + "\n".join(rows))
        asked.append(f"Tell me a story that begins on a rainy morning in {town}.")
    return asked


def time_limits(
    executor: Executor,
    config: SchedulerConfig,
    prompts: Sequence[Sequence[int]],
    cost_model: Callable[[], CostModel],
    drafter: Callable[[CostModel], Drafter],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Limit, float]:
    """Median seconds to answer all of the prompts under each limit.

    The executor must be idle, and what its cache holds is lost.

    Args:
        config: of the server's scheduler, with the settings that were chosen.
        cost_model, drafter: make new ones for each time, so that nothing is remembered.
    """
    config = replace(config, max_num_seqs=min(_AT_A_TIME, config.max_num_seqs))
    seconds: dict[Limit, list[float]] = {limit: [] for limit in LIMITS}
    for number in range(_ROUNDS):
        for limit in LIMITS if number % 2 else LIMITS[::-1]:
            model = cost_model()
            scheduler = Scheduler(
                replace(config, max_draft_tokens=limit), full_policies(), model, drafter(model)
            )
            began = clock()
            _answer(executor, scheduler, prompts, clock)
            seconds[limit].append(clock() - began)
    return {limit: median(times) for limit, times in seconds.items()}


def _answer(
    executor: Executor,
    scheduler: Scheduler,
    prompts: Sequence[Sequence[int]],
    clock: Callable[[], float],
) -> None:
    context = scheduler.config.context_len
    num_output = min(NUM_OUTPUT, context // 2)
    for index, prompt in enumerate(prompts):
        scheduler.add(
            Request(
                f"guess-{index}",
                list(prompt[: context - num_output]),
                SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True),
                seed=index,
                arrival=clock(),
            )
        )
    while scheduler.has_work:
        plan = scheduler.plan(clock())
        assert plan is not None, "requests are left, yet nothing is planned"
        scheduler.commit(plan, executor.run(plan), clock())


def best_limit(seconds: Mapping[Limit, float]) -> Limit:
    """No limit, unless one is clearly quicker."""
    best = min(seconds, key=lambda limit: seconds[limit])
    return best if seconds[best] < _QUICKER * seconds[None] else None
