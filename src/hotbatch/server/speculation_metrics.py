"""What /metrics says of guesses: how many came true, and the time that they saved and cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from hotbatch.core.stats import SchedulerStats


def families(labels: Mapping[str, str], stats: SchedulerStats) -> Iterator[Metric]:
    """Counters by distance: `token` is the next tokens of a running request."""
    tokens = CounterMetricFamily(
        "draft_tokens",
        "Tokens computed on a guess, by the guess's distance and what came of it.",
        labels=[*labels, "distance", "result"],
    )
    seconds = CounterMetricFamily(
        "draft_seconds",
        "Predicted seconds: spent on guesses, the part of it wasted, and saved by guesses.",
        labels=[*labels, "distance", "kind"],
    )
    for distance, account in stats.guesses.items():
        own = [*labels.values(), distance]
        tokens.add_metric([*own, "accepted"], account.accepted)
        tokens.add_metric([*own, "wasted"], account.wasted)
        seconds.add_metric([*own, "spent"], account.seconds_spent)
        seconds.add_metric([*own, "wasted"], account.seconds_wasted)
        seconds.add_metric([*own, "saved"], account.seconds_saved)
    yield tokens
    yield seconds
