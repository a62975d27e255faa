"""What the claims share: the loaded machine, requests played to an engine, single steps timed."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hotbatch.assembly import assemble
from hotbatch.core.config import SchedulerConfig
from hotbatch.core.cost_model import StepFeatures
from hotbatch.core.plan import StepPlan, StepResult, TokenEvent
from hotbatch.core.policies import Policies
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.engine.accounting import Totals
from hotbatch.engine.ceiling import Ceiling, Roofline
from hotbatch.engine.engine import Engine
from hotbatch.engine.protocol import Executor, ExecutorInfo
from hotbatch.engine.step_stats import RequestTimings, StepStats
from hotbatch.engine.warm_up import made_up_step
from hotbatch.options import EngineOptions

_PATIENCE = 120.0  # seconds that the last answer may take


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model on this machine, and the machine's ceiling."""

    executor: Executor
    ceiling: Ceiling

    @property
    def info(self) -> ExecutorInfo:
        return self.executor.info

    @property
    def roofline(self) -> Roofline:
        assert self.info.work is not None, "the executor does not say what the model needs"
        return Roofline(self.info.work, self.ceiling)

    def config(self, **changes: Any) -> SchedulerConfig:
        settings: dict[str, Any] = {
            "num_blocks": self.info.num_blocks,
            "block_size": self.info.block_size,
            "max_model_len": self.info.max_model_len,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 512,
            "enable_prefix_caching": False,
        }
        return SchedulerConfig(**(settings | changes))

    def seconds(self, shape: Sequence[tuple[int, int]], repeats: int = 5) -> float | None:
        """Median time of a step of (position, tokens) of each request; None if it does not fit."""
        plan = made_up_step(shape, self.info)
        if plan is None:
            return None
        times = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            self.executor.run(plan)
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    def features(self, shape: Sequence[tuple[int, int]]) -> StepFeatures:
        plan = made_up_step(shape, self.info)
        assert plan is not None
        return StepFeatures.of_plan(plan)


@contextmanager
def loaded(options: EngineOptions) -> Iterator[Loaded]:
    parts = assemble(options, as_tuned=False)
    print(f"{parts.name}: {parts.info.description}")
    ceiling = parts.known.profile.ceiling
    print(
        f"ceiling: {ceiling.bandwidth / 1e9:.1f} GB/s, {ceiling.compute / 1e9:.0f} G op/s in "
        f"linear layers, {ceiling.attention_compute / 1e9:.0f} in attention ({ceiling.origin})\n"
    )
    try:
        yield Loaded(parts.engine.executor, ceiling)
    finally:
        parts.engine.stop()


@dataclass
class Played:
    """What was seen of requests that were played.

    Attributes:
        times: of each request: when it was sent, then when each token came.
        plans: each step with its seconds.
    """

    wall: float = 0.0
    times: dict[str, list[float]] = field(default_factory=dict)
    plans: list[tuple[StepPlan, float]] = field(default_factory=list)
    steps: list[StepStats] = field(default_factory=list)
    timings: list[RequestTimings] = field(default_factory=list)
    totals: Totals | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(times) - 1 for times in self.times.values())

    @property
    def throughput(self) -> float:
        """Tokens written a second."""
        return self.num_tokens / self.wall

    def latencies(self) -> list[float]:
        """From sending to the last token."""
        return [times[-1] - times[0] for times in self.times.values()]

    def first_tokens(self) -> list[float]:
        return [times[1] - times[0] for times in self.times.values()]


class _Watched:
    """An executor that notes what it runs, and outlives the engine that uses it."""

    def __init__(self, executor: Executor, played: Played) -> None:
        self._executor = executor
        self._played = played

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    def run(self, plan: StepPlan) -> StepResult:
        result = self._executor.run(plan)
        self._played.plans.append((plan, result.seconds))
        return result

    def close(self) -> None:
        """Its owner does."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Seconds after the start, tokens in, tokens out."""

    time: float
    num_prompt: int
    num_output: int


def play(
    machine: Loaded,
    config: SchedulerConfig,
    asks: Sequence[Ask],
    policies: Policies | None = None,
    *,
    clients: int | None = None,
) -> Played:
    """Play requests to an engine with these settings until all were answered.

    Args:
        clients: so many ask one after the other, as soon as they were answered, whatever the
            times say; None: each comes at its time.
    """
    played = Played()
    engine = Engine(
        Scheduler(config, policies), _Watched(machine.executor, played), ceiling=machine.ceiling
    )
    all_ended = threading.Event()
    unsent = iter(enumerate(asks))
    left = len(asks)

    def send_next() -> bool:
        index, ask = next(unsent, (0, None))
        if ask is None:
            return False
        now = engine.now()
        played.times[f"r{index}"] = [now]
        engine.submit(_request(index, ask, now, machine.info.vocab_size))
        return True

    def hear(events: list[TokenEvent]) -> None:
        nonlocal left
        now = engine.now()
        for event in events:
            played.times[event.request_id] += [now] * len(event.token_ids)
            if event.finish_reason is not None:
                left -= 1
                if clients is not None:
                    send_next()
        if left == 0:
            all_ended.set()

    engine.connect(hear)
    engine.step_observers.append(played.steps.append)
    engine.request_observers.append(played.timings.append)
    engine.start()
    began = engine.now()
    try:
        if clients is not None:
            for _ in range(clients):
                send_next()
        else:
            for ask in asks:
                time.sleep(max(0.0, began + ask.time - engine.now()))
                send_next()
        if not all_ended.wait(_PATIENCE):
            raise TimeoutError(f"{left} requests have not ended")
        played.wall = engine.now() - began
        played.totals = engine.totals()
    finally:
        engine.stop()
    return played


def _request(index: int, ask: Ask, now: float, vocab_size: int) -> Request:
    return Request(
        f"r{index}",
        [(index * 7919 + place * 31 + 1) % vocab_size for place in range(ask.num_prompt)],
        SamplingParams(temperature=0.0, max_tokens=ask.num_output, ignore_eos=True),
        seed=index,
        arrival=now,
    )


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """As wide as its widest cell."""
    cells = [list(columns), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )


Claim = Callable[[Loaded, float], None]
