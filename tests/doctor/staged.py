"""Servers in staged trouble: the real engine in virtual time, read through its real /metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.plan import TokenEvent
from hotbatch.core.policies import Policies
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.doctor import Verdict, Window, judge, make_window, read_scrape
from hotbatch.engine import Ceiling, ModelWork
from hotbatch.server.account_metrics import AccountMetrics
from hotbatch.server.metrics import ServerMetrics
from hotbatch.simulator import EngineRun, RooflineStepTime, SimulatedExecutor

# One gigabyte and one teraoperation a second; see tests/engine/test_accounting.py.
CEILING = Ceiling(bandwidth=1e9, compute=1e12, attention_compute=1e12)
WORK = ModelWork(3e6, 1e6, 700.0, 2.5e8, 0.5e8, 0.0)
STEP_TIME = RooflineStepTime(
    overhead=0.0003, weights=0.004, per_token=0.0003, per_context_token=7e-7
)


class Server:
    """So many clients, each asking again as soon as it was answered."""

    def __init__(
        self,
        *,
        clients: int,
        prompt: int = 50,
        tokens: int = 100,
        think: float = 0.0,
        host_seconds: float = 0.0,
        policies: Policies | None = None,
        step_time: Callable[..., float] = STEP_TIME,
        **config: Any,
    ) -> None:
        options = {"num_blocks": 4096, "max_model_len": 2048, **config}
        executor = SimulatedExecutor(
            num_blocks=options["num_blocks"],
            max_model_len=options["max_model_len"],
            step_time=step_time,
            strict=False,
            work=WORK,
        )
        self.run = EngineRun(
            Scheduler(SchedulerConfig(**options), policies),
            executor,
            ceiling=CEILING,
            host_seconds=host_seconds,
            on_event=self._hear,
        )
        engine = self.run.engine
        accounts = AccountMetrics(engine.totals, engine.ceiling)
        self.metrics = ServerMetrics("staged", engine.stats, {}, accounts.families)
        engine.step_observers.append(self.metrics.on_step)
        engine.request_observers.append(self.metrics.on_request)
        self._prompt, self._tokens, self._think = prompt, tokens, think
        self._count = 0
        for client in range(clients):
            # Not all in step.
            self.run.at(0.013 * client, self._ask)

    def _ask(self) -> None:
        self._count += 1
        start = 7919 * self._count
        # Lengths vary, so that answers do not end together.
        tokens = max(1, self._tokens - self._count * 37 % max(1, self._tokens // 2))
        self.run.engine.submit(
            Request(
                f"r{self._count}",
                [(start + i * i) % 251 for i in range(self._prompt)],
                SamplingParams(max_tokens=tokens, ignore_eos=True),
                seed=self._count,
            )
        )

    def _hear(self, event: TokenEvent) -> None:
        if event.finish_reason is not None:
            self.run.at(self.run.clock.now() + self._think, self._ask)

    def watch(self, seconds: float = 12.0, after: float = 3.0) -> Window:
        self.run.run(until=after)
        scrapes = []
        for index in range(5):
            self.run.run(until=after + seconds * index / 4)
            text = self.metrics.render().decode()
            scrapes.append(read_scrape(text, self.run.clock.now()))
        return make_window(scrapes)

    def verdict(self, seconds: float = 12.0) -> Verdict:
        return judge(self.watch(seconds))
