"""Unused slots in allocated KV blocks, over time, for each trace.

    python benchmarks/overhead/fragmentation.py [--traces FOLDER] [--machine cpu]
        [--workloads code,conversation] [--policies full] [--rate 0.9] [--block-sizes 16,32,64]
        [--plot frag.png] [--json out.json]

Two kinds of slots are allocated and hold nothing. *Tail*: behind the last known token of a
request, at most a block less one for each; that is what paging costs, and what larger blocks
make worse. *Ahead*: for tokens of a prompt that is known and not computed yet, as blocks for a
whole prompt are taken when it is admitted. In virtual time, as benchmarks/policies.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "policies"))

from policy_machine import cpu, h200
from policy_point import saturation, simulate
from policy_variant import variants
from policy_workload import Ask, asks, load_trace

from hotbatch.core import StepPlan, StepResult
from hotbatch.simulator import Simulation


@dataclass
class Slots:
    """Samples of slots by what they hold; fed as an observer of a simulation."""

    asked: Sequence[Ask]
    block_size: int
    every: int = 8  # steps
    times: list[float] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    _held: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    _steps: int = 0

    def __call__(self, simulation: Simulation, plan: StepPlan, result: StepResult) -> None:
        for preemption in plan.preempted:
            self._held.pop(preemption.request_id, None)
        for planned in plan.requests:
            self._held[planned.request_id] = (planned.block_ids, planned.context_len)
        self._steps += 1
        if self._steps % self.every == 0:
            for name in [n for n in self._held if simulation.outcomes[n].finish_reason is not None]:
                del self._held[name]
            self._sample(simulation.clock.now())

    def _sample(self, now: float) -> None:
        blocks: set[int] = set()
        tail = ahead = 0
        for name, (block_ids, computed) in self._held.items():
            blocks.update(block_ids)
            capacity = len(block_ids) * self.block_size
            known = max(computed, self.asked[int(name[1:])].row.input_len)
            tail += max(0, capacity - known)
            ahead += max(0, min(known, capacity) - computed)
        self.times.append(now)
        self.allocated.append(len(blocks) * self.block_size)
        self.tail.append(tail)
        self.ahead.append(ahead)

    def figures(self) -> dict[str, float]:
        """Means over time of slots allocated, and shares of those that hold nothing."""
        allocated = sum(self.allocated) or 1
        return {
            "mean_allocated": allocated / max(1, len(self.allocated)),
            "tail_share": sum(self.tail) / allocated,
            "ahead_share": sum(self.ahead) / allocated,
            "worst_tail_share": max(
                (t / a for t, a in zip(self.tail, self.allocated, strict=True) if a), default=0.0
            ),
        }


def run(arguments: argparse.Namespace) -> list[tuple[dict[str, Any], Slots]]:
    machine = {"cpu": cpu, "h200": h200}[arguments.machine]()
    machine = replace(machine, num_requests=max(50, machine.num_requests // arguments.shrink))
    tokens = machine.num_blocks * machine.block_size
    results = []
    for workload in arguments.workloads:
        trace = load_trace(workload, arguments.traces)
        asked = asks(trace, machine, count=machine.num_requests, mix="mixed", seed=1)
        reference = next(v for v in reversed(variants(machine)) if v.family == "first-come")
        rate = arguments.rate * saturation(machine, reference, asked)
        for size in arguments.block_sizes:
            sized = replace(machine, block_size=size, num_blocks=tokens // size)
            variant = next(v for v in variants(sized) if v.name == arguments.policies)
            slots = Slots(asked, size)
            simulate(sized, variant, asked, rate, observer=slots)
            row = {"workload": workload, "block_size": size, **slots.figures()}
            results.append((row, slots))
    return results


def plot(results: Sequence[tuple[dict[str, Any], Slots]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads = list(dict.fromkeys(row["workload"] for row, _ in results))
    figure, axes = pyplot.subplots(
        len(workloads), 1, figsize=(9, 3.2 * len(workloads)), dpi=140, squeeze=False
    )
    for axis, workload in zip(axes[:, 0], workloads, strict=True):
        for index, (row, slots) in enumerate(r for r in results if r[0]["workload"] == workload):
            for values, style, name in ((slots.tail, "-", "tail"), (slots.ahead, ":", "ahead")):
                shares = [
                    100.0 * value / total if total else 0.0
                    for value, total in zip(values, slots.allocated, strict=True)
                ]
                axis.plot(
                    slots.times,
                    shares,
                    style,
                    color=f"C{index}",
                    linewidth=1.0,
                    label=f"{name}, blocks of {row['block_size']}",
                )
        axis.set_title(f"{workload}: slots allocated that hold nothing", loc="left")
        axis.set_ylabel("% of allocated slots")
        axis.set_xlabel("seconds")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8, ncols=2)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--traces", type=Path, help="folder with the traces; else made-up ones")
    parser.add_argument("--machine", choices=("cpu", "h200"), default="cpu")
    parser.add_argument("--workloads", type=names, default=["code", "conversation"])
    parser.add_argument("--policies", default="full", help="as in benchmarks/policies/run.py")
    parser.add_argument("--rate", type=float, default=0.9, help="share of saturation")
    parser.add_argument(
        "--block-sizes", type=lambda t: [int(p) for p in t.split(",")], default=[16, 32, 64]
    )
    parser.add_argument("--shrink", type=int, default=1, help="send 1/N of the requests")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    results = run(arguments)
    print(f"{'trace':14}{'block':>6}{'allocated':>11}{'tail':>8}{'worst':>8}{'ahead':>8}")
    for row, _ in results:
        print(
            f"{row['workload']:14}{row['block_size']:>6}{row['mean_allocated']:>11.0f}"
            f"{row['tail_share']:>8.2%}{row['worst_tail_share']:>8.1%}{row['ahead_share']:>8.2%}"
        )
    if arguments.plot:
        plot(results, arguments.plot)
    if arguments.json:
        arguments.json.write_text(json.dumps([row for row, _ in results], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
