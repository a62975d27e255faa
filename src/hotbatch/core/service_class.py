"""Service classes and latency targets: how urgent a request is, and what it was promised.

OpenAI's `service_tier` names the class; vLLM's integer `priority` names it where no tier is
given, and orders requests inside a class. Its polarity is vLLM's: a *lower* number is served
earlier.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ServiceClass(enum.IntEnum):
    """A higher class displaces a lower one."""

    BATCH = 0  # work that may wait: never at zero, first to step aside
    STANDARD = 1
    INTERACTIVE = 2  # somebody is watching

    @property
    def label(self) -> str:
        return self.name.lower()


_TIERS = {
    "priority": ServiceClass.INTERACTIVE,
    "default": ServiceClass.STANDARD,
    "flex": ServiceClass.BATCH,
}


def class_of(service_tier: str | None, priority: int) -> ServiceClass:
    """The class of a request.

    Args:
        service_tier: "priority", "default" or "flex"; "auto" and None leave it to `priority`.
        priority: below 0 interactive, 0 standard, above 0 batch.
    """
    tier = _TIERS.get(service_tier or "")
    if tier is not None:
        return tier
    if priority == 0:
        return ServiceClass.STANDARD
    return ServiceClass.INTERACTIVE if priority < 0 else ServiceClass.BATCH


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """Seconds to the first token after arrival, and seconds for each token after it; None
    where nothing was promised."""

    ttft: float | None = None
    tpot: float | None = None


NO_TARGETS = LatencyTargets()
