"""From runs to medians, ratios and the table of docs/performance.md.

A run is a dictionary: `peer`, `workload`, `repeat`, and either `figures` (the load generator's)
or `error`. A ratio is hotbatch's median output rate over the peer's median.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_catalog import PEERS, Workload, parse_workloads

Run = Mapping[str, Any]
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"


@dataclass(frozen=True)
class Aim:
    """`ours` should make at least `ratio` times the tokens of `peer` at `workload`."""

    workload: str
    peer: str
    ratio: float
    ours: str = "hotbatch"


def _aims(workloads: str, peers: Mapping[str, float], ours: str = "hotbatch") -> list[Aim]:
    return [
        Aim(workload.label, peer, ratio, ours)
        for workload in parse_workloads([workloads])
        for peer, ratio in peers.items()
    ]


AIMS = {
    "smollm2-135m": [
        *_aims("128x128@1", {"ik-q8_0": 1.25, "llamacpp-q4_0": 1.3}),
        *_aims("128x128@1", {"ik-q4_0": 1.1}, ours="hotbatch-int4"),
        *_aims("128x128@16,32,64", {"vllm-w8a8": 1.8, "openvino-int8": 2.0, "llamacpp-q4_0": 3.0}),
        *_aims("512x128@16,64", {"vllm-w8a8": 1.5, "openvino-int8": 1.8}),
    ],
    "llama-1b-dummy": _aims(
        "128x128@1,16,32", {"vllm-w8a8": 1.0, "openvino-int8": 1.0, "llamacpp-q4_0": 1.0}
    ),
}


@dataclass(frozen=True)
class Cell:
    """The repeats of one peer at one workload; rates are output tokens a second."""

    rates: tuple[float, ...]
    ttft_ms: float
    tpot_ms: float
    peak_mb: float
    failed: int
    errors: tuple[str, ...]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates) if self.rates else 0.0

    @property
    def spread(self) -> float:
        """(highest - lowest) / median."""
        return (max(self.rates) - min(self.rates)) / self.rate if self.rate else 0.0


def cell_of(runs: Iterable[Run], peer: str, workload: str) -> Cell | None:
    """None if it was never tried."""
    own = [run for run in runs if run["peer"] == peer and run["workload"] == workload]
    if not own:
        return None
    good = [run["figures"] for run in own if "figures" in run and run["figures"]["completed"]]

    def median(key: str) -> float:
        return statistics.median([figures[key] for figures in good]) if good else 0.0

    return Cell(
        rates=tuple(figures["output_throughput"] for figures in good),
        ttft_ms=median("mean_ttft_ms"),
        tpot_ms=median("mean_tpot_ms"),
        peak_mb=max((run.get("peak_memory_mb", 0.0) for run in own), default=0.0),
        failed=sum(run["figures"]["failed"] for run in own if "figures" in run),
        errors=tuple(run["error"] for run in own if "error" in run),
    )


def counterpart(peer: str, workload: str, aims: Sequence[Aim]) -> str:
    """Which hotbatch a peer is compared with: four bits with four bits where an aim says so."""
    for aim in aims:
        if aim.peer == peer and aim.workload == workload:
            return aim.ours
    return "hotbatch"


def markdown(results: Mapping[str, Any]) -> str:
    """The section: one table a workload, then what failed and what the names mean."""
    runs, model = results["runs"], results["model"]
    aims = AIMS.get(model, [])
    workloads = sorted({run["workload"] for run in runs}, key=_order)
    names = [name for name in PEERS if any(run["peer"] == name for run in runs)]
    lines = [_heading(results), ""]
    for label in workloads:
        lines += [*_workload_table(runs, names, label, aims), ""]
    lines += _troubles(runs, names, workloads)
    lines += [f"- `{name}`: {PEERS[name].note}" for name in names if PEERS[name].note]
    return "\n".join(lines).strip() + "\n"


def _order(label: str) -> tuple[int, int, int]:
    workload: Workload = parse_workloads([label])[0]
    return workload.prompt, workload.output, workload.clients


def _heading(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    # What was run, which an interrupted or limited run makes less than what was asked for.
    cells = Counter((run["peer"], run["workload"]) for run in results["runs"])
    repeats = f"{min(cells.values())} to {max(cells.values())}" if cells else "no"
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return (
        f"{results['model']}, {results['date']}, {machine['cpu']}, {machine['cores']} cores, "
        f"{results['threads']} threads; {repeats} alternating repeats a cell, medians. "
        f"Greedy, end of text ignored, random prompts. {versions}."
    )


def _workload_table(
    runs: Sequence[Run], names: Sequence[str], label: str, aims: Sequence[Aim]
) -> list[str]:
    workload = parse_workloads([label])[0]
    clients = "1 client" if workload.clients == 1 else f"{workload.clients} clients"
    lines = [
        f"**{clients}, {workload.prompt} in, {workload.output} out**",
        "",
        "| server | weights | tok/s | spread | TTFT ms | TPOT ms | peak MB | ratio | aim |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        cell = cell_of(runs, name, label)
        if cell is not None:
            lines.append(_row(runs, name, cell, label, aims))
    return lines


def _row(runs: Sequence[Run], name: str, cell: Cell, label: str, aims: Sequence[Aim]) -> str:
    weights = PEERS[name].weights
    if not cell.rates:
        return f"| {name} | {weights} | failed | | | | | | |"
    ratio, aim_text = "", ""
    if PEERS[name].product:
        ours_name = counterpart(name, label, aims)
        ours = cell_of(runs, ours_name, label)
        if ours is not None and ours.rate:
            mark = "" if ours_name == "hotbatch" else f" ({ours_name})"
            ratio = f"{ours.rate / cell.rate:.2f}{mark}"
        aim = next((aim for aim in aims if (aim.peer, aim.workload) == (name, label)), None)
        if aim is not None:
            is_met = ours is not None and ours.rate >= aim.ratio * cell.rate
            aim_text = f"{aim.ratio:.2f} {'met' if is_met else 'missed'}"
    return (
        f"| {name} | {weights} | {cell.rate:.0f} | {100 * cell.spread:.0f} % | "
        f"{cell.ttft_ms:.0f} | {cell.tpot_ms:.1f} | {cell.peak_mb:.0f} | {ratio} | {aim_text} |"
    )


def _troubles(runs: Sequence[Run], names: Sequence[str], workloads: Sequence[str]) -> list[str]:
    lines = []
    for label in workloads:
        for name in names:
            cell = cell_of(runs, name, label)
            if cell is None:
                continue
            if cell.failed:
                lines.append(f"- {name} at {label}: {cell.failed} requests failed.")
            if cell.errors:
                reason = " ".join(cell.errors[0].split())[:200].replace("|", "/")
                lines.append(f"- {name} at {label}: {len(cell.errors)} runs failed: {reason}")
    return lines


def write_section(document: Path, model: str, text: str) -> None:
    """Puts `text` between the model's markers in `document`, which it makes if need be.

    Raises:
        ValueError: there is a begin marker without its end.
    """
    begin, end = BEGIN.replace("peers", f"peers {model}"), END.replace("peers", f"peers {model}")
    old = document.read_text() if document.exists() else "# Performance\n"
    block = f"{begin}\n{text.strip()}\n{end}"
    if begin in old:
        head, rest = old.split(begin, 1)
        if end not in rest:
            raise ValueError(f"{document}: {begin} has no {end}")
        new = head + block + rest.split(end, 1)[1]
    else:
        new = f"{old.rstrip()}\n\n## Against peers: {model}\n\n{block}\n"
    document.parent.mkdir(parents=True, exist_ok=True)
    document.write_text(new)
