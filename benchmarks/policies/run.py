"""Ways of batching compared: goodput over rates from 0.1 to 1.2 of saturation, in virtual time.

    python benchmarks/policies/run.py [--traces FOLDER] [--quick] [--json out.json]
        [--plot-dir out/policies] [--machines cpu,h200] [--workloads code,conversation]
        [--mixes mixed,one] [--rates 0.1,...,1.2] [--seeds 3] [--first-seed 1]
        [--step-json step.json] [--real]

The scheduler is the real one; only the machine is simulated (policy_machine.py says how), so
a run of many minutes takes seconds. Each seed is another piece of the trace, sent to every way
of batching alike. Saturation is what first-come batching with the largest budget serves when
all of the piece is offered at once. Goodput counts requests whose first token and whose tokens
after it both came within their targets; who is refused or cut off is not good.

Static and first-come batching are each tried at several sizes; the best at *each* rate stands
for them, which is more than anybody could configure. Without --traces, traces of the same
shape are made up. --real repeats a few points with the real engine and model in this process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import describe
from policy_machine import Machine, cpu, h200, measured_cpu
from policy_point import saturation, simulate
from policy_report import plot_all, table
from policy_variant import Variant, variants
from policy_workload import Ask, asks, load_trace

RATES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)


@dataclass(frozen=True, slots=True)
class Setting:
    """All that a worker needs to make a workload anew, the same every time."""

    machine: str
    trace: str
    mix: str
    seed: int
    traces: Path | None
    step_json: Path | None
    shrink: int


@dataclass(frozen=True, slots=True)
class Job:
    setting: Setting
    variant: str
    fraction: float


def machine_of(setting: Setting) -> Machine:
    if setting.machine == "h200":
        machine = h200()
    else:
        machine = measured_cpu(setting.step_json) if setting.step_json else cpu()
    return replace(machine, num_requests=max(50, machine.num_requests // setting.shrink))


@lru_cache(maxsize=2)
def workload(setting: Setting) -> tuple[Machine, list[Ask], float]:
    """The machine, what is asked of it, and its saturation in requests per second."""
    machine = machine_of(setting)
    trace = load_trace(setting.trace, setting.traces)
    asked = asks(trace, machine, count=machine.num_requests, mix=setting.mix, seed=setting.seed)
    reference = next(v for v in reversed(variants(machine)) if v.family == "first-come")
    return machine, asked, saturation(machine, reference, asked)


def run_job(job: Job) -> dict[str, Any]:
    machine, asked, saturated = workload(job.setting)
    variant = next(v for v in variants(machine) if v.name == job.variant)
    started = time.perf_counter()
    figures = simulate(machine, variant, asked, job.fraction * saturated, seed=job.setting.seed)
    return {
        "machine": job.setting.machine,
        "trace": job.setting.trace,
        "mix": job.setting.mix,
        "seed": job.setting.seed,
        "variant": variant.name,
        "family": variant.family,
        "fraction": job.fraction,
        "saturation": saturated,
        "wall_seconds": time.perf_counter() - started,
        **figures,
    }


def jobs_of(arguments: argparse.Namespace) -> list[Job]:
    """One workload after the other, so that a worker makes each once."""
    jobs = []
    for machine in arguments.machines:
        for trace in arguments.workloads:
            for mix in arguments.mixes:
                for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
                    setting = Setting(
                        machine, trace, mix, seed,
                        arguments.traces, arguments.step_json, arguments.shrink,
                    )  # fmt: skip
                    names = [v.name for v in chosen(machine_of(setting), arguments)]
                    jobs += [
                        Job(setting, name, fraction)
                        for name in names
                        for fraction in arguments.rates
                    ]
    return jobs


def chosen(machine: Machine, arguments: argparse.Namespace) -> list[Variant]:
    every = variants(machine)
    if not arguments.only:
        return every
    kept = [
        variant
        for variant in every
        if any(variant.name.startswith(name) or variant.family == name for name in arguments.only)
    ]
    if not kept:
        names = ", ".join(variant.name for variant in every)
        raise SystemExit(f"--only {','.join(arguments.only)} names none of: {names}")
    return kept


def sweep(jobs: Sequence[Job], processes: int) -> list[dict[str, Any]]:
    if processes == 1:
        return [run_job(job) for job in _told(jobs, len(jobs))]
    # Forking would copy whatever threads the parent has; a fresh interpreter is safe.
    with get_context("spawn").Pool(processes) as pool:
        return list(_told(pool.imap(run_job, jobs, chunksize=4), len(jobs)))


def _told(items, total: int):
    """Passes items on and says on a terminal how far it is."""
    for index, item in enumerate(items, start=1):
        if sys.stderr.isatty() and (index % 10 == 0 or index == total):
            end = "\n" if index == total else ""
            print(f"\r{index} of {total} runs", end=end, file=sys.stderr, flush=True)
        yield item


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--traces", type=Path, help="folder with the traces; else made-up ones")
    parser.add_argument("--machines", type=names, default=["cpu", "h200"])
    parser.add_argument("--workloads", type=names, default=["code", "conversation"])
    parser.add_argument("--mixes", type=names, default=["mixed"], help="of classes: mixed, one")
    parser.add_argument("--rates", type=_fractions, default=RATES, help="shares of saturation")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--only", type=names, default=[], help="names or families of policies")
    parser.add_argument("--shrink", type=int, default=1, help="send 1/N of the requests")
    parser.add_argument("--step-json", type=Path, help="of benchmarks/step/step_time.py")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="two rates, one seed, short pieces")
    parser.add_argument("--real", action="store_true", help="a few points on the real engine")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot-dir", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.rates, arguments.seeds = (0.7, 1.1), 1
        arguments.shrink = max(arguments.shrink, 6)
    for kind, known in (
        ("machines", ("cpu", "h200")),
        ("workloads", ("code", "conversation", "mooncake")),
        ("mixes", ("mixed", "one")),
    ):
        for name in getattr(arguments, kind):
            if name not in known:
                parser.error(f"--{kind} knows {', '.join(known)}, not {name!r}")
    return arguments


def _fractions(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    hidden = ("json", "plot_dir")
    settings = {key: value for key, value in vars(arguments).items() if key not in hidden}
    print(describe(**settings), flush=True)
    rows = sweep(jobs_of(arguments), arguments.processes)
    print(table(rows))
    record: dict[str, Any] = {
        "machine": describe(**settings).splitlines(),
        "saturation": "first-come, largest budget, all offered at once",
        "runs": rows,
    }
    if arguments.real:
        from policy_real import compare, real_table

        record["real"] = compare(arguments)
        print(real_table(record["real"]))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
    if arguments.plot_dir:
        for path in plot_all(rows, arguments.plot_dir):
            print(f"plot: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
