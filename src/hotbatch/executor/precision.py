"""Which precision the weights get on a CPU when nobody asks for one.

Of the precisions that keep a model's quality, the one whose products are fastest on this
machine, measured on the model's own weights with as many rows as a well filled step has. What
counts as keeping it: bf16 always; int8 with activation scales for each row, or each group of 64
where that would not do (about 1 % of perplexity, docs/performance.md); int4 only where the file
holds 4-bit blocks, whose grid it keeps: rounding finer weights to 4 bits costs a model of this
size half its worth.

Of two that are about as fast, the one that comes first in `candidates` is taken: a stopwatch
would choose another one at each start, and answers differ by it.

One client alone is bound by memory, not by products, and would take the fewest bytes; the
line at start says so where that is another precision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hotbatch.executor.recorder import FOUR_BIT_FORMATS, raw_tuple
from hotbatch.kernels import _native
from hotbatch.models.weights import LinearWeight, RawTensor

FULL_STEP_ROWS = 32
_MAX_WEIGHTS = 1 << 21  # a larger matrix tells no more and takes longer to pack
_REPEATS = 20
_ABOUT = 1.1  # times as long is about as fast

Measure = Callable[[str], float]
"""Seconds of one product at a precision."""


@dataclass(frozen=True, slots=True)
class PrecisionChoice:
    """`seconds` of one product with FULL_STEP_ROWS rows, by precision that was considered."""

    precision: str
    seconds: Mapping[str, float]

    @property
    def reason(self) -> str:
        """For the line at start."""
        best = self.seconds[self.precision]
        others = [
            f"{name} takes {seconds / best:.2f} times as long"
            for name, seconds in sorted(self.seconds.items(), key=lambda item: item[1])
            if name != self.precision
        ]
        is_fastest = best <= min(self.seconds.values())
        how = "as fastest" if is_fastest else "as about the fastest"
        text = f"chosen {how} for {FULL_STEP_ROWS} rows here: {', '.join(others)}"
        if self.precision != "int4" and "int4" in self.seconds:
            text += "; --precision int4 is faster for one client"
        return text


def candidates(weights: Sequence[LinearWeight]) -> tuple[str, ...]:
    """The precisions that keep the quality of a model with these linear layers; the first is taken
    where several are about as fast."""
    parts = [part for weight in weights for part in weight.parts]
    if all(part.dtype in FOUR_BIT_FORMATS for part in parts):
        return ("int8", "int4", "bf16")
    return ("int8", "bf16")


def choose_precision(
    weights: Sequence[LinearWeight], threads: int, measure: Measure | None = None
) -> PrecisionChoice:
    """Args: `weights` are the linear layers of one block, `measure` replaces the stopwatch."""
    largest = max(weights, key=lambda weight: weight.num_bytes)

    def product(precision: str) -> float:
        return product_seconds(largest.parts[0], precision, threads)

    seconds = {name: (measure or product)(name) for name in candidates(weights)}
    enough = _ABOUT * min(seconds.values())
    return PrecisionChoice(next(name for name in seconds if seconds[name] <= enough), seconds)


def product_seconds(tensor: RawTensor, precision: str, threads: int) -> float:
    """Best seconds of FULL_STEP_ROWS rows through (at most the first rows of) a matrix."""
    outputs, inputs = tensor.shape
    outputs = min(outputs, max(1, _MAX_WEIGHTS // inputs))
    part = RawTensor(tensor.name, (outputs, inputs), tensor.dtype, tensor.stored[:outputs])
    program = _native.Program(
        max_rows=FULL_STEP_ROWS,
        max_logit_rows=FULL_STEP_ROWS,
        threads=threads,
        isa=_native.best_isa(),
    )
    program.set_rotary(np.ones((1, 8), np.float32), np.zeros((1, 8), np.float32))
    program.set_cache("f32", 16, 1, 16, 1, 1)
    table = np.ones((1, inputs), np.float32)
    rows = ("F32", table.view(np.uint8), inputs)
    x = program.select(program.embed(program.add_table(rows)))
    weight = program.add_weight(precision, [raw_tuple(part)], None, False)
    # The largest matrix stands behind a norm, so with int8 it usually has one scale a row.
    program.finish(program.linear(program.convert(x, precision, row_scale=True), weight, -1))
    zeros = np.zeros(FULL_STEP_ROWS, np.int32)
    step = (
        zeros,
        zeros,
        zeros,
        np.array([0, FULL_STEP_ROWS], np.int32),
        np.array([1], np.int32),
        np.zeros((1, 1), np.int32),
        np.arange(FULL_STEP_ROWS, dtype=np.int32),
    )
    best = float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        program.run(*step, None, None)
        best = min(best, time.perf_counter() - started)
    return best
