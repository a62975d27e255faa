"""The mixed day: people, agents and jobs; few clients, many, and few again. What guessing adds to
dynamic batching, in virtual time or on the real server.

    python benchmarks/speculation/mixed_day.py [--clients 5,100,5] [--seconds 300] [--seeds 0,1]
        [--machine cpu|h200] [--speculate-kv-share 0.25] [--json day.json]
    python benchmarks/speculation/mixed_day.py --real [--clients 3,24,3] [--seconds 20]
        [--output-len 96]

Both sides have the full policies. `off` guesses nothing and keeps prefixes by plain LRU, `on`
guesses next tokens, next turns and next requests and keeps prefixes by their chance to return.
Six of ten clients hold conversations at a temperature, with time to read between the turns; a
quarter are agents, greedy loops of six steps with a tool in between; the rest are jobs that ask for
the same entries again and again, of which a quarter has changed each time. Each waits for its
answer before it goes on, so whoever is served sooner asks for more.

For each part of the day and kind of client: requests that were asked for and served, `done`, and
the mean seconds that one took, `took`. The gain is off's seconds over on's, per kind, and their
geometric mean over the kinds, as no kind is worth more than another.

`--real` runs a day on a server that does not guess, the same on one that does, and once more on one
that does not (`off again`, which tells how noisy the machine is), over HTTP, with clients of the
same kinds and real text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "policies"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from machine import describe
from policy_machine import cpu, h200
from virtual_world import CLIENTS, Asked, World

MACHINES = {"cpu": cpu, "h200": h200}
KINDS = tuple(CLIENTS)
_ON = ["--speculate", "--prefix-eviction", "return-time"]  # of the real server


def kinds_of(count: int) -> list[str]:
    """Six of ten talk, a quarter are agents, the rest jobs; of five clients, one is each of the
    latter."""
    num_agents = max(1, round(0.25 * count))
    num_jobs = max(1, round(0.15 * count))
    num_talks = max(0, count - num_agents - num_jobs)
    return ["interactive"] * num_talks + ["agent"] * num_agents + ["job"] * num_jobs


def virtual_day(
    arguments: argparse.Namespace, speculates: bool, seed: int
) -> tuple[list[list[Asked]], World]:
    """What was asked in each part of the day."""
    machine = replace(MACHINES[arguments.machine](), max_num_seqs=arguments.max_num_seqs)
    share = arguments.speculate_kv_share
    world = World(machine, speculates=speculates, seed=seed, ahead_kv_share=share)
    parts = arguments.clients
    seconds = arguments.seconds

    def enter(kind: str, number: int, end: float) -> Callable[[], None]:
        # A tenant has ten clients at most: habits and answers are its own.
        tenant = f"{kind}-{number // 10}"
        return lambda: CLIENTS[kind](world, seed * 1000 + number, tenant, lambda: end)

    for kind, number, first, last in presence(parts):
        world.run.at(first * seconds + 0.05 * number, enter(kind, number, (last + 1) * seconds))
    world.run.run()
    world.scheduler.check_integrity()
    return [
        world.tally.of(None, part * seconds, (part + 1) * seconds) for part in range(len(parts))
    ], world


def presence(parts: Sequence[int]) -> list[tuple[str, int, int, int]]:
    """Kind, number among its kind, and first and last part of the day of each client. Who was
    there before stays as long as there are as many of its kind."""
    clients = []
    counts = [kinds_of(count) for count in parts]
    for part, kinds in enumerate(counts):
        for kind in KINDS:
            before = counts[part - 1].count(kind) if part else 0
            for number in range(before, kinds.count(kind)):
                last = part
                while last + 1 < len(parts) and counts[last + 1].count(kind) > number:
                    last += 1
                clients.append((kind, number, part, last))
    return clients


def figures(parts: Sequence[Sequence[Asked]]) -> list[dict[str, Any]]:
    rows = []
    for part, asked in enumerate(parts):
        for kind in KINDS:
            those = [one for one in asked if one.kind == kind]
            if not those:
                continue
            firsts = sorted(one.first - one.arrival for one in those)
            rows.append(
                {
                    "part": part,
                    "kind": kind,
                    "done": len(those),
                    "took": statistics.fmean(one.end - one.arrival for one in those),
                    "ttft_mean": statistics.fmean(firsts),
                    "ttft_p95": firsts[int(0.95 * (len(firsts) - 1))],
                    "tokens": sum(one.num_tokens for one in those),
                }
            )
    return rows


def compare(
    off: Sequence[dict[str, Any]], on: Sequence[dict[str, Any]], clients: Sequence[int]
) -> tuple[list[str], dict[str, float]]:
    """Lines of a table, and the gains by kind and in all."""
    lines = [
        f"{'clients':>8}  {'kind':<12}{'off: done':>10}{'took s':>8}{'1st p95':>9}"
        f"{'on: done':>10}{'took s':>8}{'1st p95':>9}{'gain':>7}"
    ]
    took: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for one, other in zip(off, on, strict=True):
        assert (one["part"], one["kind"]) == (other["part"], other["kind"])
        took[one["kind"]].append((one["took"], other["took"]))
        lines.append(
            f"{clients[one['part']]:>8}  {one['kind']:<12}{one['done']:>10}{one['took']:>8.2f}"
            f"{one['ttft_p95']:>9.2f}{other['done']:>10}{other['took']:>8.2f}"
            f"{other['ttft_p95']:>9.2f}{one['took'] / other['took']:>7.2f}"
        )
    gains = {
        kind: exp(statistics.fmean(log(one / other) for one, other in pairs))
        for kind, pairs in took.items()
        if pairs
    }
    gains["all"] = exp(statistics.fmean(map(log, gains.values())))
    tokens = [sum(row["tokens"] for row in rows) for rows in (off, on)]
    gains["tokens"] = tokens[1] / tokens[0]
    return lines, gains


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=_numbers, default=[5, 100, 5])
    parser.add_argument("--seconds", type=float, default=300.0, help="each part of the day")
    parser.add_argument("--seeds", type=_numbers, default=[0, 1])
    parser.add_argument("--machine", choices=MACHINES, default="cpu")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--speculate-kv-share", type=float, default=0.25, help="not with --real")
    parser.add_argument("--real", action="store_true", help="on two servers, over HTTP")
    parser.add_argument("--output-len", type=int, default=96, help="most tokens of a real answer")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args(argv)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    print(describe(**settings), flush=True)
    record: list[dict[str, Any]] = []
    if arguments.real:
        from real_day import real_day

        sides = {
            "off": figures(real_day(arguments, presence, ["--no-speculate"])),
            "on": figures(real_day(arguments, presence, _ON)),
        }
        record.append(show(0, sides, arguments))
        again = figures(real_day(arguments, presence, ["--no-speculate"]))
        print("\noff again, in place of on")
        record.append(show(0, {"off": sides["off"], "on": again}, arguments))
    for seed in () if arguments.real else arguments.seeds:
        sides = {}
        for name, speculates in (("off", False), ("on", True)):
            parts, world = virtual_day(arguments, speculates, seed)
            sides[name] = figures(parts)
            if speculates:
                for distance, account in world.scheduler.stats().guesses.items():
                    print(
                        f"{distance:>10}: {account.attempted} tokens, {account.accepted} right, "
                        f"{account.seconds_spent:.1f} s spent, {account.seconds_saved:.1f} s saved"
                    )
        record.append(show(seed, sides, arguments))
    if arguments.json:
        done = {"machine": describe(**settings).splitlines(), "days": record}
        arguments.json.write_text(json.dumps(done, indent=1))
    return 0


def show(
    seed: int, sides: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace
) -> dict[str, Any]:
    lines, gains = compare(sides["off"], sides["on"], arguments.clients)
    print("\n".join(lines))
    print(
        "gain in time: "
        + ", ".join(f"{name} {gain:.2f}" for name, gain in gains.items() if name != "tokens")
        + f"; tokens given {gains['tokens']:.2f} times",
        flush=True,
    )
    return {"seed": seed, "sides": sides, "gains": gains}


if __name__ == "__main__":
    sys.exit(main())
