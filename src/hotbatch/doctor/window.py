"""What happened between scrapes: differences of counters, means of gauges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hotbatch.core.errors import InvalidRequestError
from hotbatch.doctor.scrape import Scrape

COMPUTE_BOUND = 256.0  # rows from which on the time of a step grows with them on most machines


@dataclass(frozen=True, slots=True)
class Guesses:
    """What the guesses of one distance did, each second: tokens, and predicted seconds."""

    attempted: float
    accepted: float
    spent: float
    saved: float


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a server's life. Rates are per second; None is what it does not tell.

    Attributes:
        server: "hotbatch", "vllm" or "sglang".
        seconds: its length.
        causes: share of the time by cause; empty where the server does not account for it.
        decode_utilisation: of the steps that decode; None if none did or nobody can tell.
        running, waiting, kv_usage: means.
        decode_rows: mean rows of steps that decode; the running requests where it is not told.
        step_tokens: mean of a step, prompts' and others.
        draft_rate: guesses per second; `rejected_share` of them were refused.
        cache_hit_share: of the prompt tokens.
        prefill_share: of the time of requests in the model, that before their first token.
        ttft, token_gap: mean seconds.
        knee: rows below which one more is free.
        curve, ideal_curve: seconds of a step by its rows.
        guesses: by distance, those that guessed at all.
    """

    server: str
    seconds: float
    causes: Mapping[str, float]
    decode_utilisation: float | None
    running: float
    waiting: float
    kv_usage: float | None
    decode_rows: float
    generated_rate: float
    prompt_rate: float
    step_rate: float | None
    step_tokens: float | None
    preemption_rate: float
    recomputed_rate: float
    draft_rate: float
    rejected_share: float | None
    cache_hit_share: float | None
    prefill_share: float | None
    ttft: float | None
    token_gap: float | None
    knee: float | None
    host_seconds: float | None
    curve: Mapping[int, float]
    ideal_curve: Mapping[int, float]
    guesses: Mapping[str, Guesses] = field(default_factory=dict)


def make_window(
    scrapes: Sequence[Scrape],
    *,
    bandwidth: float | None = None,
    weight_bytes: float | None = None,
) -> Window:
    """Args: `scrapes` in order, two at least. With the machine's measured `bandwidth` (bytes a
    second) and the model's `weight_bytes`, the decode utilisation of a server that does not
    account for its time is estimated: each of its steps reads all weights once. Not where most
    of a step are prompts: it is bound by compute then, whose ceiling nobody told.

    Raises:
        InvalidRequestError: too few scrapes, or the server was restarted between them.
    """
    if len(scrapes) < 2 or scrapes[-1].at <= scrapes[0].at:
        raise InvalidRequestError("It takes two scrapes, some time apart, to see anything.")
    first, last = scrapes[0], scrapes[-1]
    seconds = last.at - first.at
    change = {name: value - first.counters.get(name, 0.0) for name, value in last.counters.items()}
    if any(difference < 0.0 for difference in change.values()):
        raise InvalidRequestError("The server was restarted while it was watched; try again.")
    by_label = {name: _changes(first, last, name) for name in last.by_label}
    tokens = by_label.get("tokens", {})
    accounted = sum(by_label.get("causes", {}).values())
    running = _mean(scrapes, "running")
    drafts, rejected = _speculation(change, tokens)
    gap = _ratio(change.get("gap_seconds"), change.get("gap_count"))
    utilisation = _utilisation(by_label)
    step_tokens = _ratio(change.get("step_tokens"), change.get("steps"))
    reads = (step_tokens or 0.0) < COMPUTE_BOUND
    if utilisation is None and gap and bandwidth and weight_bytes and reads:
        utilisation = min(1.0, weight_bytes / gap / bandwidth)
    return Window(
        server=last.server,
        seconds=seconds,
        causes={cause: spent / accounted for cause, spent in by_label.get("causes", {}).items()}
        if accounted > 0.0
        else {},
        decode_utilisation=utilisation,
        running=running,
        waiting=_mean(scrapes, "waiting"),
        kv_usage=_mean(scrapes, "kv_usage") if "kv_usage" in last.gauges else None,
        decode_rows=last.gauges.get("decode_rows") or running,
        generated_rate=change.get("generated", 0.0) / seconds,
        prompt_rate=change.get("prompt", 0.0) / seconds,
        step_rate=change["steps"] / seconds if "steps" in change else None,
        step_tokens=step_tokens,
        preemption_rate=change.get("preemptions", 0.0) / seconds,
        recomputed_rate=tokens.get("recomputed", 0.0) / seconds,
        draft_rate=drafts / seconds,
        rejected_share=_ratio(rejected, drafts),
        # SGLang counts the prompt tokens that it found, and no queries.
        cache_hit_share=_ratio(
            change.get("cache_hits"), change.get("cache_queries", change.get("prompt"))
        ),
        prefill_share=_prefill_share(change),
        ttft=_ratio(change.get("ttft_seconds"), change.get("ttft_count")),
        token_gap=gap,
        knee=last.gauges.get("knee"),
        host_seconds=last.gauges.get("host_seconds"),
        curve=last.curve,
        ideal_curve=last.ideal_curve,
        guesses=_guesses(first, last, seconds),
    )


def _guesses(first: Scrape, last: Scrape, seconds: float) -> dict[str, Guesses]:
    found = {}
    for distance, figures in last.guesses.items():
        before = first.guesses.get(distance, {})
        rate = {
            name: max(0.0, value - before.get(name, 0.0)) / seconds
            for name, value in figures.items()
        }
        accepted = rate.get("accepted_tokens", 0.0)
        attempted = accepted + rate.get("wasted_tokens", 0.0)
        if attempted > 0.0:
            spent, saved = rate.get("spent_seconds", 0.0), rate.get("saved_seconds", 0.0)
            found[distance] = Guesses(attempted, accepted, spent, saved)
    return found


def _changes(first: Scrape, last: Scrape, name: str) -> dict[str, float]:
    before = first.by_label.get(name, {})
    return {key: value - before.get(key, 0.0) for key, value in last.by_label[name].items()}


def _mean(scrapes: Sequence[Scrape], name: str) -> float:
    values = [scrape.gauges[name] for scrape in scrapes if name in scrape.gauges]
    return sum(values) / len(values) if values else 0.0


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _utilisation(by_label: Mapping[str, Mapping[str, float]]) -> float | None:
    busy = sum(by_label.get("busy", {}).get(phase, 0.0) for phase in ("decode", "mixed"))
    ideal = sum(by_label.get("ideal", {}).get(phase, 0.0) for phase in ("decode", "mixed"))
    return ideal / busy if busy > 0.0 else None


def _speculation(
    change: Mapping[str, float], tokens: Mapping[str, float]
) -> tuple[float, float | None]:
    if "draft" in tokens:
        return tokens["draft"], tokens.get("rejected", 0.0)
    if "drafts" in change:
        return change["drafts"], change["drafts"] - change.get("accepted", 0.0)
    return 0.0, None


def _prefill_share(change: Mapping[str, float]) -> float | None:
    prefill, decode = change.get("prefill_seconds"), change.get("decode_seconds")
    if prefill is None or decode is None:
        return None
    return _ratio(prefill, prefill + decode)
