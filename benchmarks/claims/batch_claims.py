"""Claims about batches as they form: static against continuous, fuller ones, and what it costs."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from claim_parts import Ask, Loaded, Played, play, quantile, table

from hotbatch.core.plan import StepPlan
from hotbatch.core.policies import full_policies
from hotbatch.engine.accounting import Cause
from hotbatch.simulator import StepTime, TimeOnlyExecutor
from hotbatch.tuning import (
    PROFILES,
    CurveStepTime,
    Settings,
    Targets,
    make_jobs,
    measure_curve,
)
from hotbatch.tuning.trials import Simulator

_LONGEST = 1024  # tokens of a request


def chats(count: int, *, seed: int = 0, apart: float = 0.0) -> list[Ask]:
    """Questions and answers of a chat's lengths, so many seconds apart."""
    jobs = make_jobs(PROFILES["chat"], count, _LONGEST, seed)
    return [Ask(index * apart, job.num_prompt, job.num_output) for index, job in enumerate(jobs)]


# ---- static batches


def static(machine: Loaded, scale: float) -> None:
    """Static batching wastes memory and adds latency under 5 to 100 clients."""
    seats = 16
    rows = []
    for clients in (5, 20, 50, 100):
        asks = chats(max(3, int(clients * scale)))
        ways = {
            f"static, {seats}": machine.config(batching="static", static_batch_size=seats),
            f"continuous, {seats} seats": machine.config(max_num_seqs=seats),
            "continuous, 64 seats": machine.config(max_num_seqs=64),
        }
        for name, config in ways.items():
            played = play(machine, config, asks)
            is_static = config.batching == "static"
            kept = used_of_padded(played, asks, seats) if is_static else used_of_blocks(played)
            latencies, firsts = played.latencies(), played.first_tokens()
            rows.append(
                (
                    f"{len(asks)} clients: {name}",
                    f"{kept:.0%}",
                    f"{statistics.median(firsts):.2f}",
                    f"{statistics.median(latencies):.2f}",
                    f"{quantile(latencies, 0.95):.2f}",
                    f"{played.throughput:.0f}",
                )
            )
    columns = ("", "KV in use", "first token s", "answer s, p50", "p95", "tokens/s")
    print(table(columns, rows))
    print(
        "KV in use: tokens held for requests that still run, of what is reserved. A static batch\n"
        "reserves the longest member's tokens for each of its seats until the last has ended;\n"
        "continuous batching has the blocks it allocated."
    )


def used_of_padded(played: Played, asks: Sequence[Ask], seats: int) -> float:
    """Token-seconds in use of those that static batches of the first, the next ... reserve."""
    used = reserved = 0.0
    for plan, seconds in played.plans:
        batch = int(plan.requests[0].request_id[1:]) // seats
        members = asks[batch * seats : (batch + 1) * seats]
        longest = max(ask.num_prompt + ask.num_output for ask in members)
        used += seconds * sum(request.context_len for request in plan.requests)
        reserved += seconds * longest * len(members)
    return used / reserved


def used_of_blocks(played: Played) -> float:
    """Token-seconds in use of those that were allocated."""
    used = allocated = 0.0
    for plan, seconds in played.plans:
        used += seconds * sum(request.context_len for request in plan.requests)
        allocated += seconds * slots_of(plan)
    return used / allocated


def slots_of(plan: StepPlan, block_size: int = 16) -> int:
    return block_size * sum(len(request.block_ids) for request in plan.requests)


# ---- fuller batches


@dataclass(frozen=True, slots=True)
class Quicker:
    """A machine that does so many times as much in the same time."""

    step_time: StepTime
    times: float

    def __call__(self, plan: StepPlan) -> float:
        return self.step_time(plan) / self.times


def fill(machine: Loaded, scale: float) -> None:
    """A 10 % better fill gives 30 to 40 % more throughput."""
    rows = []
    for fewer, more in ((10, 11), (20, 22), (40, 44)):
        shapes = [[(255, 1)] * count for count in (fewer, more)]
        rates = []
        for shape in shapes:
            seconds = machine.seconds(shape, repeats=max(3, int(25 * scale)))
            assert seconds is not None
            rates.append(len(shape) / seconds)
        rows.append((f"steps of {fewer} and {more} sequences", *_gain(rates)))
    for fewer, more in ((10, 11), (20, 22)):
        asks = chats(max(more, int(90 * scale)))
        rates = [
            play(machine, machine.config(max_num_seqs=count), asks).throughput
            for count in (fewer, more)
        ]
        rows.append((f"served, backlogged, {fewer} and {more} seats", *_gain(rates)))
    print(table(("more sequences at a time", "tokens/s", "10 % more", "gain"), rows))
    print()
    _fill_near_saturation(scale)


def _fill_near_saturation(scale: float) -> None:
    """In virtual time: what a tenth more capacity does to those who are promised something."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "policies"))
    from policy_machine import cpu

    from hotbatch.core.cost_model import CostModel
    from hotbatch.engine.protocol import ExecutorInfo

    rows = []
    capacity = 0.0
    jobs = make_jobs(PROFILES["chat"], max(20, int(200 * scale)), _LONGEST)
    ways = {"first come": Settings(256, 2048, is_plain=True), "full": Settings(256, 2048)}
    good: dict[tuple[str, float, float], float] = {}
    for times in (1.0, 1.1):
        executor = TimeOnlyExecutor(num_blocks=1280, step_time=Quicker(cpu().step_time, times))
        model = CostModel()
        for _ in range(3):
            for features, seconds in measure_curve(executor, 0.0, 2048, clock=executor.clock.now):
                model.observe(features, seconds, is_live=False)
        info = ExecutorInfo(
            model_name="fitted", precision="int8", device="simulated", vocab_size=49152,
            max_model_len=8192, num_blocks=1280, block_size=16,
        )  # fmt: skip
        simulator = Simulator(info, {None: CurveStepTime(model)}, jobs, Targets(1.0, 0.1))
        capacity = capacity or simulator.capacity
        for load in (0.8, 1.0, 1.1, 1.2, 1.3):
            for name, settings in ways.items():
                figures = simulator.run(settings, load * capacity, len(jobs))
                good[name, load, times] = figures.goodput
    for name, load, times in good:
        if times == 1.0:
            rates = [good[name, load, 1.0], good[name, load, 1.1]]
            rows.append((f"{name}, {load:.0%} of what it can do", *_gain(rates, digits=2)))
    print(table(("good requests a second (simulated)", "so far", "10 % more", "gain"), rows))
    print("good: first token within 1 s, then a token each 100 ms")


def _gain(rates: Sequence[float], digits: int = 0) -> tuple[str, str, str]:
    before, after = rates
    return f"{before:.{digits}f}", f"{after:.{digits}f}", f"{after / before - 1.0:+.0%}"


# ---- utilisation


def utilisation(machine: Loaded, scale: float) -> None:
    """Utilisation under 70 % means throughput on the table."""
    rows = []
    for clients in (1, 2, 4, 8, 16, 32, 64):
        asks = [Ask(0.0, 32, 64 + index % 9) for index in range(int(clients * (2 + 4 * scale)))]
        played = play(machine, machine.config(), asks, full_policies(), clients=clients)
        totals = played.totals
        assert totals is not None
        share = {cause: totals.by_cause[cause] / totals.seconds for cause in Cause}
        rows.append(
            (
                clients,
                f"{totals.decode_utilisation_since_start or 0.0:.0%}",
                f"{played.throughput:.0f}",
                f"{share[Cause.FEW_SEQUENCES]:.0%}",
                f"{share[Cause.HOST_GAP]:.0%}",
                f"{share[Cause.KERNEL_INEFFICIENCY]:.0%}",
            )
        )
    columns = ("clients", "decode utilisation", "tokens/s", "few sequences", "host", "kernels")
    print(table(columns, rows))


# ---- what dynamic batching costs


def costs(machine: Loaded, scale: float) -> None:
    """Dynamic batching costs scheduling time, fragmentation and queueing."""
    played = play(machine, machine.config(), chats(max(8, int(120 * scale))), full_policies())
    many = [step for step in played.steps if step.num_requests >= 0.75 * 64] or played.steps
    rows = []
    busy = sum(map(_seconds, many))
    for name in ("plan", "commit", "deliver"):
        values = [getattr(step, f"{name}_seconds") for step in many]
        rows.append((name, f"{1e6 * statistics.median(values):.0f}", f"{sum(values) / busy:.2%}"))
    print(f"{len(many)} steps of 48 to 64 sequences, {1e3 * busy / len(many):.1f} ms each")
    print(table(("of a step", "median us", "share"), rows))
    print()
    held = [(slots_of(plan), sum(r.context_len for r in plan.requests)) for plan, _ in played.plans]
    allocated, used = (sum(column) for column in zip(*held, strict=True))
    tail = statistics.mean(
        (-request.context_len) % 16 for plan, _ in played.plans for request in plan.requests
    )
    print(
        f"fragmentation: {1.0 - used / allocated:.1%} of the allocated slots hold nothing yet; "
        f"{tail:.1f} at the end of each sequence, the rest for prompts that are being computed\n"
    )
    idle = play(
        machine, machine.config(), chats(max(3, int(12 * scale))), full_policies(), clients=1
    )
    beside = play(
        machine, machine.config(), chats(max(9, int(48 * scale))), full_policies(), clients=8
    )
    rows = [
        (name, f"{1e3 * quantile(waits, 0.5):.2f}", f"{1e3 * quantile(waits, 0.95):.2f}")
        for name, waits in (
            ("alone", _waits(idle)),
            ("beside 7 that run", _waits(beside)),
            ("time of a step beside 7", [seconds for _, seconds in beside.plans]),
        )
    ]
    print(table(("from arrival to the first step, ms", "p50", "p95"), rows))


def _seconds(step: object) -> float:
    return sum(
        getattr(step, f"{name}_seconds") for name in ("plan", "execute", "commit", "deliver")
    )


def _waits(played: Played) -> list[float]:
    return [
        timing.first_scheduled - timing.arrival
        for timing in played.timings
        if timing.first_scheduled is not None
    ]
