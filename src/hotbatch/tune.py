"""`hotbatch tune`: measure machine and model, search, confirm, and keep what was found.

Joins the rooms: the assembly loads the model, executor/machine measures the ceiling, tuning/
finds the settings, executor/profile keeps them for `hotbatch serve`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotbatch.assembly import Assembly, assemble
from hotbatch.bench.traces import TraceError, read_azure, read_mooncake
from hotbatch.core.errors import OptionError
from hotbatch.core.policies import full_policies
from hotbatch.core.service_class import ServiceClass
from hotbatch.executor.profile import Profile, store_profile
from hotbatch.options import EngineOptions
from hotbatch.profiled import measure_ceiling, primed_cost_model
from hotbatch.tuning import (
    PROFILES,
    CurveStepTime,
    Figures,
    Job,
    Settings,
    Targets,
    Trial,
    confirm,
    make_jobs,
    measure_curve,
    search,
)
from hotbatch.tuning.trials import BUDGETS, SEATS, Simulator
from hotbatch.tuning.workload import jobs_of

_CURVE_SECONDS = 20.0
_HOST_SECONDS = 0.0005  # of a step, until a server has measured its own
_NUM_JOBS = 160
_CONFIRM_SECONDS = 15.0  # of arrivals for each finalist
_CONFIRM_ROUNDS = 2  # in turn
_LEAST_JOBS, _MOST_JOBS = 8, 400  # played to each finalist
_LONGEST = 4096  # tokens of a request
_LOAD = 1.0  # of the machine's best, at which finalists are compared
_BETTER = 1.03  # times the default's goodput that a finalist must reach to be kept

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Finalist:
    """A setting with what the simulator promised and what the engine brought at full load;
    `real` is None where nothing was confirmed."""

    trial: Trial
    real: Figures | None
    is_default: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `tune` found. `path` is the profile's, None if it could not be written."""

    trials: Sequence[Trial]
    finalists: Sequence[Finalist]
    chosen: Finalist
    targets: Targets
    profile: Profile
    path: Path | None


def tune(
    options: EngineOptions,
    workload: str,
    *,
    with_engine: bool = True,
    curve_seconds: float = _CURVE_SECONDS,
    confirm_seconds: float = _CONFIRM_SECONDS,
    num_jobs: int = _NUM_JOBS,
    say: Say = lambda text: None,
) -> Outcome:
    """Find the settings that serve most requests of a workload as promised, and keep them.

    Args:
        options: of the server that is to be tuned; good is what keeps the targets of its standard
            class.
        workload: one of PROFILES, or the file of a recorded trace (Azure's CSV, Mooncake's JSONL).
        with_engine: confirm the finalists on the real engine.

    Raises:
        OptionError: the workload is neither.
    """
    default = Settings(options.max_num_seqs, options.max_num_batched_tokens or 512)
    widest = dataclasses.replace(
        options, max_num_seqs=max(SEATS), max_num_batched_tokens=max(BUDGETS)
    )
    say("Loading the model")
    parts = assemble(widest)
    try:
        longest = min(_LONGEST, parts.info.context_len - 1)
        jobs = read_workload(workload, num_jobs, longest)
        profile = _measure(parts, curve_seconds, say)
        step_time = CurveStepTime(primed_cost_model(profile), profile.host_seconds)
        targets = _targets(options)
        say(
            f"Searching for {workload}: first token within {targets.ttft:.2f} s, then a token "
            f"each {1e3 * targets.tpot:.0f} ms"
        )
        simulator = Simulator(parts.info, step_time, full_policies, jobs, targets)
        trials = search(simulator)
        standard = simulator.trial(default, len(jobs))
        finalists = [Finalist(standard, None, True)]
        finalists += [
            Finalist(trial, None, False) for trial in trials[:2] if trial.settings != default
        ]
        if with_engine:
            for _ in range(_CONFIRM_ROUNDS):
                finalists = [
                    _confirmed(parts, simulator, finalist, profile, confirm_seconds, say)
                    for finalist in finalists
                ]
        chosen = choose(finalists)
        settings = {} if chosen.is_default else dataclasses.asdict(chosen.trial.settings)
        profile = dataclasses.replace(profile, settings=settings, tuned_for=workload)
        path = store_profile(parts.known.key, profile)
        return Outcome(trials, finalists, chosen, targets, profile, path)
    finally:
        parts.engine.stop()


def choose(finalists: Sequence[Finalist]) -> Finalist:
    """The default, unless another is clearly better."""

    def goodput(finalist: Finalist) -> float:
        return finalist.trial.worth if finalist.real is None else finalist.real.goodput

    default = next(finalist for finalist in finalists if finalist.is_default)
    best = max(finalists, key=goodput)
    return best if goodput(best) > _BETTER * goodput(default) else default


def read_workload(workload: str, count: int, longest: int) -> list[Job]:
    """A profile's requests, or a trace's.

    Raises:
        OptionError: there is neither a profile nor a file of this name, or it cannot be read.
    """
    if workload in PROFILES:
        return make_jobs(PROFILES[workload], count, longest)
    path = Path(workload)
    try:
        rows = (read_azure if path.suffix == ".csv" else read_mooncake)(path)
    except (OSError, TraceError) as error:
        raise OptionError(
            f"--workload must be one of {', '.join(PROFILES)}, or a trace: {error}.",
            param="--workload",
        ) from error
    return jobs_of([(row.time, row.input_len, row.output_len) for row in rows[:count]], longest)


def _measure(parts: Assembly, seconds: float, say: Say) -> Profile:
    say("Measuring the machine: memory, compute")
    ceiling = measure_ceiling(parts.options, parts.known.key.precision, full=True)
    say(
        f"  {ceiling.bandwidth / 1e9:.1f} GB/s, {ceiling.compute / 1e9:.0f} G operations/s in "
        f"linear layers, {ceiling.attention_compute / 1e9:.0f} in attention"
    )
    say("Measuring the model: steps of every size")
    timed = measure_curve(parts.engine.executor, seconds, max(BUDGETS))
    return Profile(
        ceiling=ceiling,
        made=time.time(),
        is_full=True,
        curve=tuple((*features, seconds) for features, seconds in timed),
        host_seconds=_HOST_SECONDS,
    )


def _targets(options: EngineOptions) -> Targets:
    promised = options.targets()[ServiceClass.STANDARD]
    return Targets(
        math.inf if promised.ttft is None else promised.ttft,
        math.inf if promised.tpot is None else promised.tpot,
    )


def _confirmed(
    parts: Assembly,
    simulator: Simulator,
    finalist: Finalist,
    profile: Profile,
    seconds: float,
    say: Say,
) -> Finalist:
    """Played once more; the better of its runs counts, as a neighbour can only make it worse."""
    settings = finalist.trial.settings
    say(
        f"Confirming {settings.max_num_seqs} sequences, {settings.max_num_batched_tokens} tokens "
        "on the real engine"
    )
    rate = _LOAD * simulator.capacity
    count = int(min(_MOST_JOBS, max(_LEAST_JOBS, seconds * rate), len(simulator.jobs)))
    real = confirm(
        parts.engine.executor,
        settings,
        simulator.jobs[:count],
        rate,
        simulator.targets,
        full_policies,
        lambda: primed_cost_model(profile),
    )
    before = finalist.real
    if before is not None and before.goodput >= real.goodput:
        return finalist
    return dataclasses.replace(finalist, real=real)


# ---- what a person sees


def table(outcome: Outcome) -> str:
    """The finalists, a line each."""
    lines = [
        f"{'sequences':>10}{'tokens':>8}{'goodput':>10}{'as promised':>13}{'tokens/s':>10}"
        f"{'real goodput':>14}{'real tokens/s':>15}"
    ]
    for finalist in outcome.finalists:
        settings, figures = finalist.trial.settings, finalist.trial.figures
        kept = sum(figure.attainment for figure in figures) / len(figures)
        tokens = max(figure.throughput for figure in figures)
        real = ("", "")
        if finalist.real is not None:
            real = (f"{finalist.real.goodput:.2f}/s", f"{finalist.real.throughput:.0f}")
        marks = (" default" if finalist.is_default else "") + (
            "  <- chosen" if finalist is outcome.chosen else ""
        )
        lines.append(
            f"{settings.max_num_seqs:>10}{settings.max_num_batched_tokens:>8}"
            f"{finalist.trial.worth:>8.2f}/s{100 * kept:>11.0f} %{tokens:>10.0f}"
            f"{real[0]:>14}{real[1]:>15}{marks}"
        )
    return "\n".join(lines)


def plot(outcome: Outcome, path: Path) -> None:
    """The frontier: every setting by its throughput and by the share served as promised.

    Raises:
        OptionError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise OptionError(
            "--plot needs matplotlib: pip install 'hotbatch[bench]'.", param="--plot"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    shades = pyplot.get_cmap("viridis")
    seats = sorted({trial.settings.max_num_seqs for trial in outcome.trials})
    for index, count in enumerate(seats):
        points = [trial for trial in outcome.trials if trial.settings.max_num_seqs == count]
        axes.scatter(
            [max(figures.throughput for figures in trial.figures) for trial in points],
            [trial.worth for trial in points],
            color=shades(index / max(1, len(seats) - 1)),
            label=f"{count} sequences",
            s=[10 + 4 * trial.settings.max_num_batched_tokens**0.5 for trial in points],
            alpha=0.7,
        )
    for index, finalist in enumerate(outcome.finalists):
        throughput = max(figures.throughput for figures in finalist.trial.figures)
        settings = finalist.trial.settings
        name = "default" if finalist.is_default else "best"
        axes.annotate(
            f"{name}: {settings.max_num_seqs} x {settings.max_num_batched_tokens}",
            (throughput, finalist.trial.worth),
            textcoords="offset points",
            xytext=(-150, -20 - 16 * index),
            arrowprops={"arrowstyle": "-", "lw": 0.6},
        )
    axes.set(
        xlabel="tokens per second at the highest load",
        ylabel="good requests per second, mean over loads",
        title=(
            f"Settings on this machine for {outcome.profile.tuned_for}: first token within "
            f"{outcome.targets.ttft:.1f} s, a token each {1e3 * outcome.targets.tpot:.0f} ms"
        ),
    )
    axes.title.set_fontsize(10)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8, title="dot size: tokens in a step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
