"""Steps of some dozens of rows, whose columns are shared out among the threads, or whose rows.

Both ways take turns on the same steps, step by step. How far apart the threads' cores are changes
within minutes on some hosts, so the time of a loop of nothing is printed with each round: on an
AMD EPYC some 150 ns on one chip, 750 on two.

    python benchmarks/step/shared_work.py [--rows 48,64,80] [--rounds 3] [--turns 15]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from machine import describe
from step_time import decode_plan, integers

from hotbatch.core.plan import StepPlan
from hotbatch.executor.cpu_executor import CpuExecutor, usable_cpus
from hotbatch.kernels import _native
from hotbatch.models.embedded import embedded_model_path
from hotbatch.models.loader import load_model

CONTEXT = 128
LOOPS = {"columns": 1e-9, "rows": 1e-3}  # seconds that make a program share out the one or other


def seconds_of(executor: CpuExecutor, plan: StepPlan, shared: str) -> float:
    for _ in range(64):
        executor._program.note_loop(LOOPS[shared])
    executor.run(plan)
    started = time.perf_counter()
    executor.run(plan)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=integers, default=[48, 64, 80])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=usable_cpus())
    args = parser.parse_args()
    executor = CpuExecutor(
        load_model(str(embedded_model_path())),
        num_blocks=max(args.rows) * CONTEXT // 16,
        precision="int8",
        threads=args.threads,
    )
    print(describe(**vars(args)))
    print(f"{'loop ns':>8} {'step':<24}{'columns ms':>11}{'rows ms':>9}{'rows / columns':>16}")
    for _ in range(args.rounds):
        for rows in args.rows:
            for name, plan in (
                (f"{rows} sequences", decode_plan(rows, CONTEXT, 16)),
                (f"prompt of {rows}", decode_plan(1, rows, 16, chunk=rows)),
            ):
                times: dict[str, list[float]] = {shared: [] for shared in LOOPS}
                for _ in range(args.turns):
                    for shared, taken in times.items():
                        taken.append(seconds_of(executor, plan, shared))
                ratio = statistics.median(
                    row / column for column, row in zip(*times.values(), strict=True)
                )
                columns, by_rows = (1e3 * statistics.median(taken) for taken in times.values())
                loop = 1e9 * _native.measure_loop(args.threads)
                print(f"{loop:>8.0f} {name:<24}{columns:>11.2f}{by_rows:>9.2f}{ratio:>16.3f}")


if __name__ == "__main__":
    main()
