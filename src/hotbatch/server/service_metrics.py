"""What /metrics says of service: who waits and for how long, who was refused, what was kept.

Recording is as cheap as in metrics.py, and its lock is its own. Gauges are read at the scrape.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hotbatch.core.admission import QUEUE_REQUESTS, QUEUE_TOKENS, QUEUE_TTL, QUEUE_WAIT, Load
from hotbatch.core.service_class import ServiceClass
from hotbatch.engine.step_stats import RequestTimings, StepStats
from hotbatch.server.metrics import LONG_SECONDS, Histogram, counter_by

_REASONS = (QUEUE_REQUESTS, QUEUE_TOKENS, QUEUE_WAIT, QUEUE_TTL)
_RECENT_STEPS = 256


class ServiceMetrics:
    """Figures by service class.

    Args:
        load: the engine's Load at the moment of the scrape.
        gauges: the scheduler's SchedulerStats at that moment.
        refused: refusals since the start, by reason.
    """

    def __init__(
        self,
        load: Callable[[], Load],
        gauges: Callable[[], object],
        refused: Callable[[], Mapping[str, int]],
    ) -> None:
        self._load = load
        self._gauges = gauges
        self._refused = refused
        self._lock = threading.Lock()
        self._waits = {
            service_class: Histogram(
                "queue_wait_seconds", "From arrival to the first step, by class.", LONG_SECONDS
            )
            for service_class in ServiceClass
        }
        self._targets: Counter[tuple[str, str, str]] = Counter()
        self._errors: deque[float] = deque(maxlen=_RECENT_STEPS)

    def on_step(self, step: StepStats) -> None:
        """An engine step observer."""
        if step.predicted_seconds is None or step.failed or step.execute_seconds <= 0.0:
            return
        error = abs(step.predicted_seconds - step.execute_seconds) / step.execute_seconds
        with self._lock:
            self._errors.append(error)

    def on_request(self, request: RequestTimings) -> None:
        """An engine request observer."""
        name = request.service_class.label
        targets = request.targets
        with self._lock:
            if request.first_scheduled is not None:
                wait = request.first_scheduled - request.arrival
                self._waits[request.service_class].observe(wait)
            if request.first_token is not None:
                self._note(name, "ttft", targets.ttft, request.first_token - request.arrival)
            self._note(name, "tpot", targets.tpot, request.time_per_output_token)

    def _note(self, name: str, kind: str, target: float | None, seconds: float | None) -> None:
        if target is not None and seconds is not None:
            self._targets[name, kind, "met" if seconds <= target else "missed"] += 1

    def families(self, labels: Mapping[str, str]) -> Iterable[Metric]:
        """All of it as Prometheus' values."""
        with self._lock:
            yield from self._recorded(labels)
        yield from self._read(labels)

    def _recorded(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        family, *others = [
            histogram.family({**labels, "class": service_class.label})
            for service_class, histogram in self._waits.items()
        ]
        for other in others:
            family.samples += other.samples
        yield family
        met = CounterMetricFamily(
            "targets",
            "Latency targets of ended requests: time to the first token and per output token.",
            labels=[*labels, "class", "target", "outcome"],
        )
        for key, count in self._targets.items():
            met.add_metric([*labels.values(), *key], count)
        yield met
        error = GaugeMetricFamily(
            "step_prediction_error_ratio",
            "Relative error of the predicted times of recent steps.",
            labels=[*labels, "quantile"],
        )
        errors = sorted(self._errors)
        if errors:
            for quantile in (0.5, 0.95):
                value = errors[int(quantile * len(errors))]
                error.add_metric([*labels.values(), str(quantile)], value)
        yield error

    def _read(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(
            "requests_waiting",
            "Requests that no step has computed yet, by class.",
            labels=[*labels, "class"],
        )
        for service_class, count in zip(ServiceClass, self._load().waiting, strict=True):
            waiting.add_metric([*labels.values(), service_class.label], count)
        yield waiting
        stats = self._gauges()
        paused = GaugeMetricFamily(
            "requests_paused",
            "Requests that gave up their seat and keep their KV.",
            labels=list(labels),
        )
        paused.add_metric(list(labels.values()), getattr(stats, "num_paused", 0))
        yield paused
        preemptions = {
            "pause": getattr(stats, "pauses", 0),
            "evict": getattr(stats, "preemptions", 0),
        }
        yield counter_by(
            labels, "preemptions", "Times that a request had to step aside.", "kind", preemptions
        )
        yield counter_by(
            labels,
            "requests_refused",
            "Requests refused or ended because of overload.",
            "reason",
            {**dict.fromkeys(_REASONS, 0), **self._refused()},
        )
