"""`hotbatch tune`: measure machine and model, search, confirm, and keep what was found.

Joins the rooms: the assembly loads the model, executor/machine measures the ceiling, tuning/
finds the settings, executor/profile keeps them for `hotbatch serve`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hotbatch.assembly import Assembly, assemble, make_speculator
from hotbatch.bench.traces import TraceError, read_azure, read_mooncake
from hotbatch.core.errors import OptionError
from hotbatch.core.service_class import ServiceClass
from hotbatch.engine.host_time import measure_host
from hotbatch.executor.kv_sizing import free_memory_bytes
from hotbatch.executor.profile import Profile, store_profile
from hotbatch.options import EngineOptions
from hotbatch.profiled import measure_ceiling, primed_cost_model
from hotbatch.tuning import (
    PROFILES,
    CurveStepTime,
    Figures,
    Finalist,
    Job,
    Limit,
    Plan,
    Settings,
    Simulator,
    Targets,
    Trial,
    all_pairs,
    best_limit,
    best_plain,
    best_rate,
    choose,
    confirm,
    make_jobs,
    measure_curve,
    num_jobs,
    play_off,
    questions,
    refine,
    report,
    search,
    settings,
    time_limits,
    times_better,
)
from hotbatch.tuning.workload import jobs_of

_CURVE_SECONDS = 20.0
_TRIED_SECONDS = 6.0  # with a number of threads that is only tried
_HOST_SECONDS = 1.0  # of measuring the host's part in a step
_SEARCH_SECONDS = 24.0  # of traffic at the machine's best: a queue takes its time to grow
_LEAST_JOBS, _MOST_JOBS = 40, 1500  # of a workload
_PLAY_SECONDS = 20.0  # of arrivals, each time that a finalist is played to the engine
_LONGEST = 4096  # tokens of a request
_ALL = 0.98  # of the requests were served as promised: nothing tells the settings apart
_CACHES = (2, 4)  # times the usual cache that are tried
_MOST_MEMORY = 0.5  # of what is free, for a cache
# What servers do that are not told anything (vLLM's defaults for sequences and tokens), and the
# same with the tokens of our own default.
_PLAIN_BUDGETS = (2048, 512)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `tune` found. `path` is the profile's, None if it could not be written;
    `guess_seconds` are those of the same answers under each limit of guesses in a step, empty
    where that was not tried."""

    trials: list[Trial]
    finalists: list[Finalist]
    chosen: Finalist
    targets: Targets
    profile: Profile
    path: Path | None
    block_size: int
    guess_seconds: Mapping[Limit, float] = field(default_factory=dict)


def tune(
    options: EngineOptions,
    workload: str,
    *,
    with_engine: bool = True,
    curve_seconds: float = _CURVE_SECONDS,
    search_seconds: float = _SEARCH_SECONDS,
    play_seconds: float = _PLAY_SECONDS,
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
    sample = read_workload(workload, _LEAST_JOBS, longest)
    profiles: dict[int | None, Profile] = {}
    for threads in (None, *machine.other_threads):
        with machine.loaded(threads) as parts:
            seconds = curve_seconds if threads is None else min(curve_seconds, _TRIED_SECONDS)
            profiles[threads] = _measure(parts, seconds, say)
    step_times = {
        threads: CurveStepTime(primed_cost_model(known), known.host_seconds)
        for threads, known in profiles.items()
    }
    count = round(search_seconds * best_rate(step_times[None], sample))
    jobs = read_workload(workload, min(max(count, _LEAST_JOBS), _MOST_JOBS), longest)
    targets = _targets(options)
    simulator = Simulator(machine.info, step_times, jobs, targets)
    say(
        f"Searching for {workload}, {simulator.capacity:.1f} requests a second at best: first "
        f"token within {targets.ttft:.2f} s, then a token each {1e3 * targets.tpot:.0f} ms"
    )
    trials, finalists = _search(simulator, machine, say)
    if with_engine:
        jobs = read_workload(workload, num_jobs(simulator.capacity, play_seconds), longest)
        plan = Plan(jobs, simulator.capacity, play_seconds)
        finalists = _played(machine, plan, finalists, targets, profiles, say)
    chosen = choose(finalists)
    found = chosen.trial.settings
    known = profiles[found.threads]
    guess_seconds: dict[Limit, float] = {}
    if with_engine and options.distances.tokens and options.draft_model is None:
        guess_seconds = _guess_limits(machine, found, known, say)
    machine.unload()
    kept = {} if chosen.is_default else dict(machine.options_of(found))
    limit = best_limit(guess_seconds) if guess_seconds else None
    if limit is not None and options.speculate_max_tokens is None:
        kept["speculate_max_tokens"] = limit
    profile = dataclasses.replace(known, settings=kept, tuned_for=workload)
    path = store_profile(machine.key, profile)
    block_size = machine.info.block_size
    return Outcome(trials, finalists, chosen, targets, profile, path, block_size, guess_seconds)


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
            precision=cast(Any, self.key.precision),  # one for all that is measured
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
        if found.max_chunk:
            options["long_prefill_token_threshold"] = found.max_chunk
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


def _search(
    simulator: Simulator, machine: _Machine, say: Say
) -> tuple[list[Trial], list[Finalist]]:
    """All that was tried, and the finalists: plain batching, the default, the best one."""
    pairs = all_pairs(machine.default)
    trials = search(simulator, candidates=pairs, on_round=_told(say))
    refined = refine(
        simulator,
        trials[0],
        chunks=settings.CHUNKS,
        num_blocks=machine.caches,
        threads=machine.other_threads,
    )
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
    if refined[0].settings != machine.default and refined[0].worth > standard.worth:
        finalists.append(Finalist(refined[0]))
    return [*refined[1:], *(trial for trial in trials if trial not in refined)], finalists


def _told(say: Say) -> Callable[[int, int], None]:
    return lambda num_settings, num_jobs: say(
        f"  {num_settings} settings on {num_jobs} requests, at three loads"
    )


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
    host_seconds = measure_host(parts.engine.executor, parts.config, _HOST_SECONDS)
    say(f"  {1e3 * host_seconds:.2f} ms of the host in each step")
    return Profile(
        ceiling=ceiling,
        made=time.time(),
        is_full=True,
        curve=tuple((*features, seconds) for features, seconds in timed),
        host_seconds=host_seconds,
    )


def _targets(options: EngineOptions) -> Targets:
    promised = options.targets()[ServiceClass.STANDARD]
    return Targets(
        math.inf if promised.ttft is None else promised.ttft,
        math.inf if promised.tpot is None else promised.tpot,
    )


def _played(
    machine: _Machine,
    plan: Plan,
    finalists: Sequence[Finalist],
    targets: Targets,
    profiles: Mapping[int | None, Profile],
    say: Say,
) -> list[Finalist]:
    """The finalists as the real engine has them. Of the two that are first come, first served,
    the one with the better promise; it is there to compare with."""
    plain = max((one for one in finalists if one.is_plain), key=lambda one: one.goodput)
    playing = [one for one in finalists if one is plain or not one.is_plain]
    say(
        f"Playing {len(playing)} of them to the real engine, {plan.rate:.1f} requests a second: "
        f"{_minutes(plan.seconds_of(len(playing)))} at most"
    )

    def tell(finalist: Finalist, left: float) -> None:
        one = finalist.trial.settings
        kind = ", first come first served" if one.is_plain else ""
        cache = ""
        if one.num_blocks is not None and one.num_blocks != machine.default.num_blocks:
            cache = f", {one.num_blocks * machine.info.block_size} tokens of KV"
        chunk = f", {one.max_chunk} of one prompt" if one.max_chunk else ""
        threads = "" if one.threads is None else f", {one.threads} threads"
        say(
            f"  {_minutes(left)} left: {one.max_num_seqs} sequences, "
            f"{one.max_num_batched_tokens} tokens{chunk}{cache}{threads}{kind}"
        )

    def play(settings: Settings, jobs: Sequence[Job], rate: float) -> Figures:
        with machine.loaded(settings.threads) as parts:
            return confirm(
                parts.engine.executor,
                settings,
                jobs,
                rate,
                targets,
                lambda: primed_cost_model(profiles[settings.threads]),
            )

    played = play_off(playing, plan, play, tell)
    return [one for one in finalists if one not in playing] + played


def _guess_limits(
    machine: _Machine, found: Settings, known: Profile, say: Say
) -> dict[Limit, float]:
    """Seconds of the same answers under each limit of guesses, at the chosen settings."""
    say("Trying limits for guessed tokens on the real engine, some ten seconds")
    with machine.loaded(found.threads) as parts:
        executor = parts.engine.executor
        return time_limits(
            executor,
            found.config(executor.info),
            [_prompt(parts, question) for question in questions()],
            lambda: primed_cost_model(known),
            make_speculator,
        )


def _prompt(parts: Assembly, question: str) -> list[int]:
    if parts.chat_template is None:
        return parts.tokenizer.encode(question)
    text = parts.chat_template.render([{"role": "user", "content": question}])
    return parts.tokenizer.encode(text, add_special_tokens=False)


def _minutes(seconds: float) -> str:
    return f"{seconds // 60:.0f}:{seconds % 60:02.0f}"


# ---- what a person sees


def table(outcome: Outcome) -> str:
    """The finalists, a line each, and what the chosen one brings against plain batching."""
    lines = [report.table(outcome.finalists, outcome.chosen, outcome.block_size)]
    plain = best_plain(outcome.finalists)
    if plain is not None:
        times = times_better(outcome.chosen, plain)
        lines.append(
            f"{times:.2f} times the goodput of first-come batching"
            if times < math.inf
            else "First-come batching served nobody as promised"
        )
    if outcome.guess_seconds:
        lines.append(report.guess_limits(outcome.guess_seconds))
    if all(finalist.attainment > _ALL for finalist in outcome.finalists):
        lines.append(
            "Every setting kept nearly every promise: tighter targets (--ttft-slo, --tpot-slo) "
            "would tell them apart"
        )
    return "\n".join(lines)


def plot(outcome: Outcome, path: Path) -> None:
    """The frontier: every setting by its throughput and by what it served as promised.

    Raises:
        OptionError: see `report.check_plot`.
    """
    targets = outcome.targets
    title = (
        f"Settings on this machine for {outcome.profile.tuned_for}: first token within "
        f"{targets.ttft:.1f} s, then a token each {1e3 * targets.tpot:.0f} ms"
    )
    report.plot(outcome.trials, outcome.finalists, outcome.chosen, title, path)
