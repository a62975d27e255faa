"""What tuning and the online loops lose against the best fixed setting, known in hindsight.

    python benchmarks/tuning/regret.py [--workloads chat,documents,bursts] [--count 720]
        [--ttft-slo 1000] [--tpot-slo 100] [--seed 1] [--measure] [--json found.json]
    python benchmarks/tuning/regret.py --real found.json [--loads 0.9,1.2] [--seconds 20]

In virtual time, with a fitted model of the machine, so every run has the same result. For each
workload `tune`'s search finds a setting on one piece of the traffic; another piece, which the
search has not seen, is then served with it, and with every pair of sequence limit and token
budget of a grid, in three ways:

- first come, first served, with chunks of the budget's size: what others do;
- by the full scheduler held still: it knows deadlines and who is late, but nothing moves the
  settings while it serves, chunks are as large as the budget and seats as many as the limit;
- with the online loops, for which the pair only bounds what they choose: chunks by slack, seats
  by what keeps promises.

The first two are fixed. The aims, strict as the best of the grid is chosen on the very piece that
counts:

- on each workload tuned is within 5 % of the best of the whole grid;
- over all of them it is better than any one fixed setting (mean of the goodput relative to the
  best of each workload).

Exits with 1 if one is missed. Besides: the best single pair with the loops, and the widest one,
tuned for nothing, which shows what the loops do without any search.

--measure fits the model to this machine now instead of taking the curve of docs/performance.md.
--real plays what an earlier run found (its tuned setting, the best of the grid, the best fixed
one, and first-come batching as vLLM has it by default) to the real engine, in turn at each load.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "policies"))

from machine import describe
from policy_machine import cpu

from hotbatch.assembly import assemble
from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.policies import Policies, full_policies
from hotbatch.engine.protocol import ExecutorInfo
from hotbatch.options import EngineOptions
from hotbatch.simulator import TimeOnlyExecutor
from hotbatch.tuning import (
    PROFILES,
    CurveStepTime,
    Figures,
    Settings,
    Targets,
    confirm,
    make_jobs,
    measure_curve,
    over_loads,
    search,
)
from hotbatch.tuning.settings import all_pairs
from hotbatch.tuning.trials import Simulator

MOST_REGRET = 0.05
GRID_SEATS = (8, 16, 32, 64, 128, 256)
GRID_BUDGETS = (64, 128, 256, 512, 1024, 2048)
WIDEST = Settings(256, 2048)
VLLM = Settings(256, 2048, is_plain=True)
_LONGEST = 4096  # tokens of a request
_HOST_SECONDS = 0.0005
_NUM_BLOCKS = 1280
_CURVE_SECONDS = 15.0
_SEARCHED = 24.0  # seconds of traffic at the machine's best, as in `hotbatch tune`


@dataclass(frozen=True, slots=True)
class Still(Settings):
    """The full scheduler with its online loops held still: chunks and seats are as large as set."""

    def policies(self) -> Policies:
        return full_policies(online=False)


@dataclass(frozen=True, slots=True)
class Setup:
    """All that a worker needs to make a simulator anew, the same every time."""

    workload: str
    count: int
    seed: int
    targets: Targets
    curve: tuple[tuple[float, ...], ...]


def grid() -> list[Settings]:
    """All pairs: first come, first served; the full scheduler held still; with its loops."""
    pairs = [(seats, budget) for seats in GRID_SEATS for budget in GRID_BUDGETS if budget >= seats]
    return [make(*pair) for make in (_first_come, Still, Settings) for pair in pairs]


def _first_come(seats: int, budget: int) -> Settings:
    return Settings(seats, budget, is_plain=True)


def is_first_come(settings: Settings) -> bool:
    return settings.is_plain


def is_still(settings: Settings) -> bool:
    return isinstance(settings, Still)


def has_loops(settings: Settings) -> bool:
    return not is_first_come(settings) and not is_still(settings)


def documented_curve() -> tuple[tuple[float, ...], ...]:
    """Steps of the machine of docs/performance.md, as `measure_curve` would have timed them."""
    executor = TimeOnlyExecutor(num_blocks=_NUM_BLOCKS, step_time=cpu().step_time)
    timed = measure_curve(executor, 0.0, max(GRID_BUDGETS), clock=executor.clock.now)
    return tuple((*features, seconds) for features, seconds in timed)


def fitted(curve: Sequence[Sequence[float]]) -> CostModel:
    model = CostModel()
    for _ in range(3):
        for *features, seconds in curve:
            model.observe(StepFeatures(*map(int, features)), seconds, is_live=False)
    return model


@cache
def simulator(setup: Setup) -> Simulator:
    info = ExecutorInfo(
        model_name="fitted", precision="int8", device="simulated", vocab_size=49152,
        max_model_len=8192, num_blocks=_NUM_BLOCKS, block_size=16,
    )  # fmt: skip
    step_time = CurveStepTime(fitted(setup.curve), _HOST_SECONDS)
    jobs = make_jobs(PROFILES[setup.workload], setup.count, _LONGEST, setup.seed)
    return Simulator(info, {None: step_time}, jobs, setup.targets)


def evaluate(job: tuple[Setup, Settings]) -> Figures:
    setup, settings = job
    return over_loads(simulator(setup).trial(settings, setup.count).figures)


def tuned(setup: Setup) -> Settings:
    """What `hotbatch tune` would search out, on another piece of the workload."""
    searched = replace(setup, seed=0, count=round(_SEARCHED * simulator(setup).capacity))
    machine = simulator(searched)
    return search(machine, candidates=all_pairs(Settings(64, 512)))[0].settings


def words(settings: Settings) -> str:
    kind = "full, still" if isinstance(settings, Still) else "full"
    if settings.is_plain:
        kind = "first-come"
    return f"{kind} {settings.max_num_seqs} x {settings.max_num_batched_tokens}"


def row(name: str, settings: Settings, figures: Figures, best: float) -> str:
    return (
        f"  {name:24}{words(settings):24}{figures.goodput:>8.3f}/s"
        f"{100 * figures.attainment:>6.0f} %{figures.throughput:>8.0f} tokens/s"
        f"{figures.goodput / best:>8.3f}"
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one workload: every setting's figures, and which was tuned."""

    workload: str
    tuned: Settings
    figures: dict[Settings, Figures]

    def best(self, kind: Callable[[Settings], bool] = lambda settings: True) -> Settings:
        """The best of the grid, or of one kind."""
        candidates = filter(kind, grid())
        return max(candidates, key=lambda settings: self.figures[settings].goodput)

    @property
    def most(self) -> float:
        return self.figures[self.best()].goodput

    def relative(self, settings: Settings) -> float:
        return self.figures[settings].goodput / self.most

    @property
    def ways(self) -> list[tuple[str, Settings]]:
        """Those that are shown, each with its name."""
        return [
            ("tuned", self.tuned),
            ("best of the grid", self.best()),
            ("best held still", self.best(is_still)),
            ("best first-come", self.best(is_first_come)),
            ("vLLM's default", VLLM),
            ("widest, not tuned", WIDEST),
        ]

    def table(self) -> str:
        lines = [row(name, one, self.figures[one], self.most) for name, one in self.ways]
        return "\n".join([self.workload, *lines])


def run_virtual(setups: Sequence[Setup]) -> list[Outcome]:
    with get_context("fork").Pool() as pool:
        found = pool.map(tuned, setups)
        tried = [list(dict.fromkeys([*grid(), VLLM, WIDEST, own])) for own in found]
        jobs = [(setup, one) for setup, all_ in zip(setups, tried, strict=True) for one in all_]
        figures = iter(pool.map(evaluate, jobs, chunksize=4))
    return [
        Outcome(setup.workload, own, {settings: next(figures) for settings in all_})
        for setup, own, all_ in zip(setups, found, tried, strict=True)
    ]


def summed(outcomes: Sequence[Outcome], settings: Settings | None = None) -> float:
    """Goodput relative to each workload's best, mean; of the tuned ones if none is named."""
    values = [outcome.relative(settings or outcome.tuned) for outcome in outcomes]
    return sum(values) / len(values)


def best_single(outcomes: Sequence[Outcome], kind: Callable[[Settings], bool]) -> Settings:
    """The one of a kind that serves all workloads best."""
    return max(filter(kind, grid()), key=lambda settings: summed(outcomes, settings))


def report(outcomes: Sequence[Outcome]) -> int:
    """Prints all; returns the number of aims that were missed."""
    missed = 0
    for outcome in outcomes:
        print(outcome.table())
        regret = 1.0 - outcome.relative(outcome.tuned)
        missed += regret > MOST_REGRET
        verdict = "MISSED" if regret > MOST_REGRET else "met"
        print(f"  {verdict}: regret {regret:.1%} (5 %)\n")
    own = summed(outcomes)
    print(f"over all workloads tuned has {own:.3f} of the best of each")
    for name, kind in (("first-come", is_first_come), ("held still", is_still)):
        fixed = best_single(outcomes, kind)
        other = summed(outcomes, fixed)
        missed += own <= other
        verdict = "met" if own > other else "MISSED"
        print(f"  {verdict}: the best single setting, {name}, {other:.3f} ({words(fixed)})")
    looped = best_single(outcomes, has_loops)
    print(
        f"  not fixed, one pair with the loops for all: {summed(outcomes, looped):.3f} "
        f"({words(looped)}) at best, {summed(outcomes, WIDEST):.3f} with the widest"
    )
    return missed


def run_real(setups: Sequence[Setup], options: argparse.Namespace) -> None:
    """Plays what was found to the real engine."""
    parts = assemble(
        EngineOptions(precision="int8", max_num_seqs=256, max_num_batched_tokens=max(GRID_BUDGETS)),
        as_tuned=False,
    )
    print(f"on the real engine: {parts.info.description}")
    found = json.loads(options.real.read_text(encoding="utf-8"))["found"]
    for setup in setups:
        ways = {
            (Still if name == "best held still" else Settings)(**fields): name
            for name, fields in reversed(found[setup.workload])
        }
        machine = simulator(setup)
        fresh = partial(fitted, setup.curve)
        played: dict[Settings, list[Figures]] = {settings: [] for settings in ways}
        for load in options.loads:
            rate = load * machine.capacity
            count = min(len(machine.jobs), int(options.seconds * rate))
            for settings, name in ways.items():
                figures = confirm(
                    parts.engine.executor,
                    settings,
                    machine.jobs[:count],
                    rate,
                    setup.targets,
                    fresh,
                )
                played[settings].append(figures)
                print(
                    f"{setup.workload:10}load {load:<5}{name:18}{words(settings):24}"
                    f"{figures.goodput:6.2f} good/s, {100 * figures.attainment:3.0f} % of {count} "
                    f"as promised, {figures.throughput:.0f} tokens/s",
                    flush=True,
                )
    parts.engine.stop()


def measured_curve() -> tuple[tuple[float, ...], ...]:
    parts = assemble(
        EngineOptions(precision="int8", max_num_seqs=256, max_num_batched_tokens=max(GRID_BUDGETS)),
        as_tuned=False,
    )
    timed = measure_curve(parts.engine.executor, _CURVE_SECONDS, max(GRID_BUDGETS))
    parts.engine.stop()
    return tuple((*features, seconds) for features, seconds in timed)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=list(PROFILES))
    parser.add_argument("--count", type=int, default=720, help="requests of each workload")
    parser.add_argument("--ttft-slo", type=float, default=1000.0, help="milliseconds")
    parser.add_argument("--tpot-slo", type=float, default=100.0, help="milliseconds")
    parser.add_argument("--seed", type=int, default=1, help="of the piece that counts")
    parser.add_argument("--measure", action="store_true", help="fit the model to this machine")
    parser.add_argument("--curve", type=Path, help="take the curve of an earlier --json")
    parser.add_argument("--real", type=Path, help="play what that file says was found")
    parser.add_argument("--loads", type=lambda text: [float(load) for load in text.split(",")],
                        default=[0.9, 1.2], help="of --real")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals, of --real")
    parser.add_argument("--json", type=Path, help="keep the curve, what was found, all figures")
    options = parser.parse_args(argv)
    curve = documented_curve()
    if options.measure:
        curve = measured_curve()
    elif options.curve or options.real:
        kept = json.loads((options.curve or options.real).read_text(encoding="utf-8"))
        curve = tuple(tuple(step) for step in kept["curve"])
    targets = Targets(options.ttft_slo / 1e3, options.tpot_slo / 1e3)
    setups = [
        Setup(name, options.count, options.seed, targets, curve) for name in options.workloads
    ]
    print(
        describe(
            count=options.count,
            seed=options.seed,
            ttft=f"{options.ttft_slo} ms",
            tpot=f"{options.tpot_slo} ms",
            curve="measured" if options.measure else options.curve or "of docs/performance.md",
        )
    )
    if options.real:
        run_real(setups, options)
        return 0
    outcomes = run_virtual(setups)
    missed = report(outcomes)
    if options.json:
        kept = {
            "curve": curve,
            "found": {
                outcome.workload: [(name, asdict(one)) for name, one in outcome.ways]
                for outcome in outcomes
            },
            "figures": [
                (outcome.workload, words(settings), *astuple(figures))
                for outcome in outcomes
                for settings, figures in outcome.figures.items()
            ],
        }
        options.json.write_text(json.dumps(kept), encoding="utf-8")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
