"""`hotbatch tune`: measure machine and model, search, confirm, and keep what was found.

Joins the rooms: the assembly loads the model, executor/machine measures the ceiling, tuning/
finds the settings, executor/profile keeps them for `hotbatch serve`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotbatch.assembly import Assembly, assemble
from hotbatch.bench.traces import TraceError, read_azure, read_mooncake
from hotbatch.core.errors import OptionError
from hotbatch.core.service_class import ServiceClass
from hotbatch.executor.kv_sizing import free_memory_bytes
from hotbatch.executor.profile import Profile, store_profile
from hotbatch.options import EngineOptions
from hotbatch.profiled import measure_ceiling, primed_cost_model
from hotbatch.tuning import (
    PROFILES,
    CurveStepTime,
    Finalist,
    Job,
    Settings,
    Simulator,
    Targets,
    Trial,
    all_pairs,
    choose,
    confirm,
    make_jobs,
    measure_curve,
    over_loads,
    refine,
    report,
    search,
    settings,
)
from hotbatch.tuning.workload import jobs_of

_CURVE_SECONDS = 20.0
_TRIED_SECONDS = 6.0  # with a number of threads that is only tried
_HOST_SECONDS = 0.0005  # of a step, until a server has measured its own
_NUM_JOBS = 240
_CONFIRM_SECONDS = 15.0  # of arrivals for each finalist
_CONFIRM_ROUNDS = 2  # in turn
_LEAST_JOBS, _MOST_JOBS = 8, 400  # played to each finalist
_LONGEST = 4096  # tokens of a request
# Of the machine's best: nearly full, and more than it can. Below, all settings are alike.
_CONFIRM_LOADS = (0.9, 1.2)
_ALL = 0.98  # of the requests were served as promised: nothing tells the settings apart
_CACHES = (2, 4)  # times the usual cache that are tried
_MOST_MEMORY = 0.5  # of what is free, for a cache
# What servers do that are not told anything (vLLM's defaults for sequences and tokens), and the
# same with the tokens of our own default.
_PLAIN_BUDGETS = (2048, 512)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `tune` found. `path` is the profile's, None if it could not be written."""

    trials: list[Trial]
    finalists: list[Finalist]
    chosen: Finalist
    targets: Targets
    profile: Profile
    path: Path | None
    block_size: int


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
            class. Threads and the cache's size are searched where they are left open.
        workload: one of PROFILES, or the file of a recorded trace (Azure's CSV, Mooncake's JSONL).
        with_engine: confirm the finalists on the real engine.

    Raises:
        OptionError: the workload is neither.
    """
    say("Loading the model")
    machine = _Machine(options)
    longest = min(_LONGEST, machine.info.context_len - 1)
    jobs = read_workload(workload, num_jobs, longest)
    profiles: dict[int | None, Profile] = {}
    for threads in (None, *machine.other_threads):
        with machine.loaded(threads) as parts:
            seconds = curve_seconds if threads is None else min(curve_seconds, _TRIED_SECONDS)
            profiles[threads] = _measure(parts, seconds, say)
    targets = _targets(options)
    say(
        f"Searching for {workload}: first token within {targets.ttft:.2f} s, then a token "
        f"each {1e3 * targets.tpot:.0f} ms"
    )
    step_times = {
        threads: CurveStepTime(primed_cost_model(known), known.host_seconds)
        for threads, known in profiles.items()
    }
    simulator = Simulator(machine.info, step_times, jobs, targets)
    trials, finalists = _search(simulator, machine)
    if with_engine:
        for _ in range(_CONFIRM_ROUNDS):
            finalists = [
                _confirmed(machine, simulator, finalist, profiles, confirm_seconds, say)
                for finalist in finalists
            ]
    machine.unload()
    chosen = choose(finalists)
    found = chosen.trial.settings
    profile = dataclasses.replace(
        profiles[found.threads],
        settings={} if chosen.is_default else machine.options_of(found),
        tuned_for=workload,
    )
    path = store_profile(machine.key, profile)
    block_size = machine.info.block_size
    return Outcome(trials, finalists, chosen, targets, profile, path, block_size)


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


class _Machine:
    """The model on this machine, with as many threads as asked for; one at a time is loaded.

    The cache is the largest that is tried: a setting with a smaller one uses a part of it.

    Attributes:
        info: of the executor with the largest cache.
        key: of the profile that a server with these options looks for.
        default: how that server serves if nothing is tuned.
        caches: other sizes of the cache to try, in blocks.
        other_threads: other numbers of threads to try.
    """

    def __init__(self, options: EngineOptions) -> None:
        usual = assemble(options, as_tuned=False)
        self.key = usual.known.key
        num_blocks = usual.info.num_blocks
        self._block_bytes = _block_bytes(usual)
        usual.engine.stop()
        budget = options.max_num_batched_tokens or max(512, options.max_num_seqs)
        self.default = Settings(options.max_num_seqs, budget, num_blocks)
        self.caches = []
        if options.kv_cache_memory_bytes is None and self._block_bytes:
            most = int(_MOST_MEMORY * free_memory_bytes()) // self._block_bytes
            self.caches = [factor * num_blocks for factor in _CACHES if factor * num_blocks <= most]
        self.other_threads: tuple[int, ...] = ()
        if options.threads is None and options.device == "cpu":
            from hotbatch.executor.cpu_executor import usable_cpus

            # One less leaves a core to the host.
            self.other_threads = tuple({usable_cpus() - 1} - {0})
        self._options = dataclasses.replace(
            options,
            max_num_seqs=max(*settings.SEATS, options.max_num_seqs),
            max_num_batched_tokens=max(*settings.BUDGETS, *_PLAIN_BUDGETS, budget),
            kv_cache_memory_bytes=self._bytes_of(max(self.caches, default=num_blocks)),
        )
        self._parts: Assembly | None = None
        self._threads: int | None = None
        with self.loaded(None) as parts:
            self.info = parts.info

    @contextmanager
    def loaded(self, threads: int | None) -> Iterator[Assembly]:
        """Stays loaded until another number of threads is asked for."""
        if self._parts is None or threads != self._threads:
            self.unload()
            self._threads = threads
            changed = threads or self._options.threads
            self._parts = assemble(
                dataclasses.replace(self._options, threads=changed), as_tuned=False
            )
        yield self._parts

    def unload(self) -> None:
        if self._parts is not None:
            self._parts.engine.stop()
        self._parts = None

    def options_of(self, found: Settings) -> Mapping[str, Any]:
        """The settings as options of `serve`, those that differ from the default."""
        options: dict[str, Any] = {
            "max_num_seqs": found.max_num_seqs,
            "max_num_batched_tokens": found.max_num_batched_tokens,
        }
        if found.num_blocks is not None and found.num_blocks != self.default.num_blocks:
            options["kv_cache_memory_bytes"] = self._bytes_of(found.num_blocks)
        if found.threads is not None:
            options["threads"] = found.threads
        return options

    def _bytes_of(self, num_blocks: int) -> int | None:
        return num_blocks * self._block_bytes or None


def _block_bytes(parts: Assembly) -> int:
    """Of a KV block; 0 where the executor does not say."""
    work = parts.info.work
    return 0 if work is None else round(work.kv_bytes * parts.info.block_size)


def _search(simulator: Simulator, machine: _Machine) -> tuple[list[Trial], list[Finalist]]:
    """All that was tried, and whom to confirm: plain batching, the default, the best two."""
    trials = search(simulator, candidates=all_pairs(machine.default))
    refined = refine(simulator, trials[0], num_blocks=machine.caches, threads=machine.other_threads)
    everything = len(simulator.jobs)
    standard = simulator.trial(machine.default, everything)
    finalists = [
        Finalist(
            simulator.trial(
                dataclasses.replace(
                    machine.default,
                    max_num_seqs=256,
                    max_num_batched_tokens=budget,
                    is_plain=True,
                ),
                everything,
            )
        )
        for budget in _PLAIN_BUDGETS
    ]
    finalists.append(Finalist(standard, is_default=True))
    best = list(dict.fromkeys([refined[0], *trials[:2]]))[:2]
    finalists += [Finalist(trial) for trial in best if trial.settings != machine.default]
    return [*refined[1:], *(trial for trial in trials if trial not in refined)], finalists


def _measure(parts: Assembly, seconds: float, say: Say) -> Profile:
    threads = parts.options.threads
    say("Measuring the machine: memory, compute" + (f"; {threads} threads" if threads else ""))
    ceiling = measure_ceiling(parts.options, parts.known.key.precision, full=True)
    say(
        f"  {ceiling.bandwidth / 1e9:.1f} GB/s, {ceiling.compute / 1e9:.0f} G operations/s in "
        f"linear layers, {ceiling.attention_compute / 1e9:.0f} in attention"
    )
    say("Measuring the model: steps of every size")
    timed = measure_curve(parts.engine.executor, seconds, max(settings.BUDGETS))
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
    machine: _Machine,
    simulator: Simulator,
    finalist: Finalist,
    profiles: Mapping[int | None, Profile],
    seconds: float,
    say: Say,
) -> Finalist:
    """Played once more."""
    chosen = finalist.trial.settings
    say(
        f"Confirming {chosen.max_num_seqs} sequences, {chosen.max_num_batched_tokens} tokens"
        f"{', first come first served' if chosen.is_plain else ''} on the real engine"
    )
    played = []
    with machine.loaded(chosen.threads) as parts:
        for load in _CONFIRM_LOADS:
            rate = load * simulator.capacity
            count = int(min(_MOST_JOBS, max(_LEAST_JOBS, seconds * rate), len(simulator.jobs)))
            played.append(
                confirm(
                    parts.engine.executor,
                    chosen,
                    simulator.jobs[:count],
                    rate,
                    simulator.targets,
                    lambda: primed_cost_model(profiles[chosen.threads]),
                )
            )
    return dataclasses.replace(finalist, real=(*finalist.real, over_loads(played)))


# ---- what a person sees


def table(outcome: Outcome) -> str:
    """The finalists, a line each, and what the chosen one brings against plain batching."""
    lines = [report.table(outcome.finalists, outcome.chosen, outcome.block_size)]
    plain = [finalist.goodput for finalist in outcome.finalists if finalist.is_plain]
    if plain and max(plain) > 0.0:
        times = outcome.chosen.goodput / max(plain)
        lines.append(f"{times:.2f} times the goodput of the better first-come batching")
    if all(finalist.attainment > _ALL for finalist in outcome.finalists):
        lines.append(
            "Every setting kept nearly every promise: tighter targets (--ttft-slo, --tpot-slo) "
            "would tell them apart"
        )
    return "\n".join(lines)


def plot(outcome: Outcome, path: Path) -> None:
    """The frontier: every setting by its throughput and by what it served as promised.

    Raises:
        OptionError: matplotlib is not installed.
    """
    targets = outcome.targets
    title = (
        f"Settings on this machine for {outcome.profile.tuned_for}: first token within "
        f"{targets.ttft:.1f} s, then a token each {1e3 * targets.tpot:.0f} ms"
    )
    report.plot(outcome.trials, outcome.finalists, outcome.chosen, title, path)
