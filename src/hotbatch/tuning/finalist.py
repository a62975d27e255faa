"""The few settings that are tried on the real engine, and which of them is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotbatch.tuning.settings import Figures
from hotbatch.tuning.trials import Trial

_BETTER = 1.03  # times the default's goodput that another must reach to be kept


@dataclass(frozen=True, slots=True)
class Finalist:
    """A setting with what the simulator promised and what the engine brought in each round that
    it played; `real` is empty for one that played none."""

    trial: Trial
    real: tuple[Figures, ...] = ()
    is_default: bool = False

    @property
    def is_plain(self) -> bool:
        return self.trial.settings.is_plain

    @property
    def seen(self) -> Figures | None:
        """What the engine brought, mean of its rounds."""
        return mean(self.real) if self.real else None

    @property
    def goodput(self) -> float:
        """What the engine brought, else what the simulator promised."""
        return self.trial.worth if self.seen is None else self.seen.goodput

    @property
    def attainment(self) -> float:
        """Share of requests as promised, of the same."""
        return self.trial.attainment if self.seen is None else self.seen.attainment


def mean(figures: Sequence[Figures]) -> Figures:
    count = len(figures)
    return Figures(
        sum(one.goodput for one in figures) / count,
        sum(one.throughput for one in figures) / count,
        sum(one.attainment for one in figures) / count,
    )


def times_better(one: Finalist, other: Finalist) -> float:
    """The ratio of their goodput in the rounds that both played, else of what the simulator
    promised."""
    rounds = min(len(one.real), len(other.real))
    ours, theirs = one.trial.worth, other.trial.worth
    if rounds:
        ours, theirs = mean(one.real[:rounds]).goodput, mean(other.real[:rounds]).goodput
    return ours / theirs if theirs else float("inf")


def best_plain(finalists: Sequence[Finalist]) -> Finalist | None:
    """The better first-come batching, of those that were played if any was."""
    plain = [finalist for finalist in finalists if finalist.is_plain]
    rounds = max((len(finalist.real) for finalist in plain), default=0)
    left = [finalist for finalist in plain if len(finalist.real) == rounds]
    return max(left, key=lambda finalist: finalist.goodput, default=None)


def choose(finalists: Sequence[Finalist]) -> Finalist:
    """The default, unless another is clearly better. Plain batching is there to compare with."""
    default = next(finalist for finalist in finalists if finalist.is_default)
    others = [finalist for finalist in finalists if not finalist.is_plain]
    best = max(others, key=lambda finalist: times_better(finalist, default))
    return best if times_better(best, default) > _BETTER else default
