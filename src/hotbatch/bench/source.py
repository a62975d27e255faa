"""From the options of `hotbatch bench serve` to what is sent, for one rate or for several."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from pathlib import Path

import typer

from hotbatch.bench.conversations import random_conversations
from hotbatch.bench.load import Phase
from hotbatch.bench.session import Work
from hotbatch.bench.traces import (
    TraceError,
    TraceRow,
    at_rate,
    piece,
    read_azure,
    read_mooncake,
    stretched,
    with_lengths,
)
from hotbatch.bench.workload import (
    BenchRequest,
    Group,
    RandomLengths,
    arrival_times,
    assigned,
    random_requests,
    trace_requests,
)


class Dataset(enum.Enum):
    RANDOM = "random"
    AZURE = "azure"
    MOONCAKE = "mooncake"
    CONVERSATION = "conversation"


@dataclass(frozen=True, slots=True)
class Source:
    """All that decides what is sent, but for the rate."""

    dataset: Dataset
    trace: list[TraceRow]
    num_prompts: int
    input_len: RandomLengths
    output_len: RandomLengths
    prefix_len: int
    as_text: bool
    token_range: tuple[int, int]
    burstiness: float
    max_concurrency: int | None
    phases: list[Phase]
    turns: int
    think: float
    classes: list[Group]
    tenants: list[Group]
    seed: int

    def trial(self) -> BenchRequest:
        """A request to try the server out with; no other must find it in the prefix cache."""
        return self._random(1)[0]

    def work(self, rate: float) -> Work:
        """Raises ValueError where the rate makes no sense."""
        if self.dataset is Dataset.CONVERSATION:
            arrivals = self._arrivals(self.num_prompts, rate)
            firsts = assigned(
                [BenchRequest("", 0, 0)] * self.num_prompts,
                classes=self.classes, tenants=self.tenants, seed=self.seed,
            )  # fmt: skip
            return Work(
                conversations=random_conversations(
                    arrivals, firsts, num_turns=RandomLengths(self.turns, 0.5),
                    question_len=self.input_len, answer_len=self.output_len,
                    think=self.think, seed=self.seed,
                )
            )  # fmt: skip
        if self.dataset is Dataset.RANDOM:
            # The first one is the trial's.
            requests = self._random(1 + self.num_prompts)[1:]
            arrivals = self._arrivals(len(requests), rate)
        else:
            if not rate > 0.0:
                raise ValueError(f"request_rate must be positive, got {rate}")
            rows = at_rate(self.trace, rate) if math.isfinite(rate) else self.trace
            requests = trace_requests(
                rows, seed=self.seed, as_text=self.as_text, token_range=self.token_range
            )
            arrivals = [row.time for row in rows]
        requests = assigned(requests, classes=self.classes, tenants=self.tenants, seed=self.seed)
        return Work(requests, arrivals, self.max_concurrency, self.phases)

    def _arrivals(self, count: int, rate: float) -> list[float]:
        return arrival_times(count, request_rate=rate, burstiness=self.burstiness, seed=self.seed)

    def _random(self, count: int) -> list[BenchRequest]:
        return random_requests(
            count,
            input_len=self.input_len,
            output_len=self.output_len,
            prefix_len=self.prefix_len,
            as_text=self.as_text or self.dataset is Dataset.CONVERSATION,
            token_range=self.token_range,
            seed=self.seed,
        )


def read_rows(
    dataset: Dataset,
    path: Path | None,
    start: int,
    count: int,
    time_scale: float,
    input_scale: float,
    output_scale: float,
    max_total: int | None,
) -> list[TraceRow]:
    if dataset not in (Dataset.AZURE, Dataset.MOONCAKE):
        return []
    if path is None:
        raise typer.BadParameter(f"--dataset-name {dataset.value} needs --dataset-path")
    for option, scale in (
        ("--time-scale", time_scale),
        ("--input-scale", input_scale),
        ("--output-scale", output_scale),
    ):
        if not 0.0 < scale < math.inf:
            raise typer.BadParameter(f"{option} must be above 0, got {scale}")
    try:
        rows = read_azure(path) if dataset is Dataset.AZURE else read_mooncake(path)
        rows = piece(rows, count, start)
    except (OSError, UnicodeDecodeError, TraceError) as error:
        raise typer.BadParameter(f"--dataset-path: {error}") from None
    except ValueError as error:
        raise typer.BadParameter(f"--trace-start: {error}") from None
    rows = stretched(rows, time_scale)
    return with_lengths(
        rows, input_scale=input_scale, output_scale=output_scale, max_total=max_total
    )


def gamma_shape(cv: float) -> float:
    """The shape of a Gamma distribution with this coefficient of variation."""
    if not 0.0 < cv < math.inf:
        raise typer.BadParameter(f"--arrival-cv must be above 0, got {cv}")
    return 1.0 / (cv * cv)
