"""One scrape of /metrics: the same figures from hotbatch, vLLM and SGLang, as far as they go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from hotbatch.core.errors import InvalidRequestError

_PREFIXES = ("hotbatch", "vllm", "sglang")

# Our name of a figure -> what each server calls it, newest name first. Sums over all series.
_GAUGES = {
    "running": ("num_requests_running", "num_running_reqs"),
    "waiting": ("num_requests_waiting", "num_queue_reqs"),
    "kv_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage"),
    "knee": ("knee_tokens",),
    "decode_rows": ("decode_rows",),
    "host_seconds": ("host_seconds_per_step",),
}
_COUNTERS = {
    "generated": ("generation_tokens_total",),
    "prompt": ("prompt_tokens_total",),
    "steps": ("iterations_total", "iteration_tokens_total_count"),
    "step_tokens": ("iteration_tokens_total_sum",),
    "preemptions": ("num_preemptions_total",),
    "cache_queries": ("prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
    "cache_hits": (
        "prefix_cache_hits_total",
        "gpu_prefix_cache_hits_total",
        "cached_tokens_total",
    ),
    "drafts": ("spec_decode_num_draft_tokens_total",),
    "accepted": ("spec_decode_num_accepted_tokens_total",),
    "requests": ("request_success_total", "num_requests_total"),
    "ttft_seconds": ("time_to_first_token_seconds_sum",),
    "ttft_count": ("time_to_first_token_seconds_count",),
    "gap_seconds": (
        "inter_token_latency_seconds_sum",
        "time_per_output_token_seconds_sum",
    ),
    "gap_count": (
        "inter_token_latency_seconds_count",
        "time_per_output_token_seconds_count",
    ),
    "prefill_seconds": ("request_prefill_time_seconds_sum",),
    "decode_seconds": ("request_decode_time_seconds_sum",),
}
# Counters that come by one label.
_BY_LABEL = {
    "causes": ("time_seconds_total", "cause"),
    "busy": ("phase_busy_seconds_total", "phase"),
    "ideal": ("phase_ideal_seconds_total", "phase"),
    "tokens": ("step_tokens_total", "kind"),
}


# Counters of guesses, by distance: the label that tells what is counted, and its unit.
_GUESSES = {
    "draft_tokens_total": ("result", "tokens"),
    "draft_seconds_total": ("kind", "seconds"),
}


@dataclass(frozen=True, slots=True)
class Scrape:
    """The figures of one moment; what a server does not tell is missing.

    Attributes:
        server: "hotbatch", "vllm" or "sglang".
        at: seconds on the reader's clock.
        gauges, counters: by our names.
        by_label: counters by our name, then by the label's value.
        curve, ideal_curve: seconds of a step by its rows.
        guesses: by distance: `accepted_tokens` and `wasted_tokens`, `spent_seconds`,
            `saved_seconds` and `wasted_seconds`; whatever distances there are.
    """

    server: str
    at: float
    gauges: Mapping[str, float]
    counters: Mapping[str, float]
    by_label: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    curve: Mapping[int, float] = field(default_factory=dict)
    ideal_curve: Mapping[int, float] = field(default_factory=dict)
    guesses: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def read_scrape(text: str, at: float) -> Scrape:
    """Read the text of /metrics.

    Raises:
        InvalidRequestError: it is not Prometheus' format, or of none of the three servers.
    """
    values: dict[str, dict[str, float]] = {prefix: {} for prefix in _PREFIXES}
    labelled: dict[str, dict[str, float]] = defaultdict(dict)
    guesses: dict[str, dict[str, float]] = defaultdict(dict)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                prefix, _, name = sample.name.partition(":")
                if prefix not in values or sample.name.endswith(("_created", "_bucket")):
                    continue
                sums = values[prefix]
                sums[name] = sums.get(name, 0.0) + sample.value
                if name in _GUESSES and "distance" in sample.labels:
                    label, what = _GUESSES[name]
                    figure = f"{sample.labels.get(label)}_{what}"
                    guesses[sample.labels["distance"]][figure] = sample.value
                for label in ("cause", "phase", "kind", "tokens"):
                    if label in sample.labels:
                        labelled[name][sample.labels[label]] = sample.value
    except ValueError as error:
        raise InvalidRequestError(f"This is not the text of /metrics: {error}.") from error
    server = max(_PREFIXES, key=lambda prefix: len(values[prefix]))
    found = values[server]
    if not found:
        raise InvalidRequestError(
            "There are no metrics of hotbatch, vLLM or SGLang there. Is the address right? "
            "SGLang needs --enable-metrics."
        )
    return Scrape(
        server=server,
        at=at,
        gauges=_pick(found, _GAUGES),
        counters=_pick(found, _COUNTERS),
        by_label={
            ours: labelled[name] for ours, (name, _) in _BY_LABEL.items() if name in labelled
        },
        curve=_curve(labelled.get("step_curve_seconds", {})),
        ideal_curve=_curve(labelled.get("step_curve_ideal_seconds", {})),
        guesses=guesses,
    )


def _pick(found: Mapping[str, float], wanted: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    return {
        ours: found[name]
        for ours, names in wanted.items()
        for name in [next((name for name in names if name in found), None)]
        if name is not None
    }


def _curve(series: Mapping[str, float]) -> dict[int, float]:
    return dict(sorted((int(tokens), seconds) for tokens, seconds in series.items()))
