"""What keeping conversations by their chance to return gains: later turns against plain LRU.

    python benchmarks/speculation/turns.py --trace mooncake_conversation.jsonl
        [--machine cpu|h200] [--cache-tokens 16000,32000,64000] [--keep 0.1] [--time-scale 1]
        [--length-scale 0.125] [--seeds 0,1,2] [--evictions lru,return-time] [--real]
        [--json turns.json]

The very scheduler in virtual time, on a machine whose step curve was measured, under several
sizes of the KV cache. Conversations come from the trace (`turn_workload` says how), the next
turn a human gap after the answer before it. Later turns are all but the first of a conversation:
their time to first token, and the share of their prompt tokens that was found in the cache.
Nothing is left out: tables and caches start empty with each run.

`--real` runs the same conversations on the engine and the embedded model in this process, in
real time: choose `--time-scale` and `--minutes` so that it ends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "policies"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from machine import describe
from policy_machine import Machine, cpu, h200
from turn_workload import Conversation, conversations, load

from hotbatch.core import Request, SamplingParams, Scheduler, SchedulerConfig, TokenEvent
from hotbatch.core.policies import full_policies
from hotbatch.simulator import Simulation, TimeOnlyExecutor, UnsteadyStepTime

MACHINES = {"cpu": cpu, "h200": h200}
_SPREAD = 0.05  # of step times around the curve
_SYSTEM, _FIRST_OWN = 10, 1_000_000  # token ids: of the system prompt, and of what people say


class Speaker:
    """Turns conversations into requests, one turn after the other."""

    def __init__(self, talks: Sequence[Conversation], vocab: tuple[int, int] | None) -> None:
        self.talks = talks
        self._vocab = vocab
        self._next_id = _FIRST_OWN
        self._said: dict[int, list[int]] = {}

    def request(self, talk: int, turn: int, answer: Sequence[int], arrival: float) -> Request:
        """Turn number `turn` of a conversation, after the `answer` to the one before it."""
        conversation = self.talks[talk]
        what = conversation.turns[turn]
        said = [*self._said.get(talk, ()), *answer][: what.kept]
        num_own = what.num_prompt - len(said)
        if turn == 0:
            said = [self._id(_SYSTEM + place) for place in range(conversation.common)]
            num_own -= len(said)
        said += [self._id(self._next_id + place) for place in range(num_own)]
        self._next_id += num_own
        self._said[talk] = said
        return Request(
            f"{talk}.{turn}",
            said,
            SamplingParams(temperature=0.0, max_tokens=what.answer, ignore_eos=True),
            seed=0,
            arrival=arrival,
        )

    def _id(self, number: int) -> int:
        if self._vocab is None:
            return number
        low, high = self._vocab
        return low + number * 2654435761 % (high - low)


@dataclass
class Heard:
    """What came of the later turns of one run, and of all requests together."""

    ttfts: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_cached: int = 0
    num_first: int = 0
    first_ttfts: list[float] = field(default_factory=list)

    def note(self, turn: int, ttft: float, num_prompt: int, num_cached: int) -> None:
        if turn == 0:
            self.first_ttfts.append(ttft)
            return
        self.ttfts.append(ttft)
        self.num_prompt += num_prompt
        self.num_cached += num_cached


def config_of(machine: Machine, cache_tokens: int, eviction: str) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=cache_tokens // machine.block_size,
        block_size=machine.block_size,
        max_model_len=machine.max_model_len,
        max_num_seqs=machine.max_num_seqs,
        max_num_batched_tokens=max(512, machine.max_num_seqs),
        prefix_eviction=eviction,
    )


def simulate(
    machine: Machine, talks: Sequence[Conversation], cache_tokens: int, eviction: str, seed: int
) -> dict[str, Any]:
    """Figures of one run in virtual time."""
    scheduler = Scheduler(config_of(machine, cache_tokens, eviction), full_policies())
    executor = TimeOnlyExecutor(
        num_blocks=cache_tokens // machine.block_size,
        block_size=machine.block_size,
        max_model_len=machine.max_model_len,
        step_time=UnsteadyStepTime(machine.step_time, _SPREAD, seed=seed),
    )
    speaker = Speaker(talks, None)
    heard = Heard()

    def watch(plan: Any, result: Any) -> None:
        for planned in plan.requests:
            outcome = simulation.outcomes.get(planned.request_id)
            if outcome is None or outcome.finish_time is None:
                continue
            talk, turn = map(int, planned.request_id.split("."))
            what = talks[talk].turns
            ttft = outcome.time_to_first_token
            assert ttft is not None
            heard.note(turn, ttft, what[turn].num_prompt, outcome.num_cached)
            del simulation.outcomes[planned.request_id]
            if turn + 1 < len(what):
                due = outcome.finish_time + what[turn + 1].gap
                answer = outcome.token_ids
                simulation.arrive(speaker.request(talk, turn + 1, answer, due))

    simulation = Simulation(scheduler, executor, observer=watch)
    for talk, conversation in enumerate(talks):
        simulation.arrive(speaker.request(talk, 0, (), conversation.turns[0].gap))
    simulation.run(max_steps=50_000_000)
    return {
        **figures(heard),
        "busy": executor.busy_seconds / executor.clock.now(),
        **_of_scheduler(scheduler),
    }


def figures(heard: Heard) -> dict[str, Any]:
    return {
        "later_turns": len(heard.ttfts),
        "p50_ttft": float(np.percentile(heard.ttfts, 50)),
        "p99_ttft": float(np.percentile(heard.ttfts, 99)),
        "mean_ttft": statistics.fmean(heard.ttfts),
        "later_hit_rate": heard.num_cached / max(1, heard.num_prompt),
        "p50_first_ttft": float(np.percentile(heard.first_ttfts, 50)),
        "p99_first_ttft": float(np.percentile(heard.first_ttfts, 99)),
    }


def _of_scheduler(scheduler: Scheduler) -> dict[str, Any]:
    stats = scheduler.stats()
    return {
        "hit_rate": stats.prefix_hit_tokens / max(1, stats.prefix_query_tokens),
        "preemptions": stats.preemptions,
    }


def run_real(
    machine: Machine, talks: Sequence[Conversation], cache_tokens: int, eviction: str, seed: int
) -> dict[str, Any]:
    """The same on the engine and the embedded model, in real time."""
    from hotbatch.core.cost_model import CostModel
    from hotbatch.engine import Engine
    from hotbatch.executor.cpu_executor import CpuExecutor
    from hotbatch.models.embedded import embedded_model_path
    from hotbatch.models.loader import load_model

    config = config_of(machine, cache_tokens, eviction)
    executor = CpuExecutor(
        load_model(str(embedded_model_path())),
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        precision="int8",
    )
    scheduler = Scheduler(config, full_policies(), CostModel())
    speaker = Speaker(talks, (1000, 40_000))
    heard = Heard()
    answers: dict[str, list[int]] = {}
    firsts: dict[str, float] = {}
    arrivals: dict[str, float] = {}
    left = sum(len(talk.turns) for talk in talks)
    over = threading.Event()

    def submit(talk: int, turn: int, answer: Sequence[int]) -> None:
        request = speaker.request(talk, turn, answer, engine.now())
        arrivals[request.request_id] = request.arrival
        answers[request.request_id] = []
        engine.submit(request)

    def after(seconds: float, talk: int, turn: int, answer: Sequence[int]) -> None:
        timer = threading.Timer(seconds, submit, (talk, turn, answer))
        timer.daemon = True
        timer.start()

    def hear(events: list[TokenEvent]) -> None:
        nonlocal left
        now = engine.now()
        for event in events:
            name = event.request_id
            answers[name] += event.token_ids
            firsts.setdefault(name, now)
            if event.finish_reason is None:
                continue
            talk, turn = map(int, name.split("."))
            what = talks[talk].turns
            ttft = firsts[name] - arrivals[name]
            heard.note(turn, ttft, what[turn].num_prompt, event.num_cached)
            if turn + 1 < len(what):
                after(what[turn + 1].gap, talk, turn + 1, answers[name])
            left -= 1
            if left == 0:
                over.set()

    engine = Engine(scheduler, executor, deliver=hear)
    engine.start()
    begin = time.monotonic()
    try:
        for talk, conversation in enumerate(talks):
            after(conversation.turns[0].gap, talk, 0, ())
        if not over.wait(3600.0):
            raise TimeoutError(f"{left} turns are left after an hour")
    finally:
        engine.stop()
    return {
        **figures(heard),
        "busy": float("nan"),
        "seconds": time.monotonic() - begin,
        **_of_scheduler(scheduler),
    }


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each size of the cache, seed and order of eviction."""
    machine = replace(MACHINES[arguments.machine](), max_num_seqs=arguments.max_num_seqs)
    rows = load(arguments.trace)
    if arguments.minutes is not None:
        rows = [row for row in rows if row.time < arguments.minutes * 60.0]
    run = run_real if arguments.real else simulate
    for cache_tokens in arguments.cache_tokens:
        for seed in arguments.seeds:
            talks = conversations(
                rows,
                keep=arguments.keep,
                time_scale=arguments.time_scale,
                length_scale=arguments.length_scale,
                max_total=min(machine.max_model_len, cache_tokens // 2),
                seed=seed,
            )
            for eviction in arguments.evictions:
                yield {
                    "cache_tokens": cache_tokens,
                    "seed": seed,
                    "eviction": eviction,
                    **run(machine, talks, cache_tokens, eviction, seed),
                }


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['cache_tokens']:>9}{row['seed']:>5}  {row['eviction']:<12}{row['later_turns']:>7}"
        f"{row['p50_ttft']:>9.3f}{row['p99_ttft']:>9.3f}{row['mean_ttft']:>9.3f}"
        f"{row['later_hit_rate']:>9.1%}{row['hit_rate']:>8.1%}"
        f"{row['p50_first_ttft']:>10.3f}{row['p99_first_ttft']:>9.3f}{row['busy']:>7.0%}",
        flush=True,
    )


HEADER = (
    f"{'cache':>9}{'seed':>5}  {'eviction':<12}{'later':>7}{'p50 s':>9}{'p99 s':>9}{'mean s':>9}"
    f"{'hits':>9}{'of all':>8}{'1st p50':>10}{'1st p99':>9}{'busy':>7}"
)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Means over seeds, each order of eviction against the first."""
    lines = ["", "means over the seeds, and against the first order of eviction"]
    evictions = list(dict.fromkeys(row["eviction"] for row in rows))
    for cache_tokens in dict.fromkeys(row["cache_tokens"] for row in rows):
        base: dict[str, float] = {}
        for eviction in evictions:
            those = [
                row
                for row in rows
                if row["cache_tokens"] == cache_tokens and row["eviction"] == eviction
            ]
            mean = {
                key: statistics.fmean(row[key] for row in those)
                for key in ("p50_ttft", "p99_ttft", "mean_ttft", "later_hit_rate", "hit_rate")
            }
            base = base or mean
            lines.append(
                f"{cache_tokens:>9}  {eviction:<12}"
                f"p50 {mean['p50_ttft']:7.3f} s ({mean['p50_ttft'] / base['p50_ttft'] - 1:+.1%})  "
                f"p99 {mean['p99_ttft']:7.3f} s ({mean['p99_ttft'] / base['p99_ttft'] - 1:+.1%})  "
                f"mean {mean['mean_ttft']:7.3f} s "
                f"({mean['mean_ttft'] / base['mean_ttft'] - 1:+.1%})  "
                f"later turns' hits {mean['later_hit_rate']:.1%}, all hits {mean['hit_rate']:.1%}"
            )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, help="Mooncake's; without it, one made up")
    parser.add_argument("--machine", choices=MACHINES, default="cpu")
    parser.add_argument("--cache-tokens", type=_numbers, default=[16_000, 32_000, 64_000])
    parser.add_argument("--keep", type=float, default=0.1, help="share of conversations")
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--length-scale", type=float, default=0.125)
    parser.add_argument("--minutes", type=float, help="of the trace; without it, all")
    parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2])
    parser.add_argument("--evictions", type=_names, default=["lru", "return-time"])
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--real", action="store_true", help="on the engine, in real time")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args(argv)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _names(text: str) -> list[str]:
    return text.split(",")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    print(describe(**settings), flush=True)
    print(HEADER)
    rows = []
    for row in measure(arguments):
        show(row)
        rows.append(row)
    print(summary(rows))
    if arguments.json:
        record = {"machine": describe(**settings).splitlines(), "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
