"""What guessing whole requests gains, on the real server over HTTP: on against off, in turn.

    python benchmarks/speculation/successors.py [--runs 3] [--warm-up 2] [--output-len 256]
        [--workloads agent,nightly,unpredictable] [--on requests] [--json out.json]
        [-- SERVE OPTIONS]

Two servers, one of which guesses (`--on` says what), take turns on the same requests. A turn begins
when neither computes any more, guesses included. The one that does not guess has a second turn
(`off again`), which tells how noisy the machine is.

- *agent*: loops of eight steps, greedy. Each step's prompt is a frame of its own around the task
  and the last answer; between the answer and the next prompt a tool takes 0.3 to 2 seconds.
- *nightly*: a job that asks for 16 entries one after another, greedy, with half a second of other
  work after every fourth; each night a quarter of the entries have changed since the last one.
- *unpredictable*: questions one after another, none of them twice, short pauses between. Nothing
  can be guessed, so nothing should change.

What the answers are is compared: both servers must give the same text to every request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from machine import describe
from quiet import until_quiet
from workloads import DATA

from hotbatch.bench.server_process import serving

_STEPS = (
    "List what has to be done for it.",
    "Name the first thing that could go wrong.",
    "Say how that can be avoided.",
    "Write a schedule for one day.",
    "Name what it will cost.",
    "Find one way to make it cheaper.",
    "Write a note to a colleague about it.",
    "Summarise all of it in two sentences.",
)
_TASKS = (
    "move a small library into a new building",
    "plant an orchard of forty apple trees",
    "repair the roof of a village school",
    "open a bakery near the railway station",
    "catalogue a collection of old maps",
    "organise a chess tournament for children",
    "clean the harbour after a storm",
    "print a book of local recipes",
)


_WORDS = ("red", "seven", "river", "often", "stone", "under", "glass", "early")


@dataclass
class Run:
    """One workload on one server: seconds by request and in all, and the answers."""

    seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)


class Client:
    """Asks one server, one request after another, and keeps the times."""

    def __init__(self, url: str, output_len: int) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=120, trust_env=False)
        self._output_len = output_len

    async def ask(self, run: Run, content: str) -> str:
        body = {
            "messages": [{"role": "user", "content": content}],
            "temperature": 0.0,
            "max_tokens": self._output_len,
        }
        started = time.perf_counter()
        response = await self.http.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        run.waits.append(time.perf_counter() - started)
        answer: str = response.json()["choices"][0]["message"]["content"]
        run.answers.append(answer)
        return answer


async def agent(client: Client, run: Run, number: int) -> None:
    """One loop. The tool's gaps are drawn anew in each, the same for both servers."""
    gaps = random.Random(number)
    task = f"{_TASKS[number % len(_TASKS)]} (case {number})"
    last = "nothing yet"
    for step, request in enumerate(_STEPS, start=1):
        last = await client.ask(
            run, f"Your task is to {task}.\n\nSo far:\n{last}\n\nStep {step}: {request}"
        )
        if step < len(_STEPS):
            await asyncio.sleep(gaps.uniform(0.3, 2.0))


async def nightly(client: Client, run: Run, number: int) -> None:
    """One night's job over the same 16 entries; a quarter of them changed since the last night."""
    lines = (DATA / "prose.txt").read_text(encoding="utf-8").splitlines()
    for entry in range(16):
        version = (number + 3 - entry % 4) // 4
        line = lines[entry % len(lines)]
        await client.ask(run, f"Entry {entry}, version {version}. Say in one sentence: {line}")
        if entry % 4 == 3:
            await asyncio.sleep(0.5)


async def unpredictable(client: Client, run: Run, number: int) -> None:
    """Questions that nobody could foresee."""
    questions = (DATA / "questions.txt").read_text(encoding="utf-8").splitlines()
    draw = random.Random(1000 + number)
    for _ in range(6):
        words = " ".join(draw.choices(_WORDS, k=5))
        await client.ask(run, f"{draw.choice(questions)} Use the words {words} {draw.random()}.")
        await asyncio.sleep(draw.uniform(0.0, 0.3))


WORKLOADS: dict[str, Callable[[Client, Run, int], Any]] = {
    "agent": agent,
    "nightly": nightly,
    "unpredictable": unpredictable,
}


async def measure(name: str, client: Client, number: int) -> Run:
    run = Run()
    started = time.perf_counter()
    await WORKLOADS[name](client, run, number)
    run.seconds = time.perf_counter() - started
    return run


async def compare(
    urls: dict[str, str], arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], str]:
    """A row for each workload; and what the guessing server says of its guesses."""
    clients = {name: Client(url, arguments.output_len) for name, url in urls.items()}
    clients["off again"] = clients["off"]
    rows = []
    for workload in arguments.workloads:
        runs: dict[str, list[Run]] = {name: [] for name in clients}
        warm_up = arguments.warm_up if workload == "agent" else 1
        for number in range(warm_up + arguments.runs):
            # Each goes first, second and last in turn.
            names = list(clients)
            order = [*names[number % 3 :], *names[: number % 3]]
            for name in order:
                for client in (clients["off"], clients["on"]):
                    await until_quiet(client.http)
                run = await measure(workload, clients[name], number)
                if number >= warm_up:
                    runs[name].append(run)
        for off, on in zip(runs["off"], runs["on"], strict=True):
            if off.answers != on.answers:
                raise RuntimeError(f"{workload}: the answers differ: speculation lost tokens")
        rows.append(_row(workload, runs))
        show(rows[-1])
    metrics = (await clients["on"].http.get("/metrics")).text
    for name in urls:
        await clients[name].http.aclose()
    return rows, metrics


def _row(workload: str, runs: dict[str, list[Run]]) -> dict[str, Any]:
    row: dict[str, Any] = {"workload": workload}
    for name, those in runs.items():
        waits = sorted(wait for run in those for wait in run.waits)
        row[name] = {
            "seconds": statistics.median(run.seconds for run in those),
            "wait_p50": waits[len(waits) // 2],
            "wait_p95": waits[int(0.95 * (len(waits) - 1))],
        }
    for name, key in (("on", "shorter"), ("off again", "noise")):
        row[key] = statistics.median(
            off.seconds / other.seconds for off, other in zip(runs["off"], runs[name], strict=True)
        )
    return row


def show(row: dict[str, Any]) -> None:
    cells = "".join(
        f"{row[name]['seconds']:>10.2f}{row[name]['wait_p50']:>9.3f}{row[name]['wait_p95']:>9.3f}"
        for name in ("off", "on")
    )
    print(f"{row['workload']:<14}{cells}{row['shorter']:>8.2f}{row['noise']:>8.2f}", flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="of each workload on each server")
    parser.add_argument("--warm-up", type=int, default=2, help="loops of the agent before")
    parser.add_argument("--output-len", type=int, default=256, help="most tokens of an answer")
    parser.add_argument(
        "--workloads", type=lambda text: text.split(","), default=list(WORKLOADS), metavar="A,B"
    )
    parser.add_argument("--on", default="requests", help="what is guessed: tokens, requests")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("serve_options", nargs="*", metavar="-- SERVE OPTIONS")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    print(describe(**settings), flush=True)
    print(
        f"{'':<14}{'off: s':>10}{'p50':>9}{'p95':>9}{'on: s':>10}{'p50':>9}{'p95':>9}"
        f"{'off/on':>8}{'again':>8}"
    )
    with ExitStack() as stack:
        options = arguments.serve_options
        urls = {
            "off": stack.enter_context(serving(["--no-speculate", *options])),
            "on": stack.enter_context(
                serving(["--speculate", "--speculate-on", arguments.on, *options])
            ),
        }
        rows, metrics = asyncio.run(compare(urls, arguments))
    for line in metrics.splitlines():
        if line.startswith("hotbatch:draft_"):
            print(line)
    if arguments.json:
        record = {"machine": describe(**settings).splitlines(), "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
