"""From what was seen to what to do: the largest loss, its evidence, the lever, the gain.

A server that accounts for its time is judged by the accounts: losses are shares of wall time,
and the gain of a fuller batch is read off its learnt curve T(n). vLLM and SGLang do not say where
their time goes; they are judged by what their queues and caches look like, and less surely.

What a person can change comes before what only other kernels would change, so `kernels` is named
only where nothing else stands out. The accounts know two losses of a small batch: the part of the
ideal time that more sequences would have shared, and what the steps took beyond their ideal time.
More sequences would share the latter as well, whatever the kernels' fault in it; how much of both,
the learnt curve tells. So that part is held against the batch here, and the rest against the
kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from hotbatch.doctor.levers import LEVERS
from hotbatch.doctor.window import COMPUTE_BOUND, Window

AIM = 0.7  # decode utilisation below which throughput is left on the table
_NOTABLE = 0.15  # share of the time from which on a loss is named
_CLEAR = 1.5  # times the next loss that makes a finding sure
_PROMPT_HEAVY = 0.5  # share of the busy time that prompts take
_GOOD_ENOUGH = 0.8  # of the best throughput on the curve: where a batch counts as full
_LONG, _SHORT = 10.0, 3.0  # seconds of watching that make a verdict sure, or doubtful
_FULL_CACHE = 0.9
_POOR_DRAFTS = 0.7  # share refused from which on guessing does not pay
_SMALL_BATCH = ("few_clients", "kv_cache", "seats")  # losses that a fuller batch would end
_USUAL_KNEE = 16.0  # rows below which a batch is called small where the knee is not told


@dataclass(frozen=True, slots=True)
class Finding:
    """One loss.

    `share` is that of the wall time which would be saved, None where the server does not say: of
    a small batch by the learnt curve, so more than the accounts book; `gain` is by how much
    throughput would rise if it were gone (0.3 is 30 % more), None where nobody can tell.
    """

    cause: str
    share: float | None
    gain: float | None
    evidence: tuple[str, ...]
    lever: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a person is told. `findings` are sorted, the first is the verdict's `cause`;
    `confidence` is "high", "medium" or "low"."""

    cause: str
    headline: str
    decode_utilisation: float | None
    aim: float
    confidence: str
    findings: tuple[Finding, ...]
    shares: Mapping[str, float]


def judge(window: Window) -> Verdict:
    """The verdict on a window."""
    if window.causes:
        return _judge_accounts(window)
    return _judge_outside(window)


# ---- by the accounts


def losses(window: Window) -> dict[str, float]:
    """Shares of wall time by what a person would call them."""
    get = window.causes.get
    prompts = get("prefill", 0.0) + get("prefill_interference", 0.0)
    busy = 1.0 - get("no_work", 0.0)
    shares = {
        "few_clients": get("few_sequences", 0.0),
        "kv_cache": get("kv_limit", 0.0),
        "seats": get("seat_limit", 0.0),
        "host": get("host_gap", 0.0),
        "prompts": prompts if prompts >= _PROMPT_HEAVY * busy else 0.0,
        "speculation": get("speculation_waste", 0.0),
        "kernels": get("kernel_inefficiency", 0.0),
    }
    held_back = _held_back(window, shares)
    if held_back is not None:
        booked = sum(shares[cause] for cause in _SMALL_BATCH)
        decoding = get("decode", 0.0) + booked
        kernels = shares["kernels"] * decoding / max(decoding + get("prefill", 0.0), 1e-9)
        # Of the decodes' time, what they would not have taken in a batch that is full.
        shared = (decoding + kernels) * _emptiness(window, held_back)
        moved = min(kernels, max(0.0, shared - booked))
        shares[held_back] += moved
        shares["kernels"] -= moved
    shares["few_clients"] += get("no_work", 0.0)
    return shares


def _held_back(window: Window, shares: Mapping[str, float]) -> str | None:
    """Why no more sequences decode: as the accounts say, which look no further than the knee;
    beyond it, that nobody else asks. None if others wait, but neither for a seat nor for blocks.
    """
    cause = max(_SMALL_BATCH, key=lambda cause: shares[cause])
    if shares[cause] > 0.0:
        return cause
    return "few_clients" if window.waiting < 1.0 else None


def _judge_accounts(window: Window) -> Verdict:
    shares = losses(window)
    ranked = sorted(
        (cause for cause in shares if cause != "kernels"), key=lambda c: shares[c], reverse=True
    )
    notable = [cause for cause in ranked if shares[cause] >= _NOTABLE]
    kernels = shares["kernels"]
    if window.causes.get("no_work", 0.0) > 0.995:
        return _verdict(window, "idle", "low", ())
    if kernels >= _NOTABLE and (not notable or kernels > 3.0 * shares[notable[0]]):
        is_below = window.decode_utilisation is None or window.decode_utilisation < AIM
        notable = ["kernels", *notable] if is_below or notable else notable
    elif kernels >= _NOTABLE:
        notable.append("kernels")
    findings = tuple(_finding(window, cause, shares[cause]) for cause in notable)
    if not findings:
        return _verdict(window, "healthy", _confidence(window, 1.0, 0.0), ())
    others = [shares[cause] for cause in ranked if cause != notable[0]]
    confidence = _confidence(window, shares[notable[0]], max(others, default=0.0))
    return _verdict(window, notable[0], confidence, findings)


def _confidence(window: Window, first: float, second: float) -> str:
    if window.seconds < _SHORT:
        return "low"
    is_clear = first >= _CLEAR * second
    return "high" if is_clear and window.seconds >= _LONG else "medium"


def _finding(window: Window, cause: str, share: float | None) -> Finding:
    return Finding(
        cause, share, _gain(window, cause, share), _evidence(window, cause), LEVERS[cause]
    )


def _gain(window: Window, cause: str, share: float | None) -> float | None:
    """By how much throughput would rise."""
    fuller = _fuller(window, cause) if cause in _SMALL_BATCH else None
    if fuller is None:
        return None if share is None else _without(share)
    idle = window.causes.get("no_work", 0.0) if cause == "few_clients" else 0.0
    return max(0.0, fuller / (1.0 - min(idle, 0.99)) - 1.0)


def _fuller(window: Window, cause: str) -> float | None:
    """How many times as many tokens a second decodes yield in a full batch, or in one that has
    all who wait, on the learnt curve; None where there is none."""
    goal = full_batch(window.curve)
    if goal is None or window.decode_rows < 1.0:
        return None
    there = window.decode_rows + window.waiting
    rows = float(goal) if cause == "few_clients" else min(float(goal), there)
    return _rate(window.curve, rows) / _rate(window.curve, window.decode_rows)


def _emptiness(window: Window, cause: str) -> float:
    """The share of the decodes' time that a full batch would save."""
    return max(0.0, 1.0 - 1.0 / (_fuller(window, cause) or 1.0))


def _without(share: float) -> float:
    return share / max(0.01, 1.0 - share)


def full_batch(curve: Mapping[int, float]) -> int | None:
    """The smallest batch that has most of the best throughput on the curve; None without one."""
    if len(curve) < 2:
        return None
    best = max(rows / seconds for rows, seconds in curve.items())
    return min(rows for rows, seconds in curve.items() if rows / seconds >= _GOOD_ENOUGH * best)


def _rate(curve: Mapping[int, float], rows: float) -> float:
    """Tokens per second with so many sequences, by straight lines between the curve's points."""
    points = sorted(curve.items())
    for (x0, y0), (x1, y1) in pairwise(points):
        if rows <= x1:
            seconds = y0 + (y1 - y0) * (max(rows, x0) - x0) / (x1 - x0)
            return rows / seconds
    return rows / points[-1][1]


# ---- from outside


def _judge_outside(window: Window) -> Verdict:
    if window.running + window.waiting < 0.05 and window.generated_rate == 0.0:
        return _verdict(window, "idle", "low", ())
    causes = []
    knee = window.knee or _USUAL_KNEE
    has_queue = window.waiting >= 1.0
    is_full = window.kv_usage is not None and window.kv_usage >= _FULL_CACHE
    if window.draft_rate > 0.0 and (window.rejected_share or 0.0) >= _POOR_DRAFTS:
        causes.append("speculation")
    if (has_queue and is_full) or window.preemption_rate > 0.05:
        causes.append("kv_cache")
    elif has_queue and window.running < 4.0 * knee:
        causes.append("seats")
    if _prompts_share(window) >= _PROMPT_HEAVY:
        causes.append("prompts")
    if not has_queue and window.running < knee and not causes:
        causes.append("few_clients")
    findings = tuple(_finding(window, cause, None) for cause in causes)
    is_sure = window.seconds >= _LONG and len(causes) <= 1
    confidence = "medium" if is_sure else "low"
    return _verdict(window, causes[0] if causes else "healthy", confidence, findings)


def _prompts_share(window: Window) -> float:
    """Of the model's time, what prompts take.

    Where they come without end, most requests get their tokens in steps that are as long as the
    prompts beside them, so the time before first tokens tells too little. What steps hold tells
    more: beyond `COMPUTE_BOUND` rows each costs its part.
    """
    waited = window.prefill_share or 0.0
    if not window.step_tokens or not window.step_rate:
        return waited
    decodes = max(COMPUTE_BOUND, window.generated_rate / window.step_rate)
    return max(waited, 1.0 - decodes / max(decodes, window.step_tokens))


# ---- words


def _verdict(window: Window, cause: str, confidence: str, findings: tuple[Finding, ...]) -> Verdict:
    return Verdict(
        cause=cause,
        headline=_HEADLINES[cause],
        decode_utilisation=window.decode_utilisation,
        aim=AIM,
        confidence=confidence,
        findings=findings,
        shares=dict(window.causes),
    )


_HEADLINES = {
    "idle": "Nothing was asked of the server: there is nothing to judge.",
    "healthy": "Healthy: nothing stands out that a setting or more load would change.",
    "few_clients": "Too few requests at a time to fill the machine.",
    "kv_cache": "The KV cache is too small for the requests that want to run.",
    "seats": "Requests wait for a seat while the machine has room.",
    "host": "The host holds the model up between steps.",
    "prompts": "Most of the machine's time goes into reading prompts.",
    "speculation": "Guesses are refused and cost more than they bring.",
    "kernels": "The batch is as full as it needs to be; the rest is lost inside the kernels.",
}


def _evidence(window: Window, cause: str) -> tuple[str, ...]:
    return tuple(line for line in _LINES[cause](window) if line)


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{100.0 * value:.0f} %"


def _share_line(window: Window, *causes: str) -> str:
    if not window.causes:
        return ""
    return ", ".join(
        f"{_percent(window.causes.get(cause, 0.0))} of the time is {cause}" for cause in causes
    )


def _batch_line(window: Window) -> str:
    knee = f"; one more is nearly free up to {window.knee:.0f}" if window.knee else ""
    who = "sequences" if window.draft_rate == 0.0 else "rows, guesses among them,"
    return f"{window.decode_rows:.1f} {who} decode at a time{knee}"


def _full_line(window: Window, cause: str) -> str:
    fuller = _fuller(window, cause)
    if fuller is None or fuller < 1.05:
        return ""
    whose = "a full batch" if cause == "few_clients" else "a batch with those who wait"
    return f"{whose} decodes {fuller:.1f} times as many tokens a second, by the learnt curve"


def _queue_line(window: Window) -> str:
    return f"{window.running:.1f} requests run and {window.waiting:.1f} wait"


def _cache_line(window: Window) -> str:
    lost = ""
    if window.preemption_rate or window.recomputed_rate:
        lost = (
            f"; {window.preemption_rate:.1f} evictions and {window.recomputed_rate:.0f} "
            "recomputed tokens a second"
        )
    return f"{_percent(window.kv_usage)} of the KV cache is in use{lost}"


def _prompt_line(window: Window) -> str:
    hits = window.cache_hit_share
    found = f"; the prefix cache has {_percent(hits)} of them" if hits is not None else ""
    return (
        f"{window.prompt_rate:.0f} prompt tokens a second for {window.generated_rate:.0f} "
        f"generated{found}"
    )


def _step_line(window: Window) -> str:
    if window.step_tokens is None or not window.step_rate:
        return ""
    decodes = window.generated_rate / window.step_rate
    return f"{window.step_tokens:.0f} tokens in a step, {decodes:.0f} of them generate"


def _draft_line(window: Window) -> str:
    return (
        f"{window.draft_rate:.0f} guesses a second, {_percent(window.rejected_share)} of them "
        "refused"
    )


def _host_line(window: Window) -> str:
    if window.host_seconds is None:
        return ""
    return f"{1e3 * window.host_seconds:.1f} ms of the host in each step"


_LINES = {
    "few_clients": lambda w: (
        _share_line(w, "no_work", "few_sequences"),
        _batch_line(w),
        _full_line(w, "few_clients"),
        _queue_line(w),
    ),
    "kv_cache": lambda w: (
        _share_line(w, "kv_limit"),
        _cache_line(w),
        _full_line(w, "kv_cache"),
        _queue_line(w),
    ),
    "seats": lambda w: (
        _share_line(w, "seat_limit"),
        _full_line(w, "seats"),
        _queue_line(w),
        _cache_line(w),
    ),
    "host": lambda w: (_share_line(w, "host_gap"), _host_line(w)),
    "prompts": lambda w: (
        _share_line(w, "prefill", "prefill_interference"),
        _prompt_line(w),
        _step_line(w),
    ),
    "speculation": lambda w: (_share_line(w, "speculation_waste"), _draft_line(w)),
    "kernels": lambda w: (_share_line(w, "kernel_inefficiency"), _batch_line(w)),
}
