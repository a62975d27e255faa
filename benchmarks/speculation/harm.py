"""What guessing costs where nothing can be gained: a machine that has more to do than it can.

    python benchmarks/speculation/harm.py [--requests 400] [--loads 0.9,1.2] [--seeds 0,1,2]
        [--machine cpu|h200] [--json harm.json]
    python benchmarks/speculation/harm.py --real [--requests 120] [--loads 1.2] [--runs 3]
        [-- SERVE OPTIONS]

Questions that nobody could foresee, of 40 to 200 tokens, at a temperature and with answers of
random length, come at random moments: `--loads` times as many a second as the machine serves when
all are there from the beginning, without guesses; at a load of 0, all are there from the
beginning. `off` guesses nothing, `on` at all three distances. Throughput is tokens over the time
from the first arrival to the last end; the time to the first token has its waiting in it.

In virtual time both sides see the same moments, and steps take the same times. `--real` asks two
servers in turn over HTTP, with a second run of `off` (`off again`) that tells how noisy the
machine is. A turn begins when neither computes any more, guesses included. The table has the
medians of the runs. What counts are the ratios run by run: `on` stands between `off` and `off
again` and is held against the mean of both, so that a machine that becomes faster or slower
meanwhile favours nobody. Of these ratios the mean is told, and its standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import exp, inf, log, sqrt
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "policies"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import httpx
from machine import describe
from policy_machine import cpu, h200
from quiet import until_quiet
from virtual_world import World, typed
from workloads import DATA

from hotbatch.bench.server_process import serving

MACHINES = {"cpu": cpu, "h200": h200}
Figures = dict[str, float]


def figures(firsts: Sequence[float], num_tokens: int, seconds: float) -> Figures:
    ordered = sorted(firsts)
    return {
        "tok_per_s": num_tokens / seconds,
        "requests_per_s": len(ordered) / seconds,
        "ttft_mean": statistics.fmean(ordered),
        "ttft_p50": ordered[len(ordered) // 2],
        "ttft_p99": ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)],
    }


def moments(count: int, rate: float | None, seed: int) -> list[float]:
    """Arrivals; all at once without a rate."""
    draw = random.Random(f"moments {seed}")
    at, result = 0.0, []
    for _ in range(count):
        result.append(at)
        at += draw.expovariate(rate) if rate else 0.0
    return result


# ---- in virtual time


def virtual(
    arguments: argparse.Namespace, speculates: bool, rate: float | None, seed: int
) -> tuple[Figures, World]:
    machine = replace(MACHINES[arguments.machine](), max_num_seqs=arguments.max_num_seqs)
    world = World(machine, speculates=speculates, seed=seed)
    draw = random.Random(seed)
    for at in moments(arguments.requests, rate, seed):
        world.ask(
            "question",
            typed(draw, draw.randint(40, 200)),
            lambda answer: None,
            at=at,
            tenant=f"tenant {draw.randrange(8)}",
            temperature=0.8,
            max_tokens=draw.randint(16, 128),
        )
    world.run.run()
    world.scheduler.check_integrity()
    asked = world.tally.asked
    seconds = max(one.end for one in asked) - min(one.arrival for one in asked)
    return (
        figures(
            [one.first - one.arrival for one in asked],
            sum(one.num_tokens for one in asked),
            seconds,
        ),
        world,
    )


def measure_virtual(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for seed in arguments.seeds:
        capacity = virtual(arguments, False, None, seed)[0]["requests_per_s"]
        for load in arguments.loads:
            sides = {}
            for name, speculates in (("off", False), ("on", True)):
                sides[name], world = virtual(arguments, speculates, load * capacity or None, seed)
            rows.append({"load": load, "seed": seed, "sides": sides})
            show(rows[-1])
            accounts = world.scheduler.stats().guesses.items()
            print(
                "   guesses: "
                + ", ".join(f"{name} {a.attempted} ({a.accepted} right)" for name, a in accounts),
                flush=True,
            )
    return rows


# ---- on the real server


def question(draw: random.Random, case: int) -> tuple[str, int]:
    """Something that was never asked, and how long its answer may be. Those of different cases
    share no beginning, so that nobody finds the prompts of another turn cached."""
    questions = (DATA / "questions.txt").read_text(encoding="utf-8").splitlines()
    words = " ".join(str(draw.randrange(10_000)) for _ in range(draw.randint(5, 50)))
    return f"{case}. {draw.choice(questions)} Mind these numbers: {words}.", draw.randint(16, 96)


async def ask(
    client: httpx.AsyncClient, content: str, most: int, at: float, begin: float
) -> tuple[float, int, float]:
    """Seconds to the first token since it was due, tokens, and the moment of the end."""
    await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
    body = {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0.8,
        "max_tokens": most,
        "ignore_eos": True,
        "stream": True,
    }
    first = None
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if first is None and '"content":"' in line and '"content":""' not in line:
                first = time.perf_counter() - begin - at
    end = time.perf_counter() - begin
    return (end - at if first is None else first), most, end


async def crowd(
    url: str, arguments: argparse.Namespace, rate: float | None, seed: int, case: int
) -> Figures:
    draw = random.Random(f"real {seed}")
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, timeout=300, trust_env=False, limits=limits
    ) as client:
        begin = time.perf_counter() + 0.2
        outcomes = await asyncio.gather(
            *(
                ask(client, *question(draw, case), at, begin)
                for at in moments(arguments.requests, rate, seed)
            )
        )
        await until_quiet(client)
    firsts, counts, ends = zip(*outcomes, strict=True)
    return figures(firsts, sum(counts), max(ends))


def measure_real(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with ExitStack() as stack:
        options = arguments.serve_options
        urls = {
            "off": stack.enter_context(serving(["--no-speculate", *options])),
            "on": stack.enter_context(serving(["--speculate", *options])),
        }
        urls["off again"] = urls["off"]
        for name in ("off", "on"):  # their cost models learn, and nothing that is asked again
            asyncio.run(crowd(urls[name], arguments, None, 1000, 100))
        capacity = asyncio.run(crowd(urls["off"], arguments, None, 999, 101))["requests_per_s"]
        for load in arguments.loads:
            runs: dict[str, list[Figures]] = {name: [] for name in urls}
            for number in range(arguments.runs):
                for name in list(urls)[:: 1 if number % 2 else -1]:
                    rate = load * capacity or None
                    case = 200 + 10 * number + list(urls).index(name)
                    runs[name].append(asyncio.run(crowd(urls[name], arguments, rate, number, case)))
            sides = {
                name: {key: statistics.median(run[key] for run in those) for key in those[0]}
                for name, those in runs.items()
            }
            rows.append({"load": load, "seed": 0, "sides": sides, "runs": runs})
            show(rows[-1])
            show_ratios("on / off", runs["on"], runs["off"], runs["off again"])
            show_ratios("off again / off", runs["off again"], runs["off"])
        metrics = httpx.get(f"{urls['on']}/metrics", trust_env=False).text
    for line in metrics.splitlines():
        if line.startswith("hotbatch:draft_"):
            print(line)
    return rows


def show_ratios(name: str, ones: Sequence[Figures], *others: Sequence[Figures]) -> None:
    """Run by run, one side against the mean of others: the mean ratio and its standard error."""
    words = []
    for key in ("tok_per_s", "ttft_p50", "ttft_p99"):
        ratios = [
            log(one[key] / statistics.geometric_mean(other[key] for other in those))
            for one, *those in zip(ones, *others, strict=True)
        ]
        error = statistics.stdev(ratios) / sqrt(len(ratios)) if len(ratios) > 1 else inf
        words.append(f"{key} {exp(statistics.fmean(ratios)):.3f} +- {error:.3f}")
    print(f"   {name}, run by run: {', '.join(words)}", flush=True)


def show(row: dict[str, Any]) -> None:
    off = row["sides"]["off"]
    for name, side in row["sides"].items():
        print(
            f"{row['load']:>6.2f}{row['seed']:>5}  {name:<10}{side['tok_per_s']:>9.1f}"
            f"{side['ttft_p50']:>9.3f}{side['ttft_p99']:>9.3f}"
            f"{side['tok_per_s'] / off['tok_per_s']:>12.3f}"
            f"{side['ttft_p50'] / off['ttft_p50']:>9.3f}{side['ttft_p99'] / off['ttft_p99']:>9.3f}",
            flush=True,
        )


def show_means(rows: Sequence[dict[str, Any]]) -> None:
    """Of the seeds of each load, the geometric mean of the ratios: a 99th percentile of some
    hundred requests is the fate of a few of them, and strays in a seed."""
    for load in sorted({row["load"] for row in rows}):
        sides = [row["sides"] for row in rows if row["load"] == load]
        ratios = (
            statistics.geometric_mean(side["on"][key] / side["off"][key] for side in sides)
            for key in ("tok_per_s", "ttft_p50", "ttft_p99")
        )
        words = "{:>12.3f}{:>9.3f}{:>9.3f}".format(*ratios)
        print(f"{load:>6.2f} all  {'on':<10}{'':>27}{words}", flush=True)


HEADER = (
    f"{'load':>6}{'seed':>5}  {'':<10}{'tok/s':>9}{'1st p50':>9}{'1st p99':>9}"
    f"{'/ off: tok/s':>12}{'p50':>9}{'p99':>9}"
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--loads", type=_floats, default=[0.9, 1.2])
    parser.add_argument("--seeds", type=_ints, default=[0, 1, 2])
    parser.add_argument("--machine", choices=MACHINES, default="cpu")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--real", action="store_true", help="on two servers, over HTTP")
    parser.add_argument("--runs", type=int, default=3, help="real ones of each")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("serve_options", nargs="*", metavar="-- SERVE OPTIONS")
    return parser.parse_args(argv)


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    print(describe(**settings), flush=True)
    print(HEADER)
    rows = measure_real(arguments) if arguments.real else measure_virtual(arguments)
    if not arguments.real:
        show_means(rows)
    if arguments.json:
        record = {"machine": describe(**settings).splitlines(), "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
