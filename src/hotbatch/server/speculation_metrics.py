"""What /metrics says of guesses: how many came true, and the time that they saved and cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from hotbatch.core.stats import SchedulerStats
from hotbatch.text.answer_memory import AnswerMemory


def families(
    labels: Mapping[str, str], stats: SchedulerStats, answers: AnswerMemory | None = None
) -> Iterator[Metric]:
    """Counters by distance: `token` is the next tokens of a running request, `turn` what the next
    prompt of a conversation begins with.

    Args:
        answers: remembers the ids of what was generated, if anybody does.
    """
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
    yield _returns(labels, stats)
    if answers is not None:
        yield from _splices(labels, answers)


def _returns(labels: Mapping[str, str], stats: SchedulerStats) -> Metric:
    """How well the chance was told that a conversation goes on: sums over those of which it is
    known by now, by tenths of the chance."""
    family = CounterMetricFamily(
        "turn_chance",
        "Conversations by the chance of a next turn that was told, in tenths: their number, the "
        "sum of the chances, and those that went on.",
        labels=[*labels, "tenth", "sum"],
    )
    for row in stats.returns:
        own = [*labels.values(), f"{min(int(row.told * 10), 9)}"]
        family.add_metric([*own, "number"], row.number)
        family.add_metric([*own, "told"], row.told * row.number)
        family.add_metric([*own, "true"], row.true * row.number)
    return family


def _splices(labels: Mapping[str, str], answers: AnswerMemory) -> Iterator[Metric]:
    for name, text, value in (
        ("spliced_prompts", "Chat prompts that got ids remembered.", answers.num_spliced),
        ("spliced_tokens", "Tokens of these ids.", answers.num_spliced_tokens),
    ):
        family = CounterMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        yield family
