"""The few settings that are tried on the real engine, and which of them is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotbatch.tuning.settings import Figures
from hotbatch.tuning.trials import Trial

_BETTER = 1.03  # times the default's goodput that another must reach to be kept


@dataclass(frozen=True, slots=True)
class Finalist:
    """A setting with what the simulator promised and what the engine brought in each round, over
    its loads; `real` is empty where nothing was played, and short for who was beaten early."""

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


def to_the_end(finalists: Sequence[Finalist]) -> list[Finalist]:
    """Those that played as many rounds as anybody: only their figures can be compared."""
    most = max(len(finalist.real) for finalist in finalists)
    return [finalist for finalist in finalists if len(finalist.real) == most]


def best_plain(finalists: Sequence[Finalist]) -> Finalist | None:
    """The better first-come batching of those that can be compared."""
    plain = [finalist for finalist in to_the_end(finalists) if finalist.is_plain]
    return max(plain, key=lambda finalist: finalist.goodput, default=None)


def choose(finalists: Sequence[Finalist]) -> Finalist:
    """The default, unless another is clearly better or beat it early. Plain batching is there to
    compare with."""
    left = [finalist for finalist in to_the_end(finalists) if not finalist.is_plain]
    best = max(left, key=lambda finalist: finalist.goodput)
    default = next((finalist for finalist in left if finalist.is_default), None)
    if default is None or best.goodput > _BETTER * default.goodput:
        return best
    return default
