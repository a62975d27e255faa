"""What a step costs beside its kernels: plan, packing, commit, delivery, as shares of the step.

The real engine runs the real model in this process, with N requests that decode together, and
hands its events over as the server does. Of every step in which all N decode and nothing else
happens: the median of each part in microseconds, and what all of them together take of the
step. "Packing" is all that the executor does in Python: arrays in, results out.

    python benchmarks/overhead/step_overhead.py [--clients 1,16,64] [--prompt 128] [--output 128]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import describe

from hotbatch.assembly import assemble
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.engine.async_engine import AsyncEngine
from hotbatch.engine.step_stats import StepStats
from hotbatch.options import EngineOptions

PARTS = ("plan", "pack", "commit", "deliver")


class TimedProgram:
    """The native program of an executor, with the seconds of each call to `run`."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self.seconds: list[float] = []

    def run(self, *arrays: Any) -> None:
        started = time.perf_counter()
        self._program.run(*arrays)
        self.seconds.append(time.perf_counter() - started)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


async def serve(engine: AsyncEngine, clients: int, prompt_len: int, output_len: int) -> None:
    """All clients ask at once and read to the end."""
    numbers = random.Random(clients)

    async def ask(name: str) -> None:
        prompt = [numbers.randrange(1000, 20000) for _ in range(prompt_len)]
        params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        async for _ in engine.generate(Request(name, prompt, params, seed=1)):
            pass

    await asyncio.gather(*[ask(f"{clients}-{index}") for index in range(clients)])


def report(clients: int, steps: list[tuple[StepStats, float]]) -> str:
    full = [
        (stats, native)
        for stats, native in steps
        if stats.num_decode_tokens == clients and stats.num_prompt_tokens == 0
    ]
    parts = {
        "plan": [stats.plan_seconds for stats, _ in full],
        "pack": [stats.execute_seconds - native for stats, native in full],
        "commit": [stats.commit_seconds for stats, _ in full],
        "deliver": [stats.deliver_seconds for stats, _ in full],
    }
    native = [seconds for _, seconds in full]
    total = [sum(values) for values in zip(native, *parts.values(), strict=True)]
    outside = [whole - inside for whole, inside in zip(total, native, strict=True)]
    figures = "".join(f"{statistics.median(parts[part]) * 1e6:9.0f}" for part in PARTS)
    share = statistics.median(outside) / statistics.median(total)
    return (
        f"{clients:7d} {len(full):6d} {statistics.median(native) * 1e6:9.0f}{figures} "
        f"{statistics.median(outside) * 1e6:9.0f} {share:7.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", default="1,16,64")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--precision", default="auto")
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.clients.split(",")]

    assembly = assemble(EngineOptions(precision=arguments.precision))
    program = TimedProgram(assembly.engine._executor._program)
    assembly.engine._executor._program = program
    steps: list[StepStats] = []
    assembly.engine.step_observers.append(steps.append)
    engine = AsyncEngine(assembly.engine)
    print(f"{describe()}\n{assembly.name}: {assembly.info.description}")
    print(f"{arguments.prompt} tokens in, {arguments.output} out; medians in microseconds\n")
    print(
        "clients  steps   kernels" + "".join(f"{part:>9}" for part in PARTS) + "   outside   share"
    )
    engine.start()
    for clients in counts:
        steps.clear()
        program.seconds.clear()
        asyncio.run(serve(engine, clients, arguments.prompt, arguments.output))
        print(report(clients, list(zip(steps, program.seconds, strict=False))))
    assembly.close()


if __name__ == "__main__":
    main()
