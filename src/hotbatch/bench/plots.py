"""Plots of one run or of a sweep over rates, as images in a folder.

throughput_latency.png   what a first token and a token cost as the load grows
attainment.png           share of requests served as promised, by rate and class
latency_cdf.png          distribution of TTFT and TPOT, a line a class
occupancy.png            requests in the batch and waiting, over time
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotbatch.bench.client import Record
from hotbatch.bench.load import LoadResult
from hotbatch.bench.report import grouped
from hotbatch.bench.server_metrics import Sample

_COLORS = ("#1f6fb2", "#c0392b", "#2e8b3d", "#9a5b13", "#6a51a3", "#555555")
_CLASS_COLORS = {"interactive": "#c0392b", "standard": "#1f6fb2", "batch": "#7f8c8d"}


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One rate of a sweep: requests per second offered, and the figures of its run."""

    rate: float
    figures: Mapping[str, Any]


def plot_run(load: LoadResult, samples: Sequence[Sample], folder: Path) -> list[Path]:
    """The distribution of latencies, and the batch over time, of one run."""
    return [
        latency_cdf(load.records, folder / "latency_cdf.png"),
        occupancy(load, samples, folder / "occupancy.png"),
    ]


def plot_sweep(points: Sequence[RatePoint], folder: Path) -> list[Path]:
    """The curves over rates; attainment only where something was promised."""
    paths = [throughput_latency(points, folder / "throughput_latency.png")]
    if any(point.figures.get("slo_attainment") is not None for point in points):
        paths.append(attainment(points, folder / "attainment.png"))
    return paths


def throughput_latency(points: Sequence[RatePoint], path: Path) -> Path:
    figure, (left, right) = _axes(2, width=11)
    rates = [point.figures["output_throughput"] for point in points]
    for axis, name, title in (
        (left, "ttft", "Time to first token"),
        (right, "tpot", "Time per output token"),
    ):
        for key, label, style in (("median", "median", "-"), ("p99", "99th percentile", "--")):
            values = [point.figures.get(f"{key}_{name}_ms") for point in points]
            if any(value is None for value in values):
                continue
            axis.plot(rates, values, style, color=_COLORS[0], marker="o", markersize=4, label=label)
        axis.set_xlabel("output tokens per second")
        axis.set_ylabel("milliseconds")
        axis.set_title(title, loc="left")
        _clean(axis)
    return _save(figure, path)


def attainment(points: Sequence[RatePoint], path: Path) -> Path:
    figure, (axis,) = _axes(1)
    rates = [point.rate for point in points]
    shares = [100.0 * point.figures["slo_attainment"] for point in points]
    axis.plot(rates, shares, color="0.2", marker="o", markersize=4, linewidth=2.2, label="all")
    names = sorted({name for point in points for name in point.figures.get("by_class", {})})
    for index, name in enumerate(names):
        line = [
            (point.rate, 100.0 * point.figures["by_class"][name]["slo_attainment"])
            for point in points
            if name in point.figures.get("by_class", {})
        ]
        axis.plot(*zip(*line, strict=True), color=_color(name, index), linewidth=1.4, label=name)
    axis.set_xlabel("requests per second offered")
    axis.set_ylabel("served as promised, %")
    _clean(axis)
    axis.set_ylim(0, 103)
    return _save(figure, path)


def latency_cdf(records: Sequence[Record], path: Path) -> Path:
    figure, (left, right) = _axes(2, width=11)
    groups = grouped(records, lambda record: record.request.service_class)
    for index, (name, group) in enumerate(sorted(groups.items())):
        good = [record for record in group if record.is_success]
        color = _color(name, index)
        ttfts = sorted(1000.0 * record.ttft for record in good)
        tpots = sorted(1000.0 * record.tpot for record in good if record.tpot is not None)
        for axis, values in ((left, ttfts), (right, tpots)):
            heights = [(rank + 1) / len(values) for rank in range(len(values))]
            axis.step(values, heights, where="post", color=color, linewidth=1.8, label=name or None)
    for axis, title in ((left, "Time to first token"), (right, "Time per output token")):
        axis.set_title(title, loc="left")
        axis.set_xlabel("milliseconds")
        axis.set_ylabel("share of requests")
        _clean(axis)
        axis.set_ylim(0, 1.02)
    return _save(figure, path)


def occupancy(load: LoadResult, samples: Sequence[Sample], path: Path) -> Path:
    """From the server's metrics where it has some, else what the client has under way."""
    figure, (axis,) = _axes(1, width=9)
    times, counts = in_flight(load)
    axis.step(times, counts, where="post", color="0.75", linewidth=1.0, label="client: under way")
    if samples:
        moments = [sample.time for sample in samples]
        running = [sample.running for sample in samples]
        waiting = [sample.waiting for sample in samples]
        axis.plot(moments, running, color=_COLORS[0], linewidth=1.8, label="server: in the batch")
        axis.plot(moments, waiting, color=_COLORS[3], linewidth=1.2, label="server: waiting")
    axis.set_xlabel("seconds")
    axis.set_ylabel("requests")
    axis.set_title("Batch occupancy", loc="left")
    _clean(axis)
    return _save(figure, path)


def in_flight(load: LoadResult) -> tuple[list[float], list[int]]:
    """Moments (seconds since the start) at which the number of requests under way changed."""
    changes = [(record.started - load.started, 1) for record in load.records]
    changes += [(record.ended - load.started, -1) for record in load.records if record.ended > 0.0]
    times, counts, current = [0.0], [0], 0
    for moment, change in sorted(changes):
        current += change
        times.append(moment)
        counts.append(current)
    return times, counts


def _axes(count: int, width: float = 7.0) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(width, 4.4), dpi=140, squeeze=False)
    return figure, list(axes[0])


def _clean(axis: Any) -> None:
    axis.grid(alpha=0.25)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=9)


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _color(name: str, index: int) -> str:
    return _CLASS_COLORS.get(name, _COLORS[index % len(_COLORS)])
