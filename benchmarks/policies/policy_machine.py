"""The machines that policies are compared on, described by what a step costs there.

`cpu` is the machine of docs/performance.md with the embedded model: its curve was measured by
`benchmarks/step/step_time.py`, and `measured_cpu` makes the same of another run's `--json`.
`h200` is one H200 with an 8B model in bf16, from its data sheet: nobody measured anything.

Each machine also says what its clients were promised. A target for the first token is a floor
or a multiple of what the prompt takes alone, whichever is longer, for no scheduler can make a
long prompt shorter; a target for the tokens after it is a plain figure.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotbatch.core import PlannedRequest, StepPlan
from hotbatch.core.service_class import LatencyTargets, ServiceClass
from hotbatch.simulator import MeasuredStepTime, RooflineStepTime, StepTime

INTERACTIVE, STANDARD, BATCH = ServiceClass.INTERACTIVE, ServiceClass.STANDARD, ServiceClass.BATCH


@dataclass(frozen=True, slots=True)
class Promise:
    """First token within `ttft_floor` seconds or `ttft_factor` times the prompt alone,
    whichever is longer; `tpot` seconds for each token after it (None: any)."""

    ttft_floor: float
    ttft_factor: float
    tpot: float | None


@dataclass(frozen=True, slots=True)
class Machine:
    """What a scheduler has to know and what its steps cost.

    `budgets` and `static_sizes` are tried for first-come and for static batching; the best of
    each stands for it. `num_requests` is the length of a run.
    """

    name: str
    step_time: StepTime
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    budgets: tuple[int, ...]
    static_sizes: tuple[int, ...]
    num_requests: int
    promises: Mapping[ServiceClass, Promise]
    block_size: int = 16

    def alone(self, prompt_len: int) -> float:
        """Seconds to the first token of a prompt that has the machine to itself."""
        request = PlannedRequest("alone", 0, (0,) * prompt_len, ())
        return self.step_time(StepPlan(0, (request,)))

    def targets(self, service_class: ServiceClass, prompt_len: int) -> LatencyTargets:
        promise = self.promises[service_class]
        ttft = max(promise.ttft_floor, promise.ttft_factor * self.alone(prompt_len))
        return LatencyTargets(ttft, promise.tpot)


# ---- this CPU

# Milliseconds by tokens in the step, attention and sampling taken off.
_CPU_CURVE = {
    1: 4.9, 8: 5.0, 16: 5.9, 32: 10.8, 64: 21.2, 128: 39.8, 512: 155.0, 2048: 628.0,
}  # fmt: skip
_CPU_STEPS = MeasuredStepTime(
    tokens=tuple(_CPU_CURVE),
    seconds=tuple(ms / 1e3 for ms in _CPU_CURVE.values()),
    per_context_token=0.72e-6,
    per_pair=0.22e-6,
    per_sample=85e-6,
    overhead=0.5e-3,  # planning, booking, delivering
)


def cpu(step_time: StepTime = _CPU_STEPS) -> Machine:
    """Two Zen 4 cores, SmolLM2-135M in int8, the server's default KV cache of 470 MB."""
    return Machine(
        name="cpu",
        step_time=step_time,
        num_blocks=1280,
        max_model_len=8192,
        max_num_seqs=64,
        budgets=(64, 128, 256, 512, 1024, 2048),
        static_sizes=(4, 8, 16),
        num_requests=400,
        promises={
            INTERACTIVE: Promise(2.0, 4.0, 0.1),
            STANDARD: Promise(6.0, 10.0, 0.2),
            BATCH: Promise(120.0, 10.0, None),
        },
    )


def measured_cpu(path: Path) -> Machine:
    """The CPU with the curve of `benchmarks/step/step_time.py --json`.

    Raises:
        ValueError: the file has too few points to fit.
    """
    points = json.loads(path.read_text(encoding="utf-8"))["points"]
    return cpu(fit(points))


def fit(points: list[dict[str, float]]) -> MeasuredStepTime:
    """A curve from points of `rows`, `context`, `chunk` and `median_ms`.

    A token of context costs the slope between decode steps of as many rows at different
    contexts. A pair costs what bends the times of whole prompts; with fewer than two prompts,
    a third of a token of context. Sampling costs what a decoding row takes more than a row of
    a prompt. What is left is the curve.
    """
    decodes = [point for point in points if point["chunk"] == 1]
    prompts = [point for point in points if point["chunk"] > 1 and point["rows"] == 1]
    if len({point["rows"] for point in decodes}) < 2:
        raise ValueError("the measurements need decode steps of two numbers of rows or more")
    per_context = _context_slope(decodes)
    per_pair = per_context / 3.0
    prompt_token = None
    if len(prompts) >= 2:
        counts = np.array([point["chunk"] for point in prompts])
        columns = np.stack([counts, counts * (counts + 1) / 2], axis=1)
        seconds = np.array([point["median_ms"] / 1e3 for point in prompts])
        # Relative errors count: else the longest prompt alone would decide.
        weights = 1.0 / seconds
        solution = np.linalg.lstsq(columns * weights[:, None], seconds * weights, rcond=None)[0]
        prompt_token, per_pair = float(solution[0]), max(0.0, float(solution[1]))
    widest = max(decodes, key=lambda point: point["rows"])
    row = widest["median_ms"] / 1e3 / widest["rows"] - per_context * widest["context"]
    per_sample = max(0.0, row - prompt_token) if prompt_token is not None else 0.0

    curve: dict[int, list[float]] = defaultdict(list)
    for point in decodes:
        rows = int(point["rows"])
        rest = rows * (per_context * point["context"] + per_sample)
        curve[rows].append(point["median_ms"] / 1e3 - rest)
    for point in prompts:
        count = int(point["chunk"])
        pairs = count * (count + 1) / 2
        curve[count].append(point["median_ms"] / 1e3 - per_pair * pairs - per_sample)
    tokens = sorted(curve)
    seconds = [max(1e-6, float(np.median(curve[count]))) for count in tokens]
    seconds = list(np.maximum.accumulate(seconds))  # noise must not make a step cheaper
    return MeasuredStepTime(
        tuple(tokens), tuple(map(float, seconds)), per_context, per_pair, per_sample, 0.5e-3
    )


def _context_slope(decodes: list[dict[str, float]]) -> float:
    by_rows: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for point in decodes:
        by_rows[point["rows"]].append((point["context"] * point["rows"], point["median_ms"] / 1e3))
    slopes = [
        (line[-1][1] - line[0][1]) / (line[-1][0] - line[0][0])
        for line in map(sorted, by_rows.values())
        if line[-1][0] > line[0][0]
    ]
    if not slopes:
        raise ValueError("the measurements need decode steps at two contexts or more")
    return max(0.0, float(np.median(slopes)))


# ---- one H200

_FLOPS = 989e12 * 0.6  # dense bf16, what large products reach of it
_BYTES_PER_SECOND = 4.8e12 * 0.8
_PARAMETERS = 8.0e9
_KV_BYTES = 128 * 1024  # a token: 32 layers, 8 heads of 128, keys and values, bf16
_ATTENTION_FLOPS = 4 * 32 * 32 * 128  # a pair: 32 layers, 32 heads of 128
_GIB = 2**30


def h200() -> Machine:
    """One H200, an 8B model in bf16, 4 ms a step for launches and the host."""
    cache_bytes = 139 * _GIB - 2 * _PARAMETERS - 5 * _GIB  # weights, activations
    return Machine(
        name="h200",
        step_time=RooflineStepTime(
            overhead=4e-3,
            weights=2 * _PARAMETERS / _BYTES_PER_SECOND,
            per_token=2 * _PARAMETERS / _FLOPS,
            per_context_token=_KV_BYTES / _BYTES_PER_SECOND,
            per_pair=_ATTENTION_FLOPS / _FLOPS,
        ),
        num_blocks=int(cache_bytes / _KV_BYTES / 16),
        max_model_len=32_768,
        max_num_seqs=512,
        budgets=(256, 512, 1024, 2048, 8192),
        static_sizes=(64, 256, 512),
        num_requests=3000,
        promises={
            INTERACTIVE: Promise(0.5, 4.0, 0.03),
            STANDARD: Promise(2.0, 10.0, 0.06),
            BATCH: Promise(60.0, 10.0, None),
        },
    )
