"""What a person sees of a search: the finalists as a table, all settings as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hotbatch.core.errors import OptionError
from hotbatch.tuning.finalist import Finalist
from hotbatch.tuning.guess_limit import Limit, best_limit
from hotbatch.tuning.play_off import LOAD
from hotbatch.tuning.settings import Figures, Settings
from hotbatch.tuning.trials import Trial


def table(finalists: Sequence[Finalist], chosen: Finalist, block_size: int) -> str:
    """The finalists, a line each."""
    lines = [
        f"{'':45}{'simulated':>29}{'on the engine':>33}",
        f"{'sequences':>10}{'tokens':>8}{'chunk':>7}{'KV tokens':>11}{'threads':>9}"
        + 2 * f"{'goodput':>12}{'promised':>10}{'tokens/s':>10}",
    ]
    for finalist in finalists:
        settings, trial, seen = finalist.trial.settings, finalist.trial, finalist.seen
        cache = "" if settings.num_blocks is None else str(settings.num_blocks * block_size)
        promised = Figures(trial.worth, trial.throughput, trial.attainment)
        lines.append(
            f"{settings.max_num_seqs:>10}{settings.max_num_batched_tokens:>8}"
            f"{settings.max_chunk or '':>7}{cache:>11}"
            f"{settings.threads or '':>9}{_cells(promised)}"
            f"{'' if seen is None else _cells(seen):32}"
            f"{_words(finalist)}{'  <- chosen' if finalist is chosen else ''}".rstrip()
        )
    return "\n".join(lines)


def guess_limits(seconds: Mapping[Limit, float]) -> str:
    """What each limit of guesses took, and which is kept."""
    words = {None: "as many as pay", 0: "none"}
    names = {limit: words.get(limit, f"at most {limit}") for limit in seconds}
    times = ", ".join(f"{names[limit]} {seconds[limit]:.2f} s" for limit in seconds)
    return (
        f"Guessed tokens in a step, and the time for the same answers: {times}; "
        f"kept: {names[best_limit(seconds)]}"
    )


def _cells(figures: Figures) -> str:
    return (
        f"{figures.goodput:>10.2f}/s{100 * figures.attainment:>8.0f} %{figures.throughput:>10.0f}"
    )


def _words(finalist: Finalist) -> str:
    return "  first-come" if finalist.is_plain else "  default" if finalist.is_default else ""


def frontier(trials: Sequence[Trial]) -> list[Trial]:
    """Those that no other beats in both throughput and goodput, by throughput."""
    best: list[Trial] = []
    for trial in sorted(trials, key=lambda trial: (-trial.throughput, -trial.worth)):
        if not best or trial.worth > best[-1].worth:
            best.append(trial)
    return best[::-1]


def check_plot(path: Path) -> None:
    """Whether a plot can be drawn there: known before minutes of measuring are.

    Raises:
        OptionError: matplotlib is not installed, or there is no such folder.
    """
    if find_spec("matplotlib") is None:
        raise OptionError("--plot needs matplotlib: pip install 'hotbatch[bench]'.", param="--plot")
    if not path.parent.is_dir():
        raise OptionError(f"--plot: there is no folder {path.parent}.", param="--plot")


def plot(
    trials: Sequence[Trial],
    finalists: Sequence[Finalist],
    chosen: Finalist,
    title: str,
    path: Path,
) -> None:
    """Every setting by its throughput and its goodput, with the frontier and the finalists, and
    beside it what the engine made of these.

    What was given up after a part of the requests is small and grey: with fewer of them the wait
    for the last one weighs more, so its figures are not to be compared with those of the others.

    Raises:
        OptionError: see `check_plot`.
    """
    check_plot(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    played = [finalist for finalist in finalists if finalist.real]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10.5, 5), width_ratios=(3, 2), layout="constrained"
    )
    _draw_trials(left, trials, finalists, chosen, pyplot.get_cmap("viridis_r"))
    if played:
        _draw_played(right, played, chosen)
    else:
        right.remove()
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_trials(
    axes: Any, trials: Sequence[Trial], finalists: Sequence[Finalist], chosen: Finalist, shades: Any
) -> None:
    everything = max(trial.num_jobs for trial in trials)
    losers = [trial for trial in trials if trial.num_jobs < everything]
    trials = [trial for trial in trials if trial.num_jobs == everything]
    axes.scatter(
        [trial.throughput for trial in losers],
        [trial.worth for trial in losers],
        color="0.75", s=8, linewidths=0, label="given up early", zorder=0,
    )  # fmt: skip
    seats = sorted({trial.settings.max_num_seqs for trial in trials})
    for index, count in enumerate(seats):
        points = [trial for trial in trials if trial.settings.max_num_seqs == count]
        axes.scatter(
            [trial.throughput for trial in points],
            [trial.worth for trial in points],
            color=shades(0.1 + 0.9 * index / max(1, len(seats) - 1)),
            label=f"{count} sequences",
            s=[8 + 3 * trial.settings.max_num_batched_tokens**0.5 for trial in points],
            alpha=0.75,
            linewidths=0,
        )
    edge = frontier([*trials, *(finalist.trial for finalist in finalists)])
    axes.plot(
        [trial.throughput for trial in edge],
        [trial.worth for trial in edge],
        color="0.4",
        lw=1,
        zorder=0,
    )
    named: set[str] = set()
    for finalist in finalists:
        name, marker, colour, size = _mark(finalist, finalist is chosen)
        axes.plot(
            finalist.trial.throughput, finalist.trial.worth, marker, color=colour, ms=size,
            mfc="none", mew=2, ls="none", label=None if name in named else name,
        )  # fmt: skip
        named.add(name)
    axes.set(
        xlabel="tokens per second at the highest load",
        ylabel="good requests per second, mean over the loads",
    )
    axes.set_title("simulated (larger: more tokens a step)", fontsize=9)
    axes.set_ylim(bottom=0.0)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8, loc="lower right", ncols=2)


def _draw_played(axes: Any, played: Sequence[Finalist], chosen: Finalist) -> None:
    names = []
    usual = next(finalist.trial.settings for finalist in played if finalist.is_default)
    for place, finalist in enumerate(reversed(played)):
        name, _, colour, _ = _mark(finalist, finalist is chosen)
        settings = finalist.trial.settings
        names.append(f"{name}\n{_in_short(settings, usual)}")
        axes.barh(place, finalist.goodput, 0.55, color=colour, alpha=0.75)
        words = f" {finalist.goodput:.1f}/s, {100 * finalist.attainment:.0f} %"
        axes.text(finalist.goodput, place, words, va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlim(0.0, 1.4 * max(finalist.goodput for finalist in played))
    axes.set_xlabel("good requests per second")
    axes.set_title(f"on the engine, at {LOAD} of what it can do", fontsize=9)
    axes.grid(True, axis="x", alpha=0.3)


def _in_short(settings: Settings, usual: Settings) -> str:
    """Sequences and tokens, and what else differs from the default, a line each."""
    lines = [f"{settings.max_num_seqs} x {settings.max_num_batched_tokens}"]
    if settings.max_chunk != usual.max_chunk:
        lines.append(f"{settings.max_chunk} of one prompt")
    if settings.num_blocks and usual.num_blocks and settings.num_blocks != usual.num_blocks:
        lines.append(f"{settings.num_blocks / usual.num_blocks:g} times the cache")
    if settings.threads != usual.threads:
        lines.append(f"threads: {settings.threads}")
    return "\n".join(lines)


def _mark(finalist: Finalist, is_chosen: bool) -> tuple[str, str, str, float]:
    """Name, marker, colour and size, such that two marks on one point can both be seen."""
    if finalist.is_plain:
        return "first-come", "s", "tab:red", 10.0
    name = "default" if finalist.is_default else "finalist"
    if is_chosen:
        return f"{name}, chosen" if finalist.is_default else "chosen", "*", "tab:orange", 15.0
    return name, "o", "tab:blue", 10.0
