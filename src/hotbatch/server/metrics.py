"""What Prometheus reads at /metrics: vLLM's names, with `hotbatch:` in front.

The engine's observers call in here once a step, on the engine's thread, so recording must
cost next to nothing: histograms are plain lists of counts (one bisection an observation) and
counters plain integers. They become Prometheus values when somebody scrapes, which happens
rarely. Gauges are read from the scheduler's snapshot at that moment.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from hotbatch.core.plan import FinishReason
from hotbatch.engine.step_stats import RequestTimings, StepStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# fmt: off
_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
_PER_TOKEN = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
LONG_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
_STEP_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0,
)
# fmt: on
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STEP_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Histogram:
    """Counts by bucket, the upper bound included, as Prometheus has it."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = help
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, labels: Mapping[str, str]) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self.name, self.help, labels=list(labels))
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


class ServerMetrics(Collector):
    """The figures of one server, in a registry of its own.

    Args:
        model_name: the label of every series.
        gauges: the scheduler's SchedulerStats at the moment of the scrape.
        info: labels of the one-time `hotbatch:build_info` series.
        more: further families, made from the common labels at the moment of the scrape.
    """

    def __init__(
        self,
        model_name: str,
        gauges: Callable[[], object],
        info: Mapping[str, str],
        more: Callable[[Mapping[str, str]], Iterable[Metric]] = lambda labels: (),
    ) -> None:
        self._labels = {"model_name": model_name}
        self._gauges = gauges
        self._info = dict(info)
        self._more = more
        # Held for a step's record and for a scrape: a scrape sees whole steps.
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        histogram = Histogram
        self._ttft = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _TTFT
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds", "Between two tokens of a request.", _PER_TOKEN
        )
        self._per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token after the first, one value a request.",
            _PER_TOKEN,
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", LONG_SECONDS
        )
        self._queue = histogram(
            "request_queue_time_seconds", "From arrival to the first step.", LONG_SECONDS
        )
        self._prefill = histogram(
            "request_prefill_time_seconds",
            "From the first step to the first token.",
            LONG_SECONDS,
        )
        self._decode = histogram(
            "request_decode_time_seconds", "From the first token to the last.", LONG_SECONDS
        )
        self._inference = histogram(
            "request_inference_time_seconds",
            "From the first step to the last token.",
            LONG_SECONDS,
        )
        self._prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self._generated_tokens = histogram(
            "request_generation_tokens", "Generated tokens of a request.", _TOKENS
        )
        self._step_tokens = histogram(
            "iteration_tokens_total", "Tokens computed in a step.", _STEP_TOKENS
        )
        self._step_requests = histogram(
            "iteration_requests", "Requests that took part in a step.", _STEP_REQUESTS
        )
        self._step_seconds = histogram(
            "iteration_seconds", "Time of the model in a step.", _STEP_SECONDS
        )
        self._histograms = [value for value in vars(self).values() if isinstance(value, Histogram)]
        self._registry = CollectorRegistry()
        self._registry.register(self)

    # --- recording ------------------------------------------------------------------------

    def on_step(self, step: StepStats) -> None:
        """An engine step observer."""
        with self._lock:
            counts = self._counts
            counts["steps"] += 1
            counts["failed_steps"] += step.failed
            counts["computed_prompt"] += step.num_prompt_tokens
            self._step_tokens.observe(step.num_tokens)
            self._step_requests.observe(step.num_requests)
            self._step_seconds.observe(step.execute_seconds)
            for seconds in step.time_to_first_token:
                self._ttft.observe(seconds)
            for seconds in step.inter_token:
                self._inter_token.observe(seconds)

    def on_request(self, request: RequestTimings) -> None:
        """An engine request observer."""
        with self._lock:
            self._e2e.observe(request.finished - request.arrival)
            self._prompt_tokens.observe(request.num_prompt)
            self._generated_tokens.observe(request.num_output)
            if request.first_scheduled is None:
                return
            self._queue.observe(request.first_scheduled - request.arrival)
            if request.first_token is None or request.last_token is None:
                return
            self._counts["cached"] += request.num_cached
            decode = request.last_token - request.first_token
            self._prefill.observe(request.first_token - request.first_scheduled)
            self._decode.observe(decode)
            self._inference.observe(request.last_token - request.first_scheduled)
            if request.num_output > 1:
                self._per_output_token.observe(decode / (request.num_output - 1))

    def on_finished(self, reason: str) -> None:
        """A choice ended, for this reason as its client sees it."""
        with self._lock:
            self._finished[reason] += 1

    def on_refused(self, code: str) -> None:
        """A request was answered with an error of this code before it reached the engine."""
        with self._lock:
            self._refused[code] += 1

    # --- reading --------------------------------------------------------------------------

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            families = [*self._families(), *self._more(self._labels)]
        for family in families:
            family.name = f"hotbatch:{family.name}"
            family.samples = [
                sample._replace(name=f"hotbatch:{sample.name}") for sample in family.samples
            ]
            yield family

    def _families(self) -> Iterator[Metric]:
        info = InfoMetricFamily("build", "The server and its model.")
        info.add_metric([], self._info)
        yield info
        yield from self._gauge_families()
        yield from self._counter_families()
        for histogram in self._histograms:
            yield histogram.family(self._labels)

    def _gauge_families(self) -> Iterator[Metric]:
        stats = self._gauges()
        for name, help, attribute in (
            ("num_requests_running", "Requests that take part in steps.", "num_running"),
            ("num_requests_waiting", "Requests that wait for a place.", "num_waiting"),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.", "block_usage"),
            ("kv_cache_blocks", "KV blocks in all.", "blocks_total"),
        ):
            family = GaugeMetricFamily(name, help, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), float(getattr(stats, attribute)))
            yield family
        for name, help, attribute in (
            ("prefix_cache_queries", "Prompt tokens looked up.", "prefix_query_tokens"),
            ("prefix_cache_hits", "Prompt tokens found.", "prefix_hit_tokens"),
            ("num_preemptions", "Times that a request lost its KV blocks.", "preemptions"),
            ("prompt_tokens", "Prompt tokens of requests that got a token.", "prompt_tokens"),
            ("generation_tokens", "Tokens generated.", "generated_tokens"),
        ):
            yield self._counter(name, help, getattr(stats, attribute))

    def _counter_families(self) -> Iterator[Metric]:
        for name, help, key in (
            ("prompt_tokens_cached", "Prompt tokens that the prefix cache had.", "cached"),
            ("prompt_tokens_computed", "Prompt tokens computed.", "computed_prompt"),
            ("iterations", "Steps of the engine.", "steps"),
            ("iterations_failed", "Steps that raised.", "failed_steps"),
        ):
            yield self._counter(name, help, self._counts[key])
        reasons = [reason.value for reason in FinishReason]
        yield self._counter_by(
            "request_success",
            "Choices that ended, by reason.",
            "finished_reason",
            {**dict.fromkeys(reasons, 0), **self._finished},
        )
        yield self._counter_by(
            "request_refused", "Requests answered with an error.", "code", self._refused
        )

    def _counter(self, name: str, help: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter_by(
        self, name: str, help: str, label: str, values: Mapping[str, int]
    ) -> CounterMetricFamily:
        return counter_by(self._labels, name, help, label, values)


def counter_by(
    labels: Mapping[str, str], name: str, help: str, label: str, values: Mapping[str, int]
) -> CounterMetricFamily:
    """A counter with one more label, whose values are the keys."""
    family = CounterMetricFamily(name, help, labels=[*labels, label])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family
