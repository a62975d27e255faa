"""What is asked of the machines: a piece of a trace, with classes and tenants assigned.

The traces carry neither, so these rules assign them, independent of length and of each other,
by a generator seeded with the run's seed:

    mixed      50 % interactive, 30 % standard, 20 % batch
    one        all standard

and four tenants, of whom the first sends 55 % of the requests and the others 15 % each. Seeds
choose where in the trace the piece begins. The gaps of the trace are stretched so that on
average a stated share of the saturation arrives; its bursts stay bursts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from policy_machine import BATCH, INTERACTIVE, STANDARD, Machine

from hotbatch.bench.traces import (
    PREFIX_BLOCK,
    TraceRow,
    generated,
    piece,
    read_azure,
    read_mooncake,
    with_lengths,
)
from hotbatch.core import Request, SamplingParams
from hotbatch.core.service_class import LatencyTargets, ServiceClass

Mix = Literal["mixed", "one"]
MIXES: dict[str, dict[ServiceClass, float]] = {
    "mixed": {INTERACTIVE: 0.5, STANDARD: 0.3, BATCH: 0.2},
    "one": {STANDARD: 1.0},
}
TENANTS = {"large": 0.55, "small-1": 0.15, "small-2": 0.15, "small-3": 0.15}
_TRACE_FILES = {
    "code": "azure_llm_2023_code.csv",
    "conversation": "azure_llm_2023_conv.csv",
    "mooncake": "mooncake_conversation.jsonl",
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, before it has a time: what it is and to whom it belongs."""

    row: TraceRow
    service_class: ServiceClass
    tenant: str
    ttft: float | None
    tpot: float | None


def load_trace(name: str, folder: Path | None) -> list[TraceRow]:
    """The named trace from the folder, or one made up in its shape where there is no folder.

    Raises:
        FileNotFoundError: the folder does not hold it.
    """
    if folder is None:
        return generated("code" if name == "code" else "conversation", 20_000)
    path = folder / _TRACE_FILES[name]
    return read_mooncake(path) if path.suffix == ".jsonl" else read_azure(path)


def asks(
    trace: Sequence[TraceRow], machine: Machine, *, count: int, mix: str, seed: int
) -> list[Ask]:
    """A piece of the trace with a class and a tenant for each request."""
    rng = random.Random(seed)
    rows = piece(trace, count, rng.randrange(max(1, len(trace) - count)))
    rows = with_lengths(rows, max_total=machine.max_model_len)
    shares = MIXES[mix]
    result = []
    for row in rows:
        (service_class,) = rng.choices(list(shares), list(shares.values()))
        (tenant,) = rng.choices(list(TENANTS), list(TENANTS.values()))
        targets = machine.targets(service_class, row.input_len)
        result.append(Ask(row, service_class, tenant, targets.ttft, targets.tpot))
    return result


def arrival_times(asked: Sequence[Ask], rate: float) -> list[float]:
    """When each comes, for `rate` requests a second on average; 0 for all if it is infinite."""
    span = asked[-1].row.time
    if rate == float("inf") or span <= 0.0:
        return [0.0] * len(asked)
    stretch = len(asked) / rate / span
    return [ask.row.time * stretch for ask in asked]


def requests(asked: Sequence[Ask], arrivals: Sequence[float]) -> list[Request]:
    """Requests for a scheduler; prompts share what the trace says they share, else nothing."""
    return [
        Request(
            f"r{index}",
            _prompt(ask.row, index),
            SamplingParams(max_tokens=ask.row.output_len, ignore_eos=True, temperature=0.0),
            seed=index,
            arrival=arrival,
            tenant=ask.tenant,
            service_class=ask.service_class,
            targets=LatencyTargets(ask.ttft, ask.tpot),
        )
        for index, (ask, arrival) in enumerate(zip(asked, arrivals, strict=True))
    ]


def _prompt(row: TraceRow, index: int) -> Sequence[int]:
    if not row.prefix:
        return range(index * 100_000, index * 100_000 + row.input_len)
    tokens: list[int] = []
    for id_ in row.prefix:
        tokens.extend(range(id_ * PREFIX_BLOCK, (id_ + 1) * PREFIX_BLOCK))
    return tokens[: row.input_len]
