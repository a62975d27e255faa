"""A burst of clients against static and continuous batching, on the same kernels.

A few clients are there all the time; for a while a crowd joins them. Requests are of mixed
lengths, most short, some long, which is what a static batch cannot bear: it runs to the end
of its longest member while finished ones keep their places. Both servers get the very same
clients; the table and the plot show what these met.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotbatch.bench.client import Target, open_session
from hotbatch.bench.load import Client, LoadResult, run_clients, run_load
from hotbatch.bench.report import summarize
from hotbatch.bench.server_metrics import Sample, mean_batch_size, read_metrics, sample
from hotbatch.bench.server_process import SERVE, serving
from hotbatch.bench.workload import BenchRequest, RandomLengths, random_requests

if TYPE_CHECKING:
    from rich.table import Table

_SMOOTH_SECONDS = 1.0  # the plot's throughput is a mean over this long


@dataclass(frozen=True, slots=True)
class Burst:
    """`base` clients from the start with `base_requests` each; `peak - base` more, with one
    request each, that come evenly between `ramp_start` and `ramp_end` (seconds)."""

    base: int = 5
    peak: int = 100
    base_requests: int = 12
    ramp_start: float = 3.0
    ramp_end: float = 5.0
    seed: int = 0

    def clients(self) -> list[Client]:
        """The same clients for the same settings."""
        rng = random.Random(self.seed)
        steady = [
            Client(0.0, tuple(_mixed_request(rng) for _ in range(self.base_requests)))
            for _ in range(self.base)
        ]
        crowd = self.peak - self.base
        step = (self.ramp_end - self.ramp_start) / max(1, crowd)
        return steady + [
            Client(self.ramp_start + index * step, (_mixed_request(rng),)) for index in range(crowd)
        ]


def _mixed_request(rng: random.Random) -> BenchRequest:
    """Four of five answers are short, the fifth is some six times as long."""
    output_len = rng.randint(16, 48) if rng.random() < 0.8 else rng.randint(128, 256)
    (request,) = random_requests(
        1,
        input_len=RandomLengths(96, 0.8),
        output_len=RandomLengths(output_len),
        seed=rng.getrandbits(32),
    )
    return request


@dataclass(frozen=True, slots=True)
class ModeResult:
    """What one way of batching did with the burst. `mean_batch` is requests per step."""

    name: str
    load: LoadResult
    figures: dict[str, Any]
    samples: list[Sample]
    mean_batch: float


def run_mode(
    name: str,
    clients: Sequence[Client],
    options: Sequence[str] = (),
    *,
    command: Sequence[str] = SERVE,
    api_key: str | None = None,
) -> ModeResult:
    """Starts a server with `--batching name`, sends the clients, ends the server. It guesses
    nothing, as this is about batching.

    Raises:
        ServerFailedError: it did not start.
    """
    with serving(["--batching", name, "--no-speculate", *options], command=command) as url:
        target = Target(url, model="", api_key=api_key, extra_body={"temperature": 0.0})
        return asyncio.run(_measure(name, target, clients))


async def _measure(name: str, target: Target, clients: Sequence[Client]) -> ModeResult:
    warm_up = random_requests(
        4, input_len=RandomLengths(32), output_len=RandomLengths(8), seed=2**32
    )
    await run_load(target, warm_up)
    async with open_session(target) as session:
        before = await read_metrics(session, target.base_url)
        samples: list[Sample] = []
        sampler = asyncio.create_task(sample(session, target.base_url, before, samples))
        load = await run_clients(target, clients)
        sampler.cancel()
        with suppress(asyncio.CancelledError):
            await sampler
        after = await read_metrics(session, target.base_url)
    return ModeResult(name, load, summarize(load), samples, mean_batch_size(before, after))


# ---- what a person sees

_ROWS = (
    ("Duration (s)", "duration", 1, False),
    ("Output tokens per second", "output_throughput", 0, True),
    ("Time to first token, p50 (ms)", "p50_ttft_ms", 0, False),
    ("Time to first token, p99 (ms)", "p99_ttft_ms", 0, False),
    ("Between tokens, p50 (ms)", "p50_itl_ms", 1, False),
    ("Between tokens, p99 (ms)", "p99_itl_ms", 1, False),
    ("Whole answer, p50 (ms)", "p50_e2el_ms", 0, False),
    ("Whole answer, p99 (ms)", "p99_e2el_ms", 0, False),
)


def table(results: Sequence[ModeResult]) -> Table:
    """A row a figure, a column a mode; the last says how many times better the last mode is."""
    from rich.table import Table

    drawn = Table(title="The same burst of clients", title_justify="left")
    drawn.add_column("")
    for result in results:
        drawn.add_column(result.name, justify="right")
    drawn.add_column(f"{results[-1].name} is better by", justify="right")
    for label, key, digits, more_is_better in _ROWS:
        values = [float(result.figures[key]) for result in results]
        cells = [f"{value:,.{digits}f}" for value in values]
        drawn.add_row(label, *cells, _gain(values[0], values[-1], more_is_better))
    batches = [result.mean_batch for result in results]
    cells = [f"{batch:.1f}" for batch in batches]
    drawn.add_row("Mean batch size (requests)", *cells, _gain(batches[0], batches[-1], True))
    failed = [f"{result.figures['failed']}" for result in results]
    drawn.add_row("Failed requests", *failed, "")
    return drawn


def _gain(first: float, last: float, more_is_better: bool) -> str:
    above, below = (last, first) if more_is_better else (first, last)
    return f"{above / below:.1f} x" if below else ""


def plot(results: Sequence[ModeResult], path: Path) -> None:
    """Requests in the batch and tokens per second over time, a line a mode, as an image."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = ["#9a5b13", "#1f6fb2", "#4d8f3a"]
    figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 6), dpi=150)
    for result, color in zip(results, colors, strict=False):
        times = [sample.time for sample in result.samples]
        running = [sample.running for sample in result.samples]
        present = [sample.running + sample.waiting for sample in result.samples]
        upper.plot(times, running, color=color, linewidth=1.8, label=f"{result.name}: in the batch")
        upper.plot(times, present, color=color, linewidth=0.9, linestyle=":",
                   label=f"{result.name}: with those waiting")  # fmt: skip
        rate = result.figures["output_throughput"]
        label = f"{result.name}: {rate:,.0f} tokens/s on average"
        lower.plot(*throughput(result.samples), color=color, linewidth=1.8, label=label)
    upper.set_ylabel("requests")
    lower.set_ylabel("output tokens per second")
    lower.set_xlabel("seconds")
    upper.set_title("A burst of clients, the same for each way of batching", loc="left")
    for axis in (upper, lower):
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def throughput(samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Times, and the tokens per second over the `_SMOOTH_SECONDS` before each."""
    times: list[float] = []
    rates: list[float] = []
    first = 0
    for index, one in enumerate(samples):
        while samples[first].time < one.time - _SMOOTH_SECONDS and first < index - 1:
            first += 1
        elapsed = one.time - samples[first].time
        if elapsed > 0:
            times.append(one.time)
            rates.append((one.generated - samples[first].generated) / elapsed)
    return times, rates
