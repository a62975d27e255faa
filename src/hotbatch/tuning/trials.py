"""Trying settings in virtual time: the real scheduler, the fitted curve, the workload.

Rates are shares of what the machine can do at best, so that a search means the same on every
machine: comfortable, full, and more than it can. A setting's worth is its goodput over all
three. First all settings are tried on a short piece of the workload, then the better half on one
twice as long, and so on (successive halving, Jamieson and Talwalkar 2016).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.policies import Policies
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.core.service_class import LatencyTargets
from hotbatch.engine.protocol import ExecutorInfo
from hotbatch.simulator import Simulation, TimeOnlyExecutor
from hotbatch.tuning.curve import CurveStepTime
from hotbatch.tuning.workload import Job

SEATS = (4, 8, 16, 24, 32, 48, 64, 128, 256)
BUDGETS = (32, 64, 128, 256, 512, 1024)
LOADS = (0.7, 1.0, 1.3)  # shares of the most that the machine can do
_SHORT_PIECE = 40  # requests of the first round
_MAX_STEPS = 5_000_000


@dataclass(frozen=True, slots=True)
class Settings:
    """What is searched: requests in a step, and tokens in it."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds to the first token, and for each after it, that a good answer keeps."""

    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What a setting brought: good requests and tokens per second, share of requests as
    promised."""

    goodput: float
    throughput: float
    attainment: float


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting with its figures, one for each load; `worth` is their mean goodput."""

    settings: Settings
    figures: tuple[Figures, ...]

    @property
    def worth(self) -> float:
        return sum(figures.goodput for figures in self.figures) / len(self.figures)


class Simulator:
    """One machine and workload, on which settings are tried."""

    def __init__(
        self,
        info: ExecutorInfo,
        step_time: CurveStepTime,
        policies: Callable[[], Policies],
        jobs: Sequence[Job],
        targets: Targets,
    ) -> None:
        self._info = info
        self._step_time = step_time
        self._policies = policies
        self.jobs = jobs
        self.targets = targets
        self.capacity = best_rate(step_time, jobs)

    def run(self, settings: Settings, rate: float, count: int) -> Figures:
        """The first `count` requests at `rate` a second."""
        info = self._info
        config = SchedulerConfig(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            enable_prefix_caching=False,
        )
        executor = TimeOnlyExecutor(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            step_time=self._step_time,
        )
        simulation = Simulation(Scheduler(config, self._policies(), CostModel()), executor)
        jobs = self.jobs[:count]
        for index, job in enumerate(jobs):
            simulation.arrive(request_of(index, job, job.time / rate, self.targets))
        outcomes = simulation.run(_MAX_STEPS)
        heard = [
            (job, outcome.arrival, outcome.token_times)
            for job, outcome in zip(jobs, outcomes.values(), strict=True)
        ]
        return figures_of(heard, self.targets)

    def trial(self, settings: Settings, count: int) -> Trial:
        return Trial(
            settings, tuple(self.run(settings, load * self.capacity, count) for load in LOADS)
        )


def search(
    simulator: Simulator,
    *,
    candidates: Sequence[Settings] | None = None,
    keep: int = 3,
    on_trial: Callable[[int, int], None] = lambda done, total: None,
) -> list[Trial]:
    """The settings in order of worth, best first; the first `keep` were tried on all requests."""
    left = list(candidates or all_settings())
    count = min(_SHORT_PIECE, len(simulator.jobs))
    ranked: list[Trial] = []
    losers: list[Trial] = []
    while True:
        ranked = []
        for index, settings in enumerate(left):
            ranked.append(simulator.trial(settings, count))
            on_trial(index + 1, len(left))
        ranked.sort(key=lambda trial: -trial.worth)
        if len(ranked) <= keep and count == len(simulator.jobs):
            return ranked + losers
        half = max(keep, len(ranked) // 2) if len(ranked) > keep else len(ranked)
        losers = ranked[half:] + losers
        left = [trial.settings for trial in ranked[:half]]
        count = min(2 * count, len(simulator.jobs))


def all_settings() -> list[Settings]:
    return [Settings(seats, budget) for seats in SEATS for budget in BUDGETS if budget >= seats]


def request_of(index: int, job: Job, arrival: float, targets: Targets) -> Request:
    return Request(
        f"r{index}",
        [(index * 7919 + position * 31) % 97 for position in range(job.num_prompt)],
        SamplingParams(temperature=0.0, max_tokens=job.num_output, ignore_eos=True),
        seed=index,
        arrival=arrival,
        targets=LatencyTargets(targets.ttft, targets.tpot),
    )


def figures_of(heard: Sequence[tuple[Job, float, Sequence[float]]], targets: Targets) -> Figures:
    """Args: `heard` has, for each job, its arrival and the time of each of its tokens."""
    num_good = num_tokens = 0
    end = 0.0
    begin = min(arrival for _, arrival, _ in heard)
    for job, arrival, times in heard:
        num_tokens += len(times)
        if not times:
            continue
        end = max(end, times[-1])
        gaps = len(times) - 1
        is_quick = times[0] - arrival <= targets.ttft
        is_steady = gaps == 0 or (times[-1] - times[0]) / gaps <= targets.tpot
        num_good += len(times) == job.num_output and is_quick and is_steady
    seconds = max(end - begin, 1e-9)
    return Figures(num_good / seconds, num_tokens / seconds, num_good / len(heard))


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
