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
2. Of the model's time, what refused drafts cost is `speculation_waste`, their share of the draft
   model's time included, and so is what requests computed ahead add to the steps of others,
   whatever they earn later; a step of guesses alone is no step here, as it takes what would be
   idle. What the prompts cost
   the decodes beside them is `prefill_interference`, unless they were computed before and lost
   (`kv_limit`). Both are differences on the learnt curve, scaled to this step.
3. What the rest took beyond its ideal time is `kernel_inefficiency`.
4. Below the knee the weights are read for fewer rows than they could serve. The part of their
   reading that a full step would have shared is `kv_limit` if requests wait for KV blocks,
   `seat_limit` if they wait for a seat, else `few_sequences`.
5. What is left is what the tokens are worth: `decode`, or `prefill` in steps without decodes.

No step can be quicker than its ideal time. One that is, with all of its rows, shows that the
ceiling was measured too low, next to a busy neighbour maybe; it is raised to what was reached.

Cost: about ten microseconds a step.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp
from typing import NamedTuple

from hotbatch.core.cost_model import CostModel, StepFeatures
from hotbatch.core.plan import StepPlan, StepResult
from hotbatch.core.step_mix import HeldBack, StepMix
from hotbatch.engine.ceiling import (
    CeilingSnapshot,
    CurvePoint,
    IdealTime,
    Roofline,
)

_RECENT_SECONDS = 10.0  # of busy time, after which a step counts for a third
_BEATEN = 0.98  # of its ideal time; a step that takes less tells of a higher ceiling
_NUM_SUMS = 5  # fields of PhaseTotals
_CURVE_ROWS = (
    *range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512,
)  # fmt: skip


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
_DECODE, _PREFILL, _NO_WORK = map(CAUSES.index, (Cause.DECODE, Cause.PREFILL, Cause.NO_WORK))
_KV_LIMIT, _HOST_GAP = map(CAUSES.index, (Cause.KV_LIMIT, Cause.HOST_GAP))
_PREFILL_INTERFERENCE = CAUSES.index(Cause.PREFILL_INTERFERENCE)
_SPECULATION_WASTE = CAUSES.index(Cause.SPECULATION_WASTE)
_KERNEL_INEFFICIENCY = CAUSES.index(Cause.KERNEL_INEFFICIENCY)
_OF_HELD_BACK = {
    None: CAUSES.index(Cause.FEW_SEQUENCES),
    HeldBack.KV: _KV_LIMIT,
    HeldBack.SEATS: CAUSES.index(Cause.SEAT_LIMIT),
}


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


class TokenCounts(NamedTuple):
    """Rows of steps by kind, as in StepAccount."""

    decode: int = 0
    prompt: int = 0
    draft: int = 0
    rejected: int = 0
    recomputed: int = 0


@dataclass(frozen=True, slots=True)
class Totals:
    """What has added up since the accounts began.

    Attributes:
        seconds: wall time; the sum of `by_cause`.
        by_cause: seconds.
        tokens: rows computed since the start.
        phases: sums since the start.
        recent: the same, each step fading with a time constant of ten seconds of steps.
    """

    seconds: float
    by_cause: Mapping[Cause, float]
    tokens: TokenCounts
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


class Accountant:
    """Keeps the accounts of one engine. Written on its thread, read on any.

    Args:
        roofline: the model on this machine.
        now: when the accounts begin; nothing is to do yet.
        cost_model: the learnt curve; without one, or until it is trained, the ideal times
            stand for it.
        max_rows: sequences of the largest step, up to which the curve is drawn.
    """

    def __init__(
        self,
        roofline: Roofline,
        now: float,
        *,
        cost_model: CostModel | None = None,
        max_rows: int = 256,
    ) -> None:
        self.roofline = roofline
        self._cost_model = cost_model
        self._max_rows = max_rows
        self._knee = roofline.knee
        self._began = self._ended = now  # of all accounts; of the last one
        self._idle_since: float | None = now
        self._lock = threading.Lock()  # a reader sees whole accounts
        self._seconds = [0.0] * len(CAUSES)
        self._tokens = TokenCounts()
        self._sums = {phase: [0.0] * _NUM_SUMS for phase in Phase}
        self._recent = {phase: [0.0] * _NUM_SUMS for phase in Phase}
        self._host = 0.0  # these four fade like `_recent`
        self._decode_rows = 0.0
        self._decode_context = 0.0
        self._decode_seconds = 0.0

    def note_idle(self, now: float) -> None:
        """The engine found nothing to compute; it waits until the next step starts."""
        if self._idle_since is None:
            self._idle_since = now

    def account(
        self,
        plan: StepPlan,
        result: StepResult | None,
        *,
        started: float,
        planned: float,
        executed: float,
        delivered: float,
    ) -> StepAccount:
        """Book a step.

        Args:
            result: None if the step raised; its time is the host's then.
            started, planned, executed, delivered: when the turn began, and when planning, the
                model and delivering were done.
        """
        mix = StepMix.of_plan(plan)
        rejected = _num_rejected(plan, result) if mix.num_drafts else 0
        kept = _without_drafts(mix.all, rejected) if rejected else mix.all
        ideal = self.roofline.ideal(kept)
        seconds = delivered - self._ended
        idle = 0.0 if self._idle_since is None else started - self._idle_since
        execute = executed - planned
        times = [0.0] * len(CAUSES)
        times[_NO_WORK] = idle
        if result is None:
            times[_HOST_GAP] = seconds - idle
        else:
            times[_HOST_GAP] = seconds - idle - execute
            drafting = sum(result.draft_seconds)
            self._attribute(times, mix, kept, rejected, execute - drafting)
            if drafting:
                refused = drafting * rejected / mix.num_drafts if mix.num_drafts else drafting
                times[_SPECULATION_WASTE] += refused
                times[_DECODE] += drafting - refused
        busy = seconds - idle
        decodes = mix.decode.num_tokens
        phase = Phase.DECODE if decodes == mix.all.num_tokens else Phase.MIXED
        mbu = mfu = 0.0
        if busy > 0.0:
            mbu, mfu = ideal.memory / busy, ideal.compute / busy
        account = StepAccount(
            plan.step_id,
            self._ended,
            seconds,
            idle,
            execute,
            phase if decodes else Phase.PREFILL,
            mix.all.num_requests,
            decodes,
            mix.all.num_tokens - decodes,
            mix.num_drafts,
            rejected,
            mix.num_recomputed,
            self.roofline.work.bytes_of(kept),
            self.roofline.work.operations_of(kept),
            ideal.seconds,
            mbu,
            mfu,
            max(mbu, mfu) if decodes else None,
            mix.held_back,
            tuple(times),
        )
        self._ended = delivered
        self._idle_since = None
        with self._lock:
            self._add(account, ideal, mix.decode)
        return account

    def _attribute(
        self, times: list[float], mix: StepMix, kept: StepFeatures, rejected: int, execute: float
    ) -> None:
        """Points 2 to 5 of the module's text: share out the model's time."""
        rest = execute
        whole = mix.all.plus(mix.ahead) if mix.ahead.num_tokens else mix.all
        self._review_ceiling(whole, execute)
        if mix.ahead.num_tokens:
            times[_SPECULATION_WASTE] = rest - self._share(rest, mix.all, whole)
            rest -= times[_SPECULATION_WASTE]
        own = kept  # the rows that `rest` is the time of
        num_prompt = mix.all.num_tokens - mix.decode.num_tokens
        lost_share = mix.num_recomputed / num_prompt if num_prompt else 0.0
        if rejected:
            waste = rest - self._share(rest, kept, mix.all)
            times[_SPECULATION_WASTE] += waste
            rest -= waste
        if num_prompt and mix.decode.num_tokens:
            # A prompt's last step may have guesses, too; each decode has one row that is none.
            drafts = mix.decode.num_tokens - mix.decode.num_requests
            own = _without_drafts(mix.decode, min(rejected, drafts))
            interference = rest - self._share(rest, own, kept)
            rest -= interference
            times[_PREFILL_INTERFERENCE] = interference * (1.0 - lost_share)
            times[_KV_LIMIT] = interference * lost_share
        elif lost_share:
            times[_KV_LIMIT] = rest * lost_share
            rest -= times[_KV_LIMIT]
        ideal = self.roofline.ideal(own)
        needed = ideal.seconds
        reached = min(1.0, rest / needed) if needed > 0.0 else 0.0
        times[_KERNEL_INEFFICIENCY] = rest - needed * reached
        unfilled = 1.0 - kept.num_tokens / self._knee
        if unfilled > 0.0:
            filled = ideal.memory - unfilled * self.roofline.weights_seconds(own)
            below_knee = (needed - max(filled, ideal.compute)) * reached
            times[_OF_HELD_BACK[mix.held_back]] += below_knee
            rest -= below_knee
        rest -= times[_KERNEL_INEFFICIENCY]
        times[_DECODE if mix.decode.num_tokens else _PREFILL] = rest

    def _review_ceiling(self, whole: StepFeatures, seconds: float) -> None:
        """By all rows of a step and the time that was measured: what is thought to be the part of
        its decodes, beside a long prompt, is an estimate and tells nothing of the machine."""
        ideal = self.roofline.ideal(whole)
        if not 0.0 < seconds < _BEATEN * ideal.seconds:
            return
        factor = ideal.seconds / seconds
        ceiling = self.roofline.ceiling
        if ideal.memory > ideal.compute:
            ceiling = replace(ceiling, bandwidth=ceiling.bandwidth * factor)
        else:
            ceiling = replace(
                ceiling,
                compute=ceiling.compute * factor,
                attention_compute=ceiling.attention_compute * factor,
            )
        self.roofline = Roofline(self.roofline.work, ceiling)
        self._knee = self.roofline.knee

    def _share(self, seconds: float, part: StepFeatures, whole: StepFeatures) -> float:
        """What of a step's time its part would have taken alone, by the curve."""
        model = self._cost_model
        if model is not None and model.is_trained:
            return seconds * min(1.0, model.predict(part) / model.predict(whole))
        ideal = self.roofline.ideal
        return seconds * min(1.0, ideal(part).seconds / ideal(whole).seconds)

    def _add(self, account: StepAccount, ideal: IdealTime, decode: StepFeatures) -> None:
        sums = self._seconds
        for index, seconds in enumerate(account.times):
            sums[index] += seconds
        tokens = self._tokens
        self._tokens = TokenCounts(
            tokens.decode + account.num_decode_tokens,
            tokens.prompt + account.num_prompt_tokens,
            tokens.draft + account.num_draft_tokens,
            tokens.rejected + account.num_rejected_tokens,
            tokens.recomputed + account.num_recomputed_tokens,
        )
        busy = account.seconds - account.idle_seconds
        new = (1.0, busy, ideal.memory, ideal.compute, account.ideal_seconds)
        fading = exp(-busy / _RECENT_SECONDS)
        for recent in self._recent.values():
            for index in range(_NUM_SUMS):
                recent[index] *= fading
        for totals in (self._sums[account.phase], self._recent[account.phase]):
            for index in range(_NUM_SUMS):
                totals[index] += new[index]
        self._host = self._host * fading + account.times[_HOST_GAP]
        is_decode = account.phase is Phase.DECODE
        self._decode_rows = self._decode_rows * fading + is_decode * decode.num_tokens
        self._decode_context = self._decode_context * fading + is_decode * decode.context_tokens
        self._decode_seconds = self._decode_seconds * fading + is_decode * account.execute_seconds

    # What others read

    def totals(self, now: float) -> Totals:
        """All that has added up; time since the last step counts if the engine waits."""
        with self._lock:
            seconds = list(self._seconds)
            tokens, ended, idle_since = self._tokens, self._ended, self._idle_since
            phases = {phase: PhaseTotals(*sums) for phase, sums in self._sums.items()}
            recent = {phase: PhaseTotals(*sums) for phase, sums in self._recent.items()}
        if idle_since is not None and now > idle_since:
            seconds[_NO_WORK] += now - idle_since
            seconds[_HOST_GAP] += idle_since - ended
            ended = now
        by_cause = dict(zip(CAUSES, seconds, strict=True))
        return Totals(ended - self._began, by_cause, tokens, phases, recent)

    def snapshot(self) -> CeilingSnapshot:
        with self._lock:
            steps = sum(recent[0] for recent in self._recent.values())
            decode_steps = self._recent[Phase.DECODE][0]
            rows = self._decode_rows / decode_steps if decode_steps else 0.0
            context = self._decode_context / self._decode_rows if self._decode_rows else 0.0
            seconds = self._decode_seconds / decode_steps if decode_steps else 0.0
            host = self._host / steps if steps else 0.0
        return CeilingSnapshot(
            ceiling=self.roofline.ceiling,
            work=self.roofline.work,
            is_learnt=self._cost_model is not None and self._cost_model.is_trained,
            knee=self._knee,
            context=context,
            curve=self._curve(int(context)),
            host_seconds=host,
            operating_tokens=rows,
            operating_seconds=seconds,
        )

    def _curve(self, context: int) -> tuple[CurvePoint, ...]:
        model = self._cost_model
        points = []
        for count in _CURVE_ROWS:
            if count <= self._max_rows:
                step = StepFeatures(count, count, count * context, count * context, count)
                ideal = self.roofline.ideal(step).seconds
                is_learnt = model is not None and model.is_trained
                # Beyond what was seen the curve is a guess, and no step is quicker than ideal.
                predicted = model.predict(step) if model is not None and is_learnt else ideal
                points.append(CurvePoint(count, max(predicted, ideal), ideal))
        return tuple(points)


def _num_rejected(plan: StepPlan, result: StepResult | None) -> int:
    """Guesses that were not confirmed: each was computed for nothing."""
    if result is None:
        return 0
    return sum(
        planned.num_drafts - max(0, len(outcome.token_ids) - 1)
        for planned, outcome in zip(plan.requests, result.requests, strict=True)
        if planned.num_drafts
    )


def _without_drafts(step: StepFeatures, count: int) -> StepFeatures:
    """A step, or the part of it that decodes, without `count` of its drafts, which are taken to
    be of middling context."""
    return StepFeatures(
        step.num_tokens - count,
        step.num_requests,
        step.context_tokens - count,
        step.attended - step.attended * count // max(1, step.num_tokens),
        step.num_sampled - count,
    )
