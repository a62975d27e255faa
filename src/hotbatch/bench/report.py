"""From records to figures: vLLM's key names and its banner, so that results compare.

Definitions follow vLLM's `bench serve`: TTFT is from sending to the first chunk with text;
TPOT of a request is (latency - TTFT) / (output tokens - 1); ITL are the gaps between chunks
of all requests pooled; E2EL is from sending to the last chunk. Failed requests count in
`failed`, by kind in `failures`, and (against goodput) nowhere else. A refusal (429, 503) is
such a failure: who was turned away was not served as promised.

Goodput is requests per second that kept every limit: a request's own, or those of the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hotbatch.bench.client import Record
from hotbatch.bench.load import LoadResult

_HEADERS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
}
METRICS = ("ttft", "tpot", "itl", "e2el")
DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
_WIDTH = 50


def summarize(
    load: LoadResult,
    *,
    percentiles: Sequence[float] = (50, 90, 99),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The figures of a run under vLLM's keys; times with `_ms` are milliseconds, else seconds.

    `goodput` maps ttft, tpot or e2el to its limit in milliseconds.
    """
    good = [record for record in load.records if record.is_success]
    failed = [record for record in load.records if not record.is_success]
    total_input = sum(record.prompt_tokens for record in good)
    total_output = sum(record.output_tokens for record in good)
    duration = load.duration
    is_limited = bool(goodput) or any(record.request.limits for record in load.records)
    num_within = sum(is_within(record, goodput) for record in load.records)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(failed),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / duration,
        "request_goodput": num_within / duration if is_limited else None,
        "slo_attainment": num_within / max(1, len(load.records)) if is_limited else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": peak_tokens_per_second(good),
        "max_concurrent_requests": peak_concurrency(good),
        "client_cpu_seconds": load.client_cpu_seconds,
        "client_cpu_share": load.client_cpu_seconds / duration,
        "client_cpu_us_per_token": 1e6 * load.client_cpu_seconds / max(1, total_output),
        "first_error": failed[0].error if failed else None,
        "failures": dict(Counter(record.failure_kind for record in failed)),
        "rejected": sum(record.status in (429, 503) for record in failed),
    }
    samples = {
        "ttft": [record.ttft for record in good],
        "tpot": [record.tpot for record in good if record.tpot is not None],
        "itl": [gap for record in good for gap in record.gaps],
        "e2el": [record.latency for record in good],
        "client_queue_time": [record.started - record.due for record in good],
    }
    for name, seconds in samples.items():
        figures.update(_statistics(name, seconds, percentiles))
    for key, group_of in _GROUPS.items():
        groups = grouped(load.records, group_of)
        if len(groups) > 1 or "" not in groups:
            figures[key] = {
                name: _group_figures(records, duration, percentiles, goodput)
                for name, records in sorted(groups.items())
            }
    figures.update(_details(load, good))
    return figures


_GROUPS: dict[str, Callable[[Record], str]] = {
    "by_class": lambda record: record.request.service_class,
    "by_tenant": lambda record: record.request.tenant,
    "by_turn": lambda record: str(record.request.turn) if record.request.turn else "",
}


def grouped(
    records: Iterable[Record], group_of: Callable[[Record], str]
) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(group_of(record), []).append(record)
    return groups


def _group_figures(
    records: Sequence[Record],
    duration: float,
    percentiles: Sequence[float],
    goodput: Mapping[str, float] | None,
) -> dict[str, Any]:
    good = [record for record in records if record.is_success]
    num_within = sum(is_within(record, goodput) for record in records)
    figures: dict[str, Any] = {
        "completed": len(good),
        "failed": len(records) - len(good),
        "failures": dict(Counter(r.failure_kind for r in records if not r.is_success)),
        "output_throughput": sum(record.output_tokens for record in good) / duration,
        "request_goodput": num_within / duration,
        "slo_attainment": num_within / len(records),
    }
    figures.update(_statistics("ttft", [record.ttft for record in good], percentiles))
    tpots = [record.tpot for record in good if record.tpot is not None]
    figures.update(_statistics("tpot", tpots, percentiles))
    return figures


def _statistics(
    name: str, seconds: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float]:
    values = 1000.0 * np.asarray(seconds if len(seconds) else [0.0])
    figures = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    for percentile in percentiles:
        figures[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values, percentile))
    return figures


def _details(load: LoadResult, good: list[Record]) -> dict[str, Any]:
    """Per request, in the order of the workload; only saved on demand."""
    succeeded = {id(record) for record in good}
    return {
        "input_lens": [
            record.prompt_tokens or record.request.prompt_len for record in load.records
        ],
        "output_lens": [
            record.output_tokens if id(record) in succeeded else 0 for record in load.records
        ],
        "start_times": [record.started - load.started for record in load.records],
        "ttfts": [record.ttft if id(record) in succeeded else 0.0 for record in load.records],
        "itls": [record.gaps for record in load.records],
        "generated_texts": [record.text for record in load.records],
        "errors": [record.error or "" for record in load.records],
    }


def is_within(record: Record, limits: Mapping[str, float] | None = None) -> bool:
    """Whether a request succeeded and kept its limits (milliseconds), or else those given."""
    if not record.is_success:
        return False
    own = record.request.limits
    if own is None:
        own = limits or {}
    measured = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(1000.0 * measured[name] <= limit for name, limit in own.items())


def peak_tokens_per_second(records: list[Record]) -> float:
    """The most tokens that arrived in one second of the run (seconds counted from its start).

    A request's tokens are spread evenly over its chunks.
    """
    if not records:
        return 0.0
    start = min(record.started for record in records)
    buckets: dict[int, float] = {}
    for record in records:
        share = record.output_tokens / len(record.chunk_times)
        for moment in record.chunk_times:
            second = math.floor(moment - start)
            buckets[second] = buckets.get(second, 0.0) + share
    return max(buckets.values())


def peak_concurrency(records: list[Record]) -> int:
    """The most requests under way at one moment."""
    changes = [(record.started, 1) for record in records]
    changes += [(record.ended, -1) for record in records]
    peak = current = 0
    for _, change in sorted(changes):  # at one moment, ends come before starts
        current += change
        peak = max(peak, current)
    return peak


def banner(
    figures: Mapping[str, Any],
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (50, 90, 99),
    max_concurrency: int | None = None,
    request_rate: float = math.inf,
) -> str:
    """vLLM's `Serving Benchmark Result`, with the client's own cost added below."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]

    def row(label: str, value: float | int) -> None:
        lines.append(
            f"{label:<40} {value:<10.2f}"
            if isinstance(value, float)
            else f"{label:<40} {value:<10}"
        )

    row("Successful requests:", figures["completed"])
    row("Failed requests:", figures["failed"])
    if max_concurrency is not None:
        row("Maximum request concurrency:", max_concurrency)
    if math.isfinite(request_rate):
        row("Request rate configured (RPS):", float(request_rate))
    row("Benchmark duration (s):", figures["duration"])
    row("Total input tokens:", figures["total_input_tokens"])
    row("Total generated tokens:", figures["total_output_tokens"])
    row("Request throughput (req/s):", figures["request_throughput"])
    if figures["request_goodput"] is not None:
        row("Request goodput (req/s):", figures["request_goodput"])
        row("Served as promised (%):", 100.0 * figures["slo_attainment"])
    row("Output token throughput (tok/s):", figures["output_throughput"])
    row("Peak output token throughput (tok/s):", figures["max_output_tokens_per_s"])
    row("Peak concurrent requests:", float(figures["max_concurrent_requests"]))
    row("Total token throughput (tok/s):", figures["total_token_throughput"])
    for name in metrics:
        short, header = _HEADERS[name]
        lines.append(f"{header:-^{_WIDTH}}")
        row(f"Mean {short} (ms):", figures[f"mean_{name}_ms"])
        row(f"Median {short} (ms):", figures[f"median_{name}_ms"])
        for percentile in percentiles:
            row(f"P{percentile:g} {short} (ms):", figures[f"p{percentile:g}_{name}_ms"])
    for key, title in (("by_class", "Classes"), ("by_tenant", "Tenants"), ("by_turn", "Turns")):
        if key in figures:
            lines.append(f"{title:-^{_WIDTH}}")
            lines += _group_lines(figures[key])
    lines.append(f"{'Load Generator':-^{_WIDTH}}")
    row("Client CPU (s):", figures["client_cpu_seconds"])
    row("Client CPU (% of one core):", 100.0 * figures["client_cpu_share"])
    row("Client CPU per token (us):", figures["client_cpu_us_per_token"])
    lines.append("=" * _WIDTH)
    if figures["failed"]:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in figures["failures"].items())
        lines.append(f"{figures['failed']} requests failed ({kinds})")
        lines.append(f"the first: {figures['first_error']}")
    return "\n".join(lines)


def _group_lines(groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [f"{'':16}{'done':>6}{'failed':>7}{'met %':>7}{'TTFT p50':>10}{'mean':>9}  ms"]
    for name, figures in groups.items():
        lines.append(
            f"{name or '0':16.16}{figures['completed']:>6}{figures['failed']:>7}"
            f"{100.0 * figures['slo_attainment']:>7.1f}{figures['median_ttft_ms']:>10.1f}"
            f"{figures['mean_ttft_ms']:>9.1f}"
        )
    return lines
