"""A few points on the real engine and model, in this process, beside the simulated ones.

The same requests at the same moments, the same scheduler and policies; only the clock and the
executor differ. What the simulation is worth is the error between the two.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from policy_machine import Machine, cpu, measured_cpu
from policy_point import config_of, figures_of, hear, saturation, simulate
from policy_variant import Variant, variants
from policy_workload import Ask, arrival_times, asks, load_trace, requests

from hotbatch.core import Request, Scheduler, TokenEvent
from hotbatch.engine import Engine
from hotbatch.executor.cpu_executor import CpuExecutor
from hotbatch.models.embedded import embedded_model_path
from hotbatch.models.loader import LoadedModel, load_model
from hotbatch.simulator import Outcome

_TOKENS = (1000, 20_000)  # ids of prompts are drawn from these


class Listener:
    """Hears the engine's events and keeps when they came."""

    def __init__(self, count: int) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.now = time.monotonic
        self._left = count
        self._all_ended = threading.Event()

    def hear(self, events: list[TokenEvent]) -> None:
        now = self.now()
        for event in events:
            outcome = self.outcomes[event.request_id]
            outcome.token_ids += event.token_ids
            outcome.token_times += [now] * len(event.token_ids)
            if event.finish_reason is not None:
                outcome.finish_reason = event.finish_reason
                outcome.error_reason = event.error_reason
                self._left -= 1
                if self._left == 0:
                    self._all_ended.set()

    def wait(self, seconds: float) -> None:
        """Raises TimeoutError if requests are left then."""
        if not self._all_ended.wait(seconds):
            raise TimeoutError(f"{self._left} requests have not ended after {seconds:.0f} s")


def real_requests(asked: Sequence[Ask], arrivals: Sequence[float]) -> list[Request]:
    """As in the simulation, with token ids that the model knows."""
    rng = random.Random(0)
    made = []
    for request in requests(asked, arrivals):
        prompt = rng.choices(range(*_TOKENS), k=request.num_prompt)
        made.append(
            Request(
                request.request_id,
                prompt,
                request.params,
                seed=request.seed,
                tenant=request.tenant,
                service_class=request.service_class,
                targets=request.targets,
            )
        )
    return made


def run_real(
    model: LoadedModel, machine: Machine, variant: Variant, asked: Sequence[Ask], rate: float
) -> dict[str, Any]:
    """Figures of one run on the real engine."""
    config = config_of(machine, variant, asked)
    executor = CpuExecutor(
        model,
        num_blocks=machine.num_blocks,
        block_size=machine.block_size,
        max_model_len=machine.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        precision="int8",
        kv_cache_dtype="bf16",
    )
    listener = Listener(len(asked))
    engine = Engine(Scheduler(config, variant.policies(machine)), executor, deliver=listener.hear)
    listener.now = engine.now
    arrivals = arrival_times(asked, rate)
    engine.start()
    try:
        begin = engine.now()
        for request, due in zip(real_requests(asked, arrivals), arrivals, strict=True):
            time.sleep(max(0.0, begin + due - engine.now()))
            request.arrival = engine.now()
            listener.outcomes[request.request_id] = Outcome(request.arrival)
            engine.submit(request)
        listener.wait(600.0)
        end = engine.now() - begin
    finally:
        engine.stop()
    heard = [hear(ask, listener.outcomes[f"r{index}"]) for index, ask in enumerate(asked)]
    tokens = sum(len(outcome.token_ids) for outcome in listener.outcomes.values())
    figures = figures_of(heard, len(asked) / rate)
    return {
        **figures,
        "end": end,
        "output_tokens_per_s": tokens / end,
        "preemptions": engine.stats().preemptions,
    }


def compare(
    arguments: argparse.Namespace, *, count: int = 40, fractions: Sequence[float] = (0.6, 1.1)
) -> list[dict[str, Any]]:
    """Points of first-come with the server's budget and of the full scheduler, both ways."""
    step_json: Path | None = arguments.step_json
    machine = replace(measured_cpu(step_json) if step_json else cpu(), num_requests=count)
    every = {variant.name: variant for variant in variants(machine)}
    model = load_model(str(embedded_model_path()))
    rows = []
    for workload in arguments.workloads:
        trace = load_trace(workload, arguments.traces)
        asked = asks(trace, machine, count=count, mix="mixed", seed=1)
        saturated = saturation(machine, every["first-come 2048"], asked)
        for name in ("first-come 512", "full"):
            for fraction in fractions:
                rate = fraction * saturated
                simulated = simulate(machine, every[name], asked, rate, seed=1)
                real = run_real(model, machine, every[name], asked, rate)
                rows.append(
                    {
                        "trace": workload,
                        "variant": name,
                        "fraction": fraction,
                        "saturation": saturated,
                        "simulated": simulated,
                        "real": real,
                    }
                )
    return rows


def real_table(rows: Sequence[dict[str, Any]]) -> str:
    """Real against simulated: goodput, the end of the run, tokens per second, first tokens."""
    lines = [
        "",
        "the real engine against the simulation (real / simulated)",
        f"{'':42}{'goodput':>16}{'tokens/s':>18}{'end, s':>18}{'TTFT p50, s':>18}",
    ]
    for row in rows:
        real, simulated = row["real"], row["simulated"]
        cells = ""
        for key in ("goodput", "output_tokens_per_s", "end"):
            cells += f"{real[key]:>10.2f} /{simulated[key]:>6.2f}"
        cells += f"{_ttft(real):>10.2f} /{_ttft(simulated):>6.2f}"
        lines.append(f"{row['trace']:14}{row['variant']:20}{row['fraction']:>8.2f}{cells}")
    errors = [
        abs(row["real"]["output_tokens_per_s"] / row["simulated"]["output_tokens_per_s"] - 1.0)
        for row in rows
    ]
    goods = [abs(row["real"]["attainment"] - row["simulated"]["attainment"]) for row in rows]
    lines.append(
        f"error of the simulation: tokens per second {sum(errors) / len(errors):.1%} on average, "
        f"share served as promised {100 * sum(goods) / len(goods):.1f} points"
    )
    return "\n".join(lines)


def _ttft(figures: dict[str, Any]) -> float:
    """Median over classes of the median; classes are those that came."""
    values = [
        latencies["p50_ttft"]
        for latencies in figures["latency_by_class"].values()
        if latencies["p50_ttft"] is not None
    ]
    return sorted(values)[len(values) // 2] if values else float("nan")
