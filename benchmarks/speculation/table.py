"""A table, and a plot, of what `run.py` kept with `--json`.

    python benchmarks/speculation/table.py FILE... [--plot speculation.png]

For each workload and number of requests at a time, and each set of prompts, the least time of
each variant counts; their sums are compared with `off`. `best k` is the best of the fixed numbers
of guesses, and `off again` is what a second run of `off` came to: how far figures can be trusted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Figures = dict[tuple[str, int], dict[str, float]]
"""Tokens per second by workload and requests, then by variant."""


def rates(records: Iterable[Mapping[str, Any]]) -> Figures:
    """Of all rounds of these files; the same prompts may be in several."""
    least: dict[tuple[str, int], dict[int, dict[str, tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for record in records:
        for done in record["rounds"]:
            prompts = least[done["workload"], done["requests"]][
                done["repeat"] // record["settings"]["turns"]
            ]
            for name, run in done["runs"].items():
                found = (run["seconds"], run["tokens"])
                prompts[name] = min(prompts.get(name, found), found)
    figures: Figures = {}
    for key, sets in least.items():
        variants = set.intersection(*(set(runs) for runs in sets.values()))
        figures[key] = {
            name: sum(runs[name][1] for runs in sets.values())
            / sum(runs[name][0] for runs in sets.values())
            for name in variants
        }
    return figures


def table(figures: Figures) -> str:
    lines = [
        "| workload | requests | off, tok/s | on / off | best k / off | on / best k | off again |",
        "|---|---|---|---|---|---|---|",
    ]
    for (workload, requests), found in sorted(figures.items()):
        off, on = found["off"], found["on"]
        fixed = {name: rate for name, rate in found.items() if name[:2] == "k=" and name != "k=0"}
        best = max(fixed, key=fixed.__getitem__, default=None)
        cells = [workload, str(requests), f"{off:.0f}", f"{on / off:.2f}"]
        if best is None:
            cells += ["", ""]
        else:
            cells += [f"{fixed[best] / off:.2f} ({best})", f"{on / fixed[best]:.2f}"]
        cells.append(f"{found['k=0'] / off:.2f}" if "k=0" in found else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(figures: Figures, path: Path) -> None:
    """On against off, and the best fixed number, by requests at a time; a panel a workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads = sorted({workload for workload, _ in figures})
    drawn, axes = pyplot.subplots(
        1, len(workloads), figsize=(3.2 * len(workloads), 3), sharey=True, squeeze=False
    )
    for axis, workload in zip(axes[0], workloads, strict=True):
        counts = sorted(requests for name, requests in figures if name == workload)
        for variant in sorted({name for count in counts for name in figures[workload, count]}):
            found = [
                (count, figures[workload, count][variant] / figures[workload, count]["off"])
                for count in counts
                if variant in figures[workload, count]
            ]
            width = 2.2 if variant == "on" else 0.8
            axis.plot(*zip(*found, strict=True), marker="o", ms=3, lw=width, label=variant)
        axis.set(title=workload, xlabel="requests at a time", xscale="log")
        axis.set_xticks(counts, [str(count) for count in counts])
    axes[0][0].set_ylabel("tokens per second / off")
    axes[0][-1].legend(fontsize=7)
    drawn.tight_layout()
    drawn.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args(argv)
    figures = rates(json.loads(path.read_text()) for path in arguments.files)
    print(table(figures))
    if arguments.plot:
        plot(figures, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
