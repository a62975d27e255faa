"""Trying settings in virtual time: the real scheduler, the fitted curve, the workload.

Rates are shares of what the machine can do at best, so that a search means the same on every
machine: comfortable, full, and more than it can. A setting's worth is its goodput over all
three. First all pairs of sequence limit and token budget are tried on a short piece of the
workload, then the better half on one twice as long, and so on (successive halving, Jamieson and
Talwalkar 2016). The winner is then tried with bounds for the part of one prompt, other sizes of
the cache and numbers of threads: of those, most machines want what they have, and each has its
price, so it must be clearly better to be taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from hotbatch.core.cost_model import StepFeatures
from hotbatch.core.scheduler import Scheduler
from hotbatch.engine.protocol import ExecutorInfo
from hotbatch.simulator import Simulation, TimeOnlyExecutor
from hotbatch.tuning.curve import CurveStepTime
from hotbatch.tuning.settings import (
    Figures,
    Heard,
    Settings,
    Targets,
    figures_of,
    over_loads,
    request_id,
    request_of,
)
from hotbatch.tuning.workload import Job

LOADS = (0.7, 1.0, 1.3)  # shares of the most that the machine can do
_SHORTEST = 4  # the part of the requests that is tried in the first round
_MAX_STEPS = 5_000_000
_WORTH_IT = 1.02  # times the goodput for which a bound, a larger cache or other threads are taken


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting with its figures, one for each load, on so many requests; `worth` is their mean
    goodput."""

    settings: Settings
    figures: tuple[Figures, ...]
    num_jobs: int = 0

    @property
    def worth(self) -> float:
        return over_loads(self.figures).goodput

    @property
    def throughput(self) -> float:
        """Tokens per second at the load that brought most."""
        return over_loads(self.figures).throughput

    @property
    def attainment(self) -> float:
        """Share of requests served as promised, over all loads."""
        return over_loads(self.figures).attainment


class Simulator:
    """One machine and workload, on which settings are tried.

    Args:
        info: of the executor, with the largest cache that is tried.
        step_times: by threads; None are those that it has.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        step_times: Mapping[int | None, CurveStepTime],
        jobs: Sequence[Job],
        targets: Targets,
    ) -> None:
        self._info = info
        self._step_times = step_times
        self.jobs = jobs
        self.targets = targets
        self.capacity = best_rate(step_times[None], jobs)

    def run(self, settings: Settings, rate: float, count: int) -> Figures:
        """The first `count` requests at `rate` a second."""
        config = settings.config(self._info)
        executor = TimeOnlyExecutor(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            step_time=self._step_times[settings.threads],
        )
        # A server knows the curve as well, and learns on.
        known = deepcopy(self._step_times[settings.threads].model)
        simulation = Simulation(Scheduler(config, settings.policies(), known), executor)
        jobs = self.jobs[:count]
        for index, job in enumerate(jobs):
            simulation.arrive(request_of(index, job, job.time / rate, self.targets))
        outcomes = simulation.run(_MAX_STEPS)
        heard = [
            Heard(job, outcomes[request_id(index)].arrival, outcomes[request_id(index)].token_times)
            for index, job in enumerate(jobs)
        ]
        return figures_of(heard, self.targets)

    def trial(self, settings: Settings, count: int) -> Trial:
        return Trial(
            settings,
            tuple(self.run(settings, load * self.capacity, count) for load in LOADS),
            count,
        )


def search(
    simulator: Simulator,
    *,
    candidates: Sequence[Settings],
    keep: int = 3,
    on_round: Callable[[int, int], None] = lambda num_settings, num_jobs: None,
) -> list[Trial]:
    """The settings in order of worth, best first; the first `keep` were tried on all requests.

    Args:
        on_round: told how many settings are tried next, on how many requests.
    """
    left = list(candidates)
    count = -(-len(simulator.jobs) // _SHORTEST)
    ranked: list[Trial] = []
    losers: list[Trial] = []
    while True:
        on_round(len(left), count)
        ranked = [simulator.trial(settings, count) for settings in left]
        ranked.sort(key=_place)
        if count == len(simulator.jobs):
            return ranked + losers
        half = max(keep, len(ranked) // 2)
        losers = ranked[half:] + losers
        left = [trial.settings for trial in ranked[:half]]
        count = min(2 * count, len(simulator.jobs))


def _place(trial: Trial) -> tuple[float, int, int]:
    """The best first; of equals the widest, whose bounds leave the loops most room."""
    settings = trial.settings
    return (-trial.worth, -settings.max_num_seqs, -settings.max_num_batched_tokens)


def refine(
    simulator: Simulator,
    best: Trial,
    *,
    chunks: Sequence[int] = (),
    num_blocks: Sequence[int],
    threads: Sequence[int],
) -> list[Trial]:
    """The best so far with bounds for the part of one prompt, largest first; then other sizes of
    the cache, smallest first; and then other threads.

    Returns:
        All that was tried, the winner first: `best` itself where nothing was clearly better.
    """
    tried = [best]
    changes: list[dict[str, Any]] = [
        {"max_chunk": size}
        for size in sorted(chunks, reverse=True)
        if size < best.settings.max_num_batched_tokens
    ]
    changes += [{"num_blocks": count} for count in sorted(num_blocks)]
    changes += [{"threads": count} for count in threads]
    for change in changes:
        trial = simulator.trial(replace(best.settings, **change), len(simulator.jobs))
        tried.append(trial)
        best = _better(best, trial)
    return [best] + [trial for trial in tried if trial is not best]


def _better(best: Trial, trial: Trial) -> Trial:
    return trial if trial.worth > _WORTH_IT * best.worth else best


def best_rate(step_time: CurveStepTime, jobs: Sequence[Job]) -> float:
    """Requests per second of a machine that always decodes in its best batch."""
    model = step_time.model
    prompt = sum(job.num_prompt for job in jobs) / len(jobs)
    output = sum(job.num_output for job in jobs) / len(jobs)
    context = int(prompt + output / 2)
    per_token = min(
        (
            model.predict(StepFeatures(rows, rows, rows * context, rows * context, rows))
            + step_time.host_seconds
        )
        / rows
        for rows in (1, 2, 4, 8, 16, 32, 64)
    )
    size = max(1, int(prompt))
    reading = model.predict(StepFeatures().plus_chunk(0, size, 1)) + step_time.host_seconds
    return 1.0 / (reading + output * per_token)
