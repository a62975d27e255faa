"""What a person sees of a search: the finalists as a table, all settings as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hotbatch.core.errors import OptionError
from hotbatch.tuning.finalist import Finalist, best_plain, most_rounds
from hotbatch.tuning.settings import Figures
from hotbatch.tuning.trials import Trial


def table(finalists: Sequence[Finalist], chosen: Finalist, block_size: int) -> str:
    """The finalists, a line each."""
    lines = [
        f"{'':38}{'simulated':>29}{'on the engine':>33}",
        f"{'sequences':>10}{'tokens':>8}{'KV tokens':>11}{'threads':>9}"
        + 2 * f"{'goodput':>12}{'promised':>10}{'tokens/s':>10}",
    ]
    most = most_rounds(finalists)
    for finalist in finalists:
        settings, trial, seen = finalist.trial.settings, finalist.trial, finalist.seen
        cache = "" if settings.num_blocks is None else str(settings.num_blocks * block_size)
        promised = Figures(trial.worth, trial.throughput, trial.attainment)
        lines.append(
            f"{settings.max_num_seqs:>10}{settings.max_num_batched_tokens:>8}{cache:>11}"
            f"{settings.threads or '':>9}{_cells(promised)}"
            f"{'' if seen is None else _cells(seen):32}"
            f"{_words(finalist, most)}{'  <- chosen' if finalist is chosen else ''}".rstrip()
        )
    return "\n".join(lines)


def _cells(figures: Figures) -> str:
    return (
        f"{figures.goodput:>10.2f}/s{100 * figures.attainment:>8.0f} %{figures.throughput:>10.0f}"
    )


def _words(finalist: Finalist, most: int) -> str:
    """What a setting is, and whether it was played to the end."""
    words = ["first-come"] * finalist.is_plain + ["default"] * finalist.is_default
    if 0 < len(finalist.real) < most and not finalist.is_plain:
        words.append("beaten early")
    return "  " + ", ".join(words) if words else ""


def frontier(trials: Sequence[Trial]) -> list[Trial]:
    """Those that no other beats in both throughput and goodput, by throughput."""
    best: list[Trial] = []
    for trial in sorted(trials, key=lambda trial: (-trial.throughput, -trial.worth)):
        if not best or trial.worth > best[-1].worth:
            best.append(trial)
    return best[::-1]


def plot(
    trials: Sequence[Trial],
    finalists: Sequence[Finalist],
    chosen: Finalist,
    title: str,
    path: Path,
) -> None:
    """Every setting by its throughput and its goodput, with the frontier and the finalists.

    What was given up after a part of the requests is small and grey: with fewer of them the wait
    for the last one weighs more, so its figures are not to be compared with those of the others.

    Raises:
        OptionError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise OptionError(
            "--plot needs matplotlib: pip install 'hotbatch[bench]'.", param="--plot"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    shades = pyplot.get_cmap("viridis_r")
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
            label=f"{count}",
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
    for finalist, (marker, colour, label) in _marks(finalists, chosen):
        trial = finalist.trial
        axes.plot(
            trial.throughput, trial.worth, marker, color=colour, ms=11, mfc="none", mew=2,
            label=f"{label}: {trial.settings.max_num_seqs} x "
            f"{trial.settings.max_num_batched_tokens}",
        )  # fmt: skip
    axes.set(
        xlabel="tokens per second at the highest load",
        ylabel="good requests per second, mean over the loads",
        title=title,
    )
    axes.set_ylim(bottom=0.0)
    axes.title.set_fontsize(10)
    axes.grid(True, alpha=0.3)
    axes.legend(
        fontsize=8, title="sequences\n(size: tokens a step)", title_fontsize=8,
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _marks(
    finalists: Sequence[Finalist], chosen: Finalist
) -> list[tuple[Finalist, tuple[str, str, str]]]:
    """Whom to mark: the chosen one, the default, the best of plain batching."""
    marked = []
    plain = best_plain(finalists)
    if plain is not None:
        marked.append((plain, ("s", "tab:red", "first-come")))
    default = next(finalist for finalist in finalists if finalist.is_default)
    marked.append((default, ("o", "tab:blue", "default")))
    marked.append((chosen, ("*", "tab:orange", "chosen")))
    return marked
