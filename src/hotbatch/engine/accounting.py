"""Where the time goes: every step against the machine's ceiling, every second with its cause.

The contract for those who show it:

- `engine.account_observers` is a list of callables; each hears a `StepAccount` once a step, on
  the engine's thread, after the step's events were delivered. Empty where the ceiling is not
  known (an executor that does not say what its model needs); `engine.accountant` is then None.
- `engine.totals()` (any thread, cheap) is what has added up since the start, idle time of this
  moment included: a `Totals`.
- `engine.ceiling()` (any thread) is the machine, the model's curve T(n), and where the server
  works on it: a `CeilingSnapshot` of `engine.ceiling`. Both are None without an accountant.

Accounts follow each other without a hole: each begins where the one before ended, so
that their `seconds` sum to the wall time, and the `times` of an account sum to its `seconds`.

Of a step's time, in this order:

1. What lay before it: waiting for work is `no_work`, anything else the host's (`host_gap`), as
   are planning, booking and delivering.
2. Of the model's time, what refused drafts cost is `speculation_waste`. What the prompts cost
   the decodes beside them is `prefill_interference`, unless they were computed before and lost
   (`kv_limit`). Both are differences on the learnt curve, scaled to this step.
3. What the rest took beyond its ideal time is `kernel_inefficiency`.
4. Below the knee the weights are read for fewer rows than they could serve. The part of their
   reading that a full step would have shared is `kv_limit` if requests wait for KV blocks,
   `seat_limit` if they wait for a seat, else `few_sequences`.
5. What is left is what the tokens are worth: `decode`, or `prefill` in steps without decodes.

Cost: about ten microseconds a step.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from typing import NamedTuple

from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.plan import StepPlan, StepResult
from hotbatch.core.step_mix import HeldBack, StepMix
from hotbatch.engine.ceiling import (
    Ceiling,
    CeilingSnapshot,
    CurvePoint,
    IdealTime,
    ModelWork,
    Roofline,
)


class Cause(enum.Enum):
    """What a second was spent on. The first two are work well done; the rest is lost."""

    DECODE = "decode"
    PREFILL = "prefill"
    NO_WORK = "no_work"
    FEW_SEQUENCES = "few_sequences"
    SEAT_LIMIT = "seat_limit"
    KV_LIMIT = "kv_limit"
    HOST_GAP = "host_gap"
    PREFILL_INTERFERENCE = "prefill_interference"
    SPECULATION_WASTE = "speculation_waste"
    KERNEL_INEFFICIENCY = "kernel_inefficiency"


CAUSES: tuple[Cause, ...] = tuple(Cause)


class Phase(enum.Enum):
    """Steps by what is in them."""

    DECODE = "decode"  # every row decodes
    PREFILL = "prefill"  # none does
    MIXED = "mixed"


class StepAccount(NamedTuple):
    """One step and the time before it, in numbers. Times are seconds on the engine's clock.

    Attributes:
        step_id: as in StepPlan and StepStats.
        started: where the account before ended.
        seconds: wall time from there until this step's events were delivered.
        idle_seconds: of these, waiting for work before the step.
        execute_seconds: of these, the model's.
        phase: what kind of step it was.
        num_requests, num_decode_tokens, num_prompt_tokens: rows of the step; recomputed ones are
            prompt tokens, drafts are decode tokens.
        num_draft_tokens, num_rejected_tokens, num_recomputed_tokens: parts of these.
        bytes_needed: weights once, KV of every context, the head only where sampled.
        operations_needed: linear layers, attention, the head only where sampled.
        ideal_seconds: the larger of both at the machine's ceiling.
        mbu, mfu: share of the measured bandwidth and compute that the step used, over its busy
            time (`seconds` less `idle_seconds`).
        decode_utilisation: the larger of the two where anything decoded, else None.
        held_back: why others waited meanwhile, if anything but the budget kept them.
        times: seconds by cause, parallel to `CAUSES`; sums to `seconds`.
    """

    step_id: int
    started: float
    seconds: float
    idle_seconds: float
    execute_seconds: float
    phase: Phase
    num_requests: int
    num_decode_tokens: int
    num_prompt_tokens: int
    num_draft_tokens: int
    num_rejected_tokens: int
    num_recomputed_tokens: int
    bytes_needed: float
    operations_needed: float
    ideal_seconds: float
    mbu: float
    mfu: float
    decode_utilisation: float | None
    held_back: HeldBack | None
    times: tuple[float, ...]

    @property
    def by_cause(self) -> dict[Cause, float]:
        return dict(zip(CAUSES, self.times, strict=True))


@dataclass(frozen=True, slots=True)
class PhaseTotals:
    """Sums over the steps of one phase, in seconds.

    `busy` is wall time without waiting for work, `memory` and `compute` what reading and
    computing would have taken at the ceiling, `ideal` the larger of the two, step by step.
    """

    steps: float = 0.0
    busy: float = 0.0
    memory: float = 0.0
    compute: float = 0.0
    ideal: float = 0.0

    @property
    def mbu(self) -> float:
        return self.memory / self.busy if self.busy else 0.0

    @property
    def mfu(self) -> float:
        return self.compute / self.busy if self.busy else 0.0


@dataclass(frozen=True, slots=True)
class Totals:
    """What has added up since the accounts began.

    Attributes:
        seconds: wall time; the sum of `by_cause`.
        by_cause: seconds.
        phases: sums since the start.
        recent: the same, each step fading with a time constant of ten seconds of steps.
    """

    seconds: float
    by_cause: Mapping[Cause, float]
    phases: Mapping[Phase, PhaseTotals]
    recent: Mapping[Phase, PhaseTotals]

    @property
    def decode_utilisation(self) -> float | None:
        """Of the recent steps that decode: ideal time over busy time. None before any."""
        return _utilisation(self.recent)

    @property
    def decode_utilisation_since_start(self) -> float | None:
        return _utilisation(self.phases)


def _utilisation(phases: Mapping[Phase, PhaseTotals]) -> float | None:
    decoding = (phases[Phase.DECODE], phases[Phase.MIXED])
    busy = sum(phase.busy for phase in decoding)
    return sum(phase.ideal for phase in decoding) / busy if busy else None
