"""From records to figures: vLLM's key names and its banner, so that results compare.

Definitions follow vLLM's `bench serve`: TTFT is from sending to the first chunk with text;
TPOT of a request is (latency - TTFT) / (output tokens - 1); ITL are the gaps between chunks
of all requests pooled; E2EL is from sending to the last chunk. Failed requests count in
`failed` and (against goodput) nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(failed),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / duration,
        "request_goodput": _count_within(good, goodput) / duration if goodput else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": peak_tokens_per_second(good),
        "max_concurrent_requests": peak_concurrency(good),
        "client_cpu_seconds": load.client_cpu_seconds,
        "client_cpu_share": load.client_cpu_seconds / duration,
        "client_cpu_us_per_token": 1e6 * load.client_cpu_seconds / max(1, total_output),
        "first_error": failed[0].error if failed else None,
    }
    samples = {
        "ttft": [record.ttft for record in good],
        "tpot": [_tpot(record) for record in good if record.output_tokens > 1],
        "itl": [gap for record in good for gap in record.gaps],
        "e2el": [record.latency for record in good],
        "client_queue_time": [record.started - record.due for record in good],
    }
    for name, seconds in samples.items():
        figures.update(_statistics(name, seconds, percentiles))
    figures.update(_details(load, good))
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


def _tpot(record: Record) -> float:
    return (record.latency - record.ttft) / (record.output_tokens - 1)


def _count_within(records: list[Record], limits: Mapping[str, float]) -> int:
    measures = {
        "ttft": lambda record: record.ttft,
        "tpot": lambda record: _tpot(record) if record.output_tokens > 1 else 0.0,
        "e2el": lambda record: record.latency,
    }
    return sum(
        all(1000.0 * measures[name](record) <= limit for name, limit in limits.items())
        for record in records
    )


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
    lines.append(f"{'Load Generator':-^{_WIDTH}}")
    row("Client CPU (% of one core):", 100.0 * figures["client_cpu_share"])
    row("Client CPU per token (us):", figures["client_cpu_us_per_token"])
    lines.append("=" * _WIDTH)
    if figures["failed"]:
        lines.append(f"{figures['failed']} requests failed; the first: {figures['first_error']}")
    return "\n".join(lines)
