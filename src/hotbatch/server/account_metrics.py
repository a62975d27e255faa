"""What /metrics says of the machine: its ceiling, how much of it is in use, what eats the rest.

Nothing is recorded here: the engine keeps the accounts, and a scrape reads their sums. The
ratios are of recent steps; the counters of seconds let whoever reads them twice have the exact
figures of any stretch of time, as `hotbatch doctor` does:

    decode utilisation = (ideal of decode and mixed) / (busy of decode and mixed)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hotbatch.engine.accounting import Phase, Totals
from hotbatch.engine.ceiling import CeilingSnapshot

_CURVE_TOKENS = frozenset(2**power for power in range(10))

ReadDevice = Callable[[], Any]
"""Returns the driver's figures of the GPU (executor/nvml.py), or None."""


class AccountMetrics:
    """Families made from the engine's accounts; none where it keeps none.

    Args:
        totals, ceiling: of the engine.
        device: the driver's figures, where there is a GPU.
    """

    def __init__(
        self,
        totals: Callable[[], Totals | None],
        ceiling: Callable[[], CeilingSnapshot | None],
        device: ReadDevice = lambda: None,
    ) -> None:
        self._totals = totals
        self._ceiling = ceiling
        self._device = device

    def families(self, labels: Mapping[str, str]) -> Iterable[Metric]:
        """All of it as Prometheus' values."""
        totals, seen = self._totals(), self._ceiling()
        if totals is None or seen is None:
            return
        yield from _usage(totals, labels)
        yield from _counters(totals, labels)
        yield from _machine(seen, labels)
        figures = self._device()
        if figures is not None:
            yield from _driver(figures, labels)


def _usage(totals: Totals, labels: Mapping[str, str]) -> Iterator[Metric]:
    utilisation = _gauge(
        "decode_utilisation_ratio",
        "Ideal time over busy time of recent steps that decode: the larger of mbu and mfu, "
        "against the ceiling measured on this machine.",
        labels,
    )
    if totals.decode_utilisation is not None:
        utilisation.add_metric(list(labels.values()), totals.decode_utilisation)
    yield utilisation
    mbu = _gauge("mbu_ratio", "Share of the measured memory bandwidth in use.", labels, "phase")
    mfu = _gauge("mfu_ratio", "Share of the measured compute in use.", labels, "phase")
    for phase, recent in totals.recent.items():
        mbu.add_metric([*labels.values(), phase.value], recent.mbu)
        mfu.add_metric([*labels.values(), phase.value], recent.mfu)
    yield mbu
    yield mfu


def _counters(totals: Totals, labels: Mapping[str, str]) -> Iterator[Metric]:
    causes = {cause.value: seconds for cause, seconds in totals.by_cause.items()}
    yield _counter(
        "time_seconds",
        "Wall time of the engine by what it was spent on; the causes add up to it.",
        labels,
        "cause",
        causes,
    )
    for name, help, attribute in (
        ("phase_busy_seconds", "Time of steps, the host's included, by kind of step.", "busy"),
        ("phase_ideal_seconds", "What these steps would have taken at the ceiling.", "ideal"),
        ("phase_memory_seconds", "What reading would have taken at the ceiling.", "memory"),
        ("phase_compute_seconds", "What computing would have taken at the ceiling.", "compute"),
        ("phase_steps", "Steps.", "steps"),
    ):
        by_phase = {phase.value: getattr(totals.phases[phase], attribute) for phase in Phase}
        yield _counter(name, help, labels, "phase", by_phase)
    yield _counter(
        "step_tokens",
        "Rows of steps by kind; drafts are decode rows, recomputed ones prompt rows.",
        labels,
        "kind",
        totals.tokens._asdict(),
    )


def _machine(seen: CeilingSnapshot, labels: Mapping[str, str]) -> Iterator[Metric]:
    values = list(labels.values())
    ceiling = seen.ceiling
    for name, help, value in (
        ("ceiling_memory_bytes_per_second", "Measured memory bandwidth.", ceiling.bandwidth),
        ("ceiling_operations_per_second", "Measured compute in linear layers.", ceiling.compute),
        ("knee_tokens", "Decoding rows up to which one more is free, ideally.", seen.knee),
        ("host_seconds_per_step", "Mean time of the host per recent step.", seen.host_seconds),
        ("decode_rows", "Mean rows of recent steps that decode only.", seen.operating_tokens),
    ):
        family = _gauge(name, help, labels)
        family.add_metric(values, value)
        yield family
    learnt = _gauge(
        "step_curve_seconds",
        "Predicted time of a step of so many decodes at their recent mean context.",
        labels,
        "tokens",
    )
    ideal = _gauge("step_curve_ideal_seconds", "The same at the ceiling.", labels, "tokens")
    for point in seen.curve:
        if point.num_tokens in _CURVE_TOKENS:
            learnt.add_metric([*values, str(point.num_tokens)], point.predicted_seconds)
            ideal.add_metric([*values, str(point.num_tokens)], point.ideal_seconds)
    yield learnt
    yield ideal


def _driver(figures: Any, labels: Mapping[str, str]) -> Iterator[Metric]:
    for name, help, value in (
        ("nvml_bandwidth_bytes_per_second", "Data sheet's memory bandwidth.", figures.bandwidth),
        ("nvml_kernel_ratio", "Share of time in which any kernel ran.", figures.kernel_share),
        ("nvml_memory_ratio", "Share of time in which memory was used.", figures.memory_share),
        ("nvml_memory_used_bytes", "Memory in use on the device.", figures.memory_used),
        ("nvml_power_watts", "Power drawn.", figures.watts),
    ):
        family = _gauge(name, help, labels)
        family.add_metric(list(labels.values()), value)
        yield family


def _gauge(name: str, help: str, labels: Mapping[str, str], *more: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help, labels=[*labels, *more])


def _counter(
    name: str, help: str, labels: Mapping[str, str], label: str, values: Mapping[str, float]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help, labels=[*labels, label])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family
