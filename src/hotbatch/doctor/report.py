"""The verdict for people: a few lines, the bars of where the time went; and as JSON."""

from __future__ import annotations

import dataclasses
import json

from hotbatch.doctor.verdict import Finding, Verdict
from hotbatch.doctor.window import COMPUTE_BOUND, Window

_BAR = 40
_TIMES = 2.0  # a gain from which on it is told as a factor
_DISTANCES = {"token": "next tokens", "turn": "next turns", "request": "next requests"}
_USEFUL = ("decode", "prefill")


def as_json(verdict: Verdict, window: Window) -> str:
    """One object: the verdict's fields, and what was seen under `window`."""
    facts = dataclasses.asdict(verdict)
    facts["window"] = dataclasses.asdict(window)
    return json.dumps(facts, indent=2)


def as_text(verdict: Verdict, window: Window) -> str:
    lines = [verdict.headline, "", _utilisation(verdict, window)]
    if verdict.shares:
        lines += ["", *_bars(verdict)]
    if window.guesses:
        lines += ["", *_ledger(window)]
    for number, finding in enumerate(verdict.findings, 1):
        lines += ["", *_finding(number, finding)]
    lines += ["", f"Confidence: {verdict.confidence}, {_why(window)}."]
    return "\n".join(lines)


def _utilisation(verdict: Verdict, window: Window) -> str:
    used = verdict.decode_utilisation
    if used is None:
        reason = f"{window.server} does not tell; give --bandwidth and --weight-bytes"
        if window.causes:
            reason = "nothing decoded"
        elif (window.step_tokens or 0.0) >= COMPUTE_BOUND:
            reason = "its steps are mostly parts of prompts"
        return f"Decode utilisation: unknown ({reason})."
    where = "above" if used >= verdict.aim else "below"
    return (
        f"Decode utilisation: {100 * used:.0f} % of the ceiling, {where} the aim of "
        f"{100 * verdict.aim:.0f} %."
    )


def _bars(verdict: Verdict) -> list[str]:
    lines = []
    for cause, share in sorted(
        verdict.shares.items(), key=lambda item: (item[0] not in _USEFUL, -item[1])
    ):
        if share >= 0.005:
            bar = ("█" if cause in _USEFUL else "░") * max(1, round(_BAR * share))
            lines.append(f"  {cause:<21}{100 * share:5.1f} %  {bar}")
    return lines


def _ledger(window: Window) -> list[str]:
    """A line for each distance that guessed."""
    return [
        f"Guesses of {_DISTANCES.get(distance, distance)}: {guesses.attempted:.0f} tokens a "
        f"second, {100 * guesses.accepted / guesses.attempted:.0f} % right; in each second they "
        f"cost {1000 * guesses.spent:.0f} ms and saved {1000 * guesses.saved:.0f} ms."
        for distance, guesses in window.guesses.items()
    ]


def _finding(number: int, finding: Finding) -> list[str]:
    share = "" if finding.share is None else f" ({100 * finding.share:.0f} % of the time)"
    lines = [f"{number}. {finding.cause}{share}"]
    lines += [f"   - {line}" for line in finding.evidence]
    lines.append(f"   Do: {finding.lever}")
    if finding.gain is not None:
        lines.append(f"   Expected: up to {_more(finding.gain)}.")
    return lines


def _more(gain: float) -> str:
    if gain >= _TIMES:
        return f"{1.0 + gain:.0f} times the throughput"
    return f"{100 * gain:.0f} % more throughput"


def _why(window: Window) -> str:
    how = (
        "by the server's own accounts of its time"
        if window.causes
        else f"from outside, as {window.server} does not say where its time goes"
    )
    return f"after {window.seconds:.0f} s, {how}"
