"""What the scheduler costs: microseconds of `plan` and of `commit` in a decode step.

For each number of running requests and each number of waiting ones behind them, every running
request decodes one token a step. Printed are the median and the 90th percentile over the
steps. Results are made up, as no executor is involved.

    python benchmarks/overhead/plan_commit.py [--steps 200] [--prompt 128]
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import time

from hotbatch.core import (
    Request,
    RequestResult,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
)

RUNNING = (1, 4, 16, 64, 256, 1024)
WAITING = (0, 10_000)
BLOCK_SIZE = 16


def make_scheduler(num_running: int, num_waiting: int, prompt_len: int, steps: int) -> Scheduler:
    """A scheduler whose `num_running` requests all decode, with others queued behind them."""
    output_len = steps + 64
    blocks_each = (prompt_len + output_len) // BLOCK_SIZE + 2
    config = SchedulerConfig(
        num_blocks=num_running * blocks_each + 1,
        block_size=BLOCK_SIZE,
        max_model_len=prompt_len + output_len,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(2048, num_running),
    )
    scheduler = Scheduler(config)
    for index in range(num_running + num_waiting):
        prompt = [(index * 7919 + position) % 50_000 for position in range(prompt_len)]
        params = SamplingParams(max_tokens=output_len)
        scheduler.add(Request(f"request-{index}", prompt, params, seed=index))
    while True:
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.commit(plan, made_up_result(plan), 0.0)
        if len(plan.requests) == num_running and plan.num_tokens == num_running:
            return scheduler


def made_up_result(plan: StepPlan) -> StepResult:
    return StepResult(
        plan.step_id,
        tuple(
            RequestResult(request.request_id, (17,) if request.sample is not None else ())
            for request in plan.requests
        ),
        0.01,
    )


def measure(scheduler: Scheduler, steps: int) -> tuple[list[float], list[float]]:
    """Microseconds of each plan and of each commit."""
    plans: list[float] = []
    commits: list[float] = []
    for _ in range(steps):
        begin = time.perf_counter()
        plan = scheduler.plan(0.0)
        plans.append((time.perf_counter() - begin) * 1e6)
        assert plan is not None
        result = made_up_result(plan)
        begin = time.perf_counter()
        scheduler.commit(plan, result, 0.0)
        commits.append((time.perf_counter() - begin) * 1e6)
    return plans, commits


def machine() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
            models = [line.split(":", 1)[1].strip() for line in cpuinfo if "model name" in line]
    except OSError:
        models = []
    name = models[0] if models else platform.processor() or platform.machine()
    return f"{name}, Python {sys.version.split()[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps to measure")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    args = parser.parse_args()
    print(machine())
    print(f"{args.steps} decode steps after prompts of {args.prompt} tokens; microseconds")
    print("running  waiting   plan p50    p90   commit p50    p90   both, per request")
    for num_waiting in WAITING:
        for num_running in RUNNING:
            scheduler = make_scheduler(num_running, num_waiting, args.prompt, args.steps)
            gc.collect()
            plans, commits = measure(scheduler, args.steps)
            plan, commit = statistics.median(plans), statistics.median(commits)
            plan_p90 = statistics.quantiles(plans, n=10)[-1]
            commit_p90 = statistics.quantiles(commits, n=10)[-1]
            print(
                f"{num_running:7d} {num_waiting:8d} {plan:10.1f} {plan_p90:6.1f} "
                f"{commit:12.1f} {commit_p90:6.1f} {(plan + commit) / num_running:12.2f}"
            )


if __name__ == "__main__":
    main()
