"""The ways of batching that are compared. Names are what the tables and plots show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from policy_machine import Machine

from hotbatch.core import Policies

MakePolicies = Callable[[Machine], Policies | None]


def plain(_: Machine) -> Policies | None:
    """First come, first served; the scheduler's default."""
    return None


@dataclass(frozen=True, slots=True)
class Variant:
    """`overrides` are fields of SchedulerConfig; `family` groups what competes for one name."""

    name: str
    family: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    policies: MakePolicies = plain


def baselines(machine: Machine) -> list[Variant]:
    """Static, request-level and first-come continuous batching, each at several sizes."""
    statics = [
        Variant(f"static {size}", "static", {"batching": "static", "static_batch_size": size,
                "static_timeout": 0.1})
        for size in machine.static_sizes
    ]  # fmt: skip
    first_come = [
        Variant(f"first-come {budget}", "first-come", {
            "max_num_batched_tokens": budget,
            "max_num_seqs": min(machine.max_num_seqs, budget),
        })
        for budget in machine.budgets
    ]  # fmt: skip
    return [*statics, Variant("request-level", "request-level", {"batching": "request"}),
            *first_come]  # fmt: skip


def variants(machine: Machine) -> list[Variant]:
    """Everything that is compared, simplest first."""
    return baselines(machine)
