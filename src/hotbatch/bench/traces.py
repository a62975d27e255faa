"""Recorded traffic: when requests came and how long they were; no trace holds their text.

Two formats are read. Azure's (AzurePublicDataset, LLM inference traces 2023 and 2024) is a CSV
with TIMESTAMP, ContextTokens, GeneratedTokens. Mooncake's (FAST'25) is a line of JSON a request
with timestamp in milliseconds, input_length, output_length and hash_ids: one id for each block
of 512 prompt tokens, where equal ids mean equal prefixes.

A trace is a list of rows with the first at time 0. It can be cut (`piece`), stretched in time
or to a rate, and scaled in length; each returns a new list. `generated` makes one up in the
shape of the Azure traces, for where none is at hand.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

PREFIX_BLOCK = 512  # prompt tokens that one of Mooncake's hash ids stands for


class TraceError(ValueError):
    """The file is not a trace of the format it was read as; the message names the line."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request: seconds since the first one, tokens in, tokens out.

    `prefix` holds one id for each `PREFIX_BLOCK` prompt tokens, empty where unknown.
    """

    time: float
    input_len: int
    output_len: int
    prefix: tuple[int, ...] = ()


def read_azure(path: Path) -> list[TraceRow]:
    """Raises TraceError, or OSError where there is no such file."""
    rows = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        for number, line in enumerate(csv.DictReader(file), start=2):
            try:
                row = TraceRow(
                    _seconds(line["TIMESTAMP"]),
                    int(line["ContextTokens"]),
                    int(line["GeneratedTokens"]),
                )
            except (KeyError, ValueError, TypeError) as error:
                raise TraceError(
                    f"{path}, line {number}: not a row of TIMESTAMP, ContextTokens, "
                    f"GeneratedTokens ({error!r})"
                ) from None
            rows.append(row)
    return _from_zero(rows, path)


def read_mooncake(path: Path) -> list[TraceRow]:
    """Raises TraceError, or OSError where there is no such file."""
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                row = TraceRow(
                    float(fields["timestamp"]) / 1000.0,
                    int(fields["input_length"]),
                    int(fields["output_length"]),
                    tuple(int(id_) for id_ in fields.get("hash_ids", ())),
                )
            except (KeyError, ValueError, TypeError) as error:
                raise TraceError(
                    f"{path}, line {number}: not an object with timestamp, input_length, "
                    f"output_length ({error!r})"
                ) from None
            rows.append(row)
    return _from_zero(rows, path)


def _seconds(stamp: str) -> float:
    """Azure's stamps have seven digits after the point, one more than datetime keeps."""
    whole, _, fraction = stamp.partition(".")
    digits = fraction.removesuffix("+00:00").rstrip("Z")
    moment = datetime.fromisoformat(whole.removesuffix("+00:00") + "+00:00").timestamp()
    return moment + (float(f"0.{digits}") if digits else 0.0)


def _from_zero(rows: list[TraceRow], path: Path) -> list[TraceRow]:
    if not rows:
        raise TraceError(f"{path} holds no requests")
    rows.sort(key=lambda row: row.time)
    start = rows[0].time
    return [
        replace(
            row,
            time=row.time - start,
            input_len=max(1, row.input_len),
            output_len=max(1, row.output_len),
        )
        for row in rows
    ]


# ---- cutting and stretching


def piece(rows: Sequence[TraceRow], count: int, start: int = 0) -> list[TraceRow]:
    """`count` rows that follow each other from index `start` on, the first at time 0."""
    cut = rows[start : start + count]
    if not cut:
        raise ValueError(f"the trace has {len(rows)} requests, none from number {start} on")
    return [replace(row, time=row.time - cut[0].time) for row in cut]


def stretched(rows: Sequence[TraceRow], factor: float) -> list[TraceRow]:
    """All gaps `factor` times as long."""
    return [replace(row, time=row.time * factor) for row in rows]


def at_rate(rows: Sequence[TraceRow], rate: float) -> list[TraceRow]:
    """Stretched so that `rate` requests a second come on average; the pattern stays."""
    span = rows[-1].time
    if not span > 0.0:
        return list(rows)
    return stretched(rows, len(rows) / rate / span)


def with_lengths(
    rows: Sequence[TraceRow],
    *,
    input_scale: float = 1.0,
    output_scale: float = 1.0,
    max_total: int | None = None,
) -> list[TraceRow]:
    """Lengths scaled; what then exceeds `max_total` tokens in all loses prompt first."""
    result = []
    for row in rows:
        output = max(1, round(row.output_len * output_scale))
        prompt = max(1, round(row.input_len * input_scale))
        if max_total is not None:
            output = min(output, max(1, max_total - 1))
            prompt = min(prompt, max_total - output)
        result.append(
            replace(
                row,
                input_len=prompt,
                output_len=output,
                prefix=row.prefix[: math.ceil(prompt / PREFIX_BLOCK)],
            )
        )
    return result


# ---- made up


@dataclass(frozen=True, slots=True)
class _Shape:
    """`median` and `spread` (sigma of the logarithm) of lengths; requests come in bursts of
    `burst` on average (0: always one), `gap` seconds apart inside, with `pause` seconds between
    bursts."""

    input_median: float
    input_spread: float
    output_median: float
    output_spread: float
    burst: float
    gap: float
    pause: float


# Means as in the Azure traces of 2023: code 2,048 in and 28 out, conversation 1,155 and 211.
_SHAPES = {
    "code": _Shape(1350.0, 0.95, 16.0, 0.95, 24.0, 0.06, 8.0),
    "conversation": _Shape(900.0, 0.75, 150.0, 0.85, 0.0, 0.0, 0.18),
}


def generated(
    shape: Literal["code", "conversation"], count: int, *, seed: int = 0
) -> list[TraceRow]:
    """`count` made-up rows in the shape of an Azure trace; the same for the same seed."""
    figures = _SHAPES[shape]
    rng = random.Random(seed)
    rows: list[TraceRow] = []
    now = 0.0
    left = 1
    while len(rows) < count:
        if left == 0:
            left = max(1, round(rng.expovariate(1.0 / figures.burst))) if figures.burst else 1
            now += rng.expovariate(1.0 / figures.pause)
        rows.append(
            TraceRow(
                now,
                min(
                    7500, max(8, round(_lognormal(rng, figures.input_median, figures.input_spread)))
                ),
                min(
                    1000,
                    max(2, round(_lognormal(rng, figures.output_median, figures.output_spread))),
                ),
            )
        )
        now += rng.expovariate(1.0 / figures.gap) if figures.gap else 0.0
        left -= 1
    return [replace(row, time=row.time - rows[0].time) for row in rows]


def _lognormal(rng: random.Random, median: float, spread: float) -> float:
    return rng.lognormvariate(math.log(median), spread)
