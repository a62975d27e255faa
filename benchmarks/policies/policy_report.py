"""Tables and plots of a sweep: goodput as a share of saturation, by rate and way of batching.

A family (static, first-come) stands for the best of its sizes at each rate; all figures are
means over seeds, ratios are ratios of these means.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Place = tuple[str, str, str]  # machine, trace, mix

FULL = "full"


def places(rows: Iterable[Row]) -> dict[Place, list[Row]]:
    grouped: dict[Place, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row["machine"], row["trace"], row["mix"]].append(row)
    return dict(grouped)


def curves(rows: Sequence[Row], key: str = "goodput") -> dict[str, dict[float, float]]:
    """By variant and rate: the mean over seeds of `key`, goodput as a share of saturation."""
    sums: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        value = row[key] / row["saturation"] if key == "goodput" else row[key]
        sums[row["variant"]][row["fraction"]].append(value)
    return {
        name: {fraction: sum(values) / len(values) for fraction, values in line.items()}
        for name, line in sums.items()
    }


def best_of(rows: Sequence[Row], family: str) -> dict[float, tuple[float, str]]:
    """By rate: the family's best goodput and which of its variants reached it."""
    lines = curves([row for row in rows if row["family"] == family])
    result: dict[float, tuple[float, str]] = {}
    for name, line in lines.items():
        for fraction, value in line.items():
            if fraction not in result or value > result[fraction][0]:
                result[fraction] = (value, name)
    return result


def table(rows: Sequence[Row]) -> str:
    return "\n".join(_one_table(place, group) for place, group in places(rows).items())


def _one_table(place: Place, rows: Sequence[Row]) -> str:
    machine, trace, mix = place
    lines = curves(rows)
    fractions = sorted({row["fraction"] for row in rows})
    saturated = sum(row["saturation"] for row in rows) / len(rows)
    seeds = len({row["seed"] for row in rows})
    text = [
        "",
        f"{machine}, {trace}, {mix} classes: goodput as a share of saturation "
        f"({saturated:.2f} req/s), {seeds} seeds",
        f"{'':30}" + "".join(f"{fraction:>8.2f}" for fraction in fractions),
    ]
    families = {row["variant"]: row["family"] for row in rows}
    for name, line in lines.items():
        text.append(f"{name:30}" + "".join(f"{line[f]:>8.3f}" for f in fractions))
    for family in ("static", "first-come"):
        best = best_of(rows, family)
        if best:
            cells = "".join(f"{best[f][0]:>8.3f}" for f in fractions)
            text.append(f"{'best ' + family:30}" + cells)
    for family in ("first-come", "static"):
        best = best_of(rows, family)
        if not best:
            continue
        for name, line in lines.items():
            if families[name] not in ("static", "first-come", "request-level"):
                ratios = "".join(f"{_ratio(line[f], best[f][0]):>8}" for f in fractions)
                text.append(f"{name + ' / best ' + family:30}" + ratios)
    return "\n".join(text)


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}" if base > 0 else ("inf" if value > 0 else "-")


# ---- plots


def plot_all(rows: Sequence[Row], folder: Path) -> list[Path]:
    """One image a machine, trace and mix: goodput, and who was served as promised."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for place, group in places(rows).items():
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), dpi=140)
        _plot_goodput(left, group)
        _plot_classes(right, group)
        machine, trace, mix = place
        figure.suptitle(f"{machine}, {trace} trace, {mix} classes", x=0.02, ha="left")
        figure.tight_layout()
        paths.append(folder / f"{machine}-{trace}-{mix}.png")
        figure.savefig(paths[-1])
        pyplot.close(figure)
    return paths


def _plot_goodput(axis, rows: Sequence[Row]) -> None:
    fractions = sorted({row["fraction"] for row in rows})
    top = max(fractions)
    axis.plot([0, top], [0, top], color="0.8", linewidth=1.0, label="all that is offered")
    styles = {"static": ("#9a5b13", "static, best size"), "first-come": ("#1f6fb2", "first-come, "
              "best budget")}  # fmt: skip
    for family, (color, label) in styles.items():
        best = best_of(rows, family)
        if best:
            axis.plot(fractions, [best[f][0] for f in fractions], color=color, linewidth=2.0,
                      label=label)  # fmt: skip
    families = {row["variant"]: row["family"] for row in rows}
    colors = iter(("#888888", "#b8a13a", "#6a51a3", "#3b9a8f", "#c05a8a", "#555555"))
    for name, line in curves(rows).items():
        if families[name] in styles or families[name] == "without":
            continue
        is_full = name == FULL
        axis.plot(
            fractions,
            [line[f] for f in fractions],
            color="#2e8b3d" if is_full else next(colors, "0.5"),
            linewidth=2.6 if is_full else 1.2,
            label=name,
        )
    axis.set_xlabel("requests offered, share of saturation")
    axis.set_ylabel("goodput, share of saturation")
    _clean(axis)


def _plot_classes(axis, rows: Sequence[Row]) -> None:
    """Share of each class served as promised: first-come's best against the full scheduler."""
    fractions = sorted({row["fraction"] for row in rows})
    colors = {"interactive": "#c0392b", "standard": "#1f6fb2", "batch": "#7f8c8d"}
    best = best_of(rows, "first-come")
    for label, pick, style in (
        ("first-come", lambda f: best[f][1] if best else "", ":"),
        ("full", lambda f: FULL, "-"),
    ):
        for name, color in colors.items():
            points = []
            for fraction in fractions:
                shares = [
                    row["attainment_by_class"][name]
                    for row in rows
                    if row["fraction"] == fraction
                    and row["variant"] == pick(fraction)
                    and name in row["attainment_by_class"]
                ]
                if shares:
                    points.append((fraction, sum(shares) / len(shares)))
            if points:
                axis.plot(*zip(*points, strict=True), color=color, linestyle=style, linewidth=1.8,
                          label=f"{name}, {label}")  # fmt: skip
    axis.set_xlabel("requests offered, share of saturation")
    axis.set_ylabel("share served as promised")
    axis.set_ylim(0, 1.03)
    _clean(axis)


def _clean(axis) -> None:
    axis.grid(alpha=0.25)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
