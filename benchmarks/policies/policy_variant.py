"""The ways of batching that are compared. Names are what the tables and plots show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from policy_machine import Machine

from hotbatch.core import Policies
from hotbatch.core.policies import full_policies

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


_INGREDIENTS = ("deadlines", "classes", "fairness", "forecast", "partial_eviction")


def only(*ingredients: str) -> MakePolicies:
    """First come, first served with some of the full scheduler's ingredients."""
    return lambda _: Policies(**dict.fromkeys(ingredients, True))  # type: ignore[arg-type]


def without(*ingredients: str) -> MakePolicies:
    """The full scheduler but for some ingredients."""
    return lambda _: full_policies(**dict.fromkeys(ingredients, False))


def variants(machine: Machine) -> list[Variant]:
    """Everything that is compared, simplest first.

    The ladder adds one ingredient after the other to first-come batching; leave-one-out takes
    each from the full scheduler. All of them have the machine's largest budget, which the
    deadlines make use of and nothing else does.
    """
    ladder = [
        Variant(
            "+ " + _INGREDIENTS[count - 1].replace("_", " "),
            "ladder",
            policies=only(*_INGREDIENTS[:count]),
        )
        for count in range(1, len(_INGREDIENTS))
    ]
    left_out = [
        Variant(f"full - {name.replace('_', ' ')}", "without", policies=without(name))
        for name in _INGREDIENTS
    ]
    return [
        *baselines(machine),
        *ladder,
        Variant("full", "full", policies=without()),
        *left_out,
    ]
