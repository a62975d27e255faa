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
    its loads; `real` is empty where nothing was confirmed."""

    trial: Trial
    real: tuple[Figures, ...] = ()
    is_default: bool = False

    @property
    def is_plain(self) -> bool:
        return self.trial.settings.is_plain

    @property
    def best(self) -> Figures | None:
        """The better of its rounds, as a neighbour can only make it worse."""
        return max(self.real, key=lambda figures: figures.goodput, default=None)

    @property
    def goodput(self) -> float:
        """What the engine brought, else what the simulator promised."""
        best = self.best
        return self.trial.worth if best is None else best.goodput

    @property
    def attainment(self) -> float:
        """Share of requests as promised, of the same."""
        best = self.best
        return self.trial.attainment if best is None else best.attainment


def choose(finalists: Sequence[Finalist]) -> Finalist:
    """The default, unless another is clearly better. Plain batching is there to compare with."""
    default = next(finalist for finalist in finalists if finalist.is_default)
    best = max(
        (finalist for finalist in finalists if not finalist.is_plain),
        key=lambda finalist: finalist.goodput,
    )
    return best if best.goodput > _BETTER * default.goodput else default
