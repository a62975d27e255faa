"""What the scheduler costs: microseconds of `plan` and of `commit` in a decode step.

For each number of running requests and each number of waiting ones behind them, every running
request decodes one token a step. Printed are the median and the 90th percentile over the
steps, and the median cost of an arrival (`add`) and of a departure from the queue (`cancel`).
With `--policies full` half of the running requests are interactive and the waiting ones are of
the standard and batch classes, of four tenants, so that nobody displaces anybody. `--parts`
says where the time goes, by a profile of the same steps; profiling slows small functions down
more than large ones, so these are shares and no times. Results of steps are made up, as no
executor is involved.

    python benchmarks/overhead/plan_commit.py [--policies first-come,full] [--parts]
        [--running 1,...,1024] [--waiting 10,...,10000] [--steps 200] [--prompt 128]
        [--json out.json] [--require 256:10000:1000]

`--require RUNNING:WAITING:MICROSECONDS` fails unless the median of both together is below.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import platform
import pstats
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotbatch.core import (
    Request,
    RequestResult,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
)
from hotbatch.core.policies import full_policies
from hotbatch.core.service_class import LatencyTargets, ServiceClass

RUNNING = (1, 4, 16, 64, 256, 1024)
WAITING = (10, 1000, 10_000)
BLOCK_SIZE = 16
STEP_SECONDS = 0.01
_TARGETS = {
    ServiceClass.INTERACTIVE: LatencyTargets(1.0, 0.1),
    ServiceClass.STANDARD: LatencyTargets(5.0, 0.2),
    ServiceClass.BATCH: LatencyTargets(),
}

# Where a profiled function belongs: by its name, else by its module.
_PART_OF_FUNCTION = {
    "_enter_decodes": "decode rows",
    "enter": "decode rows",
    "_fill": "decode rows",
    "_book": "commit",
    "_book_tokens": "commit",
    "commit": "commit",
    "append": "commit",
}
_PART_OF_MODULE = {
    "class_queue": "queue",
    "waiting_queue": "queue",
    "fairness": "queue",
    "roster": "seats and blocks",
    "seating": "seats and blocks",
    "preemption": "seats and blocks",
    "kv_cache": "seats and blocks",
    "block_pool": "seats and blocks",
    "prefix_cache": "prefix cache",
    "step_time": "cost model",
    "cost_model": "cost model",
    "least_squares": "cost model",
    "shares": "prompts",
    "step": "decode rows",
    "plan": "decode rows",
}


class Bed:
    """A scheduler whose requests all decode, with others queued behind them."""

    def __init__(
        self, policies: str, num_running: int, num_waiting: int, prompt_len: int, steps: int
    ) -> None:
        self.now = 0.0
        self._full = policies == "full"
        self._prompt_len = prompt_len
        self._output_len = steps + 128
        blocks_each = (prompt_len + self._output_len) // BLOCK_SIZE + 2
        config = SchedulerConfig(
            num_blocks=num_running * blocks_each + 1,
            block_size=BLOCK_SIZE,
            max_model_len=prompt_len + self._output_len,
            max_num_seqs=num_running,
            max_num_batched_tokens=max(2048, num_running),
            ageing=None,
        )
        self.scheduler = Scheduler(config, full_policies() if self._full else None)
        for index in range(num_running):
            self.scheduler.add(self.request(index, runs=True))
        while True:
            plan = self.plan()
            self.commit(plan, made_up_result(plan))
            if len(plan.requests) == num_running and plan.num_tokens == num_running:
                break
        for index in range(num_running, num_running + num_waiting):
            self.scheduler.add(self.request(index, runs=False))
        for _ in range(20):  # the cost model learns what a step costs
            plan = self.plan()
            self.commit(plan, made_up_result(plan))

    def request(self, index: int, *, runs: bool) -> Request:
        classes = (
            (ServiceClass.INTERACTIVE, ServiceClass.STANDARD)
            if runs
            else (ServiceClass.STANDARD, ServiceClass.BATCH)
        )
        service_class = classes[index % 2] if self._full else ServiceClass.STANDARD
        return Request(
            f"request-{index}",
            [(index * 7919 + position) % 50_000 for position in range(self._prompt_len)],
            SamplingParams(max_tokens=self._output_len),
            seed=index,
            arrival=self.now,
            tenant=f"tenant-{index % 4}",
            service_class=service_class,
            targets=_TARGETS[service_class],
        )

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan(self.now)
        assert plan is not None
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        self.now += STEP_SECONDS
        self.scheduler.commit(plan, result, self.now)


def made_up_result(plan: StepPlan) -> StepResult:
    return StepResult(
        plan.step_id,
        tuple(
            RequestResult(request.request_id, (17,) if request.sample is not None else ())
            for request in plan.requests
        ),
        STEP_SECONDS,
    )


def measure(bed: Bed, steps: int) -> dict[str, float]:
    """Microseconds of each part, as medians and 90th percentiles."""
    plans: list[float] = []
    commits: list[float] = []
    adds: list[float] = []
    cancels: list[float] = []
    clock = time.perf_counter
    for step in range(steps):
        newcomer = bed.request(10**6 + step, runs=False)
        begin = clock()
        bed.scheduler.add(newcomer)
        added = clock()
        bed.scheduler.cancel(newcomer.request_id)
        cancelled = clock()
        adds.append((added - begin) * 1e6)
        cancels.append((cancelled - added) * 1e6)

        begin = clock()
        plan = bed.plan()
        plans.append((clock() - begin) * 1e6)
        result = made_up_result(plan)
        begin = clock()
        bed.commit(plan, result)
        commits.append((clock() - begin) * 1e6)
    both = [plan + commit for plan, commit in zip(plans, commits, strict=True)]
    return {
        "plan_p50": statistics.median(plans),
        "plan_p90": _p90(plans),
        "commit_p50": statistics.median(commits),
        "commit_p90": _p90(commits),
        "both_p50": statistics.median(both),
        "add_p50": statistics.median(adds),
        "cancel_p50": statistics.median(cancels),
    }


def _p90(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=10)[-1] if len(values) > 1 else values[0]


def profile(bed: Bed, steps: int) -> dict[str, float]:
    """Shares of the time of `plan` and `commit` by part, largest first."""
    profiler = cProfile.Profile()
    for _ in range(steps):
        profiler.enable()
        plan = bed.plan()
        profiler.disable()
        result = made_up_result(plan)
        profiler.enable()
        bed.commit(plan, result)
        profiler.disable()
    return parts_of(pstats.Stats(profiler))


def parts_of(stats: pstats.Stats) -> dict[str, float]:
    """Time spent in functions themselves, summed by part. What is built in counts for the part
    that called it."""
    sums: dict[str, float] = defaultdict(float)
    entries: dict[tuple[str, int, str], Any] = stats.stats  # type: ignore[attr-defined]
    for function, (_, _, own, _, callers) in entries.items():
        if "_lsprof" in function[2]:
            continue  # the profiler itself
        if function[0] == "~":
            for caller, (_, _, caller_own, _) in callers.items():
                sums[part_of(caller)] += caller_own
        else:
            sums[part_of(function)] += own
    whole = sum(sums.values()) or 1.0
    return {part: sums[part] / whole for part in sorted(sums, key=sums.__getitem__, reverse=True)}


def part_of(function: tuple[str, int, str]) -> str:
    file, _, name = function
    if name in _PART_OF_FUNCTION:
        return _PART_OF_FUNCTION[name]
    module = Path(file).stem
    return _PART_OF_MODULE.get(module, "scheduler, other" if "core" in file else "other")


def machine() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
            models = [line.split(":", 1)[1].strip() for line in cpuinfo if "model name" in line]
    except OSError:
        models = []
    name = models[0] if models else platform.processor() or platform.machine()
    return f"{name}, Python {sys.version.split()[0]}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    counts = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--policies", type=lambda t: t.split(","), default=["first-come", "full"])
    parser.add_argument("--running", type=counts, default=list(RUNNING))
    parser.add_argument("--waiting", type=counts, default=list(WAITING))
    parser.add_argument("--steps", type=int, default=200, help="steps to measure")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--parts", action="store_true", help="where the time goes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--require", metavar="RUNNING:WAITING:MICROSECONDS")
    arguments = parser.parse_args(argv)
    for name in arguments.policies:
        if name not in ("first-come", "full"):
            parser.error(f"--policies knows first-come and full, not {name!r}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    print(machine())
    print(f"{arguments.steps} decode steps after prompts of {arguments.prompt} tokens; us")
    print(
        "policies   running waiting  plan p50    p90  commit p50    p90     both  a request"
        "     add  cancel"
    )
    rows = []
    for policies in arguments.policies:
        for num_waiting in arguments.waiting:
            for num_running in arguments.running:
                bed = Bed(policies, num_running, num_waiting, arguments.prompt, 3 * arguments.steps)
                gc.collect()
                row: dict[str, Any] = {
                    "policies": policies,
                    "running": num_running,
                    "waiting": num_waiting,
                    **measure(bed, arguments.steps),
                }
                print(
                    f"{policies:10} {num_running:7d} {num_waiting:7d} {row['plan_p50']:9.1f} "
                    f"{row['plan_p90']:6.1f} {row['commit_p50']:11.1f} {row['commit_p90']:6.1f} "
                    f"{row['both_p50']:8.1f} {row['both_p50'] / num_running:10.2f} "
                    f"{row['add_p50']:7.1f} {row['cancel_p50']:7.1f}",
                    flush=True,
                )
                if arguments.parts:
                    row["parts"] = profile(bed, arguments.steps)
                    shares = ", ".join(f"{part} {s:.0%}" for part, s in row["parts"].items())
                    print(f"{'':11}{shares}")
                rows.append(row)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))
    return _verdict(rows, arguments.require) if arguments.require else 0


def _verdict(rows: Sequence[dict[str, Any]], require: str) -> int:
    running, waiting, limit = (float(part) for part in require.split(":"))
    matching = [row for row in rows if (row["running"], row["waiting"]) == (running, waiting)]
    if not matching:
        print(f"--require {require}: that point was not measured")
        return 1
    for row in matching:
        if row["both_p50"] > limit:
            print(f"too slow: {row['policies']} takes {row['both_p50']:.0f} us, not {limit:.0f}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
