"""Staged situations on a real server over HTTP, each with the promise that it must keep.

    python benchmarks/policies/scenarios.py [--only urgent,long,tenants,overload]
        [--url http://host:port --pid PID] [--json out.json] [--brief] [-- SERVE OPTIONS]

urgent    32 bulk requests decode and more wait; 20 interactive ones come one by one. Their
          first token against an idle server, and what the bulk loses.
long      A prompt of 4,000 tokens comes while 8 clients decode: the longest gap of the 8
          against their usual one, the prompt's first token against the machine alone.
tenants   Two tenants, one with ten times the load of the other: the small one's latency
          against being alone; the service gap while both always have something waiting.
overload  Ten times what the server manages, for a minute: every request answered or refused
          with Retry-After, memory, how soon latency is normal again, the batch class meanwhile.

Without --url a server is started for each, with the options that the situation needs; what
follows `--` is added. The client shares the machine with the server: its CPU time is printed.
--brief shortens everything, to try it out.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import describe
from scenario_parts import (
    Check,
    Crowd,
    Report,
    UsualGap,
    longest_gap,
    median,
    moments,
    must,
    percentile,
    rate_between,
    requests,
    resident_mb,
    talkers,
)

from hotbatch.bench.arguments import parse_classes
from hotbatch.bench.client import Target
from hotbatch.bench.server_process import SERVE, ServerFailedError, server_process
from hotbatch.bench.session import wait_until_ready
from hotbatch.bench.workload import BenchRequest, assigned


async def urgent(target: Target, pid: int | None, scale: float) -> Report:
    """Interactive requests before, and among, bulk work."""
    report = Report("urgent: 20 interactive requests among 32 bulk ones that decode")
    count, seconds = 20, 0.75
    prompt, output = 128, 32

    def ask(seed: int) -> list[BenchRequest]:
        return requests(count, prompt, output, seed=seed, service_class="interactive")

    async with Crowd(target) as crowd:
        idle = must([await crowd.ask(request) for request in ask(1)])
    async with Crowd(target) as crowd:
        bulk = requests(4000, 128, 512, seed=2, service_class="batch")
        crowd.keep_busy(itertools.cycle(bulk), 64)
        await _until_tokens(crowd, 32)
        await asyncio.sleep(2.0 * scale)
        begin = time.perf_counter()
        await asyncio.sleep(15.0 * scale)
        middle = time.perf_counter()
        tasks = []
        for request in ask(3):
            tasks.append(crowd.start(request))
            await asyncio.sleep(seconds * scale)
        busy = must([await task for task in tasks])
        end = time.perf_counter()
        times = crowd.token_times("batch")
    alone = rate_between(times, begin, middle)
    meanwhile = rate_between(times, middle, end)
    own = count * (prompt + output) / (end - middle)
    share = own / (own + alone)
    p99_idle = percentile([record.ttft for record in idle], 99)
    p99_busy = percentile([record.ttft for record in busy], 99)
    report.figures = {
        "first token on an idle server, p50 ms": 1e3 * median([r.ttft for r in idle]),
        "first token on an idle server, p99 ms": 1e3 * p99_idle,
        "first token among the bulk, p50 ms": 1e3 * median([r.ttft for r in busy]),
        "first token among the bulk, p99 ms": 1e3 * p99_busy,
        "bulk alone, tokens per second": alone,
        "bulk meanwhile, tokens per second": meanwhile,
        "share of all tokens that were interactive": share,
        "share of its throughput that the bulk lost": 1.0 - meanwhile / alone,
    }
    report.checks = [
        Check("first token, p99, times idle", p99_busy / p99_idle, 3.0),
        Check("bulk throughput lost", 1.0 - meanwhile / alone, share + 0.03),
    ]
    return report


async def long(target: Target, pid: int | None, scale: float) -> Report:
    """A long prompt beside requests that decode."""
    report = Report("long: a prompt of 4,000 tokens while 8 clients decode")
    size = max(64, int(4000 * scale))
    alone, beside, usual, longest, noise, within = [], [], [], [], [], []
    shown = []
    for repeat in range(3):
        first, second = requests(2, size, 8, seed=10 + repeat)
        async with Crowd(target) as crowd:
            alone.append(must([await crowd.ask(first)])[0].ttft)
        async with Crowd(target) as crowd:
            crowd.keep_busy(itertools.cycle(talkers(64, 64, 1000, seed=20 + repeat)), 8)
            await _until_tokens(crowd, 8)
            await asyncio.sleep(0.5)
            begin = time.perf_counter()
            await asyncio.sleep(3.0 * scale)
            middle = time.perf_counter()
            record = must([await crowd.ask(second)])[0]
            end = record.started + record.ttft
            await asyncio.sleep(3.0 * scale)
            last = time.perf_counter()
            eight = [record for record in crowd.records if record.request.prompt_len == 64]
        beside.append(record.ttft)
        before, after = _gaps(eight, begin, middle), _gaps(eight, end + 0.2, last)
        near = scale  # seconds on either side
        usual_then = UsualGap(
            (middle, median([gap for gap, _ in _gaps(eight, middle - near, middle)])),
            (end, median([gap for gap, _ in _gaps(eight, end + 0.2, end + 0.2 + near)])),
        )
        usual += [gap for gap, _ in before + after]
        gaps = _gaps(eight, middle, end)
        longest.append(max(gaps))
        times = [usual_then.times(gap, moment) for gap, moment in gaps]
        within += times
        # As many of those beside no prompt, against their own second.
        noise.append(
            max(
                max(gap for gap, _ in side) / median([gap for gap, _ in side])
                for side in (before[-len(gaps) :], after[: len(gaps)])
            )
        )
        shown.append(
            {
                "usual before": 1e3 * usual_then.before[1],
                "usual after": 1e3 * usual_then.after[1],
                "longest": 1e3 * longest[-1][0],
                "times usual": max(times),
                "without a prompt": noise[-1],
            }
        )
    usual_gap = median(usual)
    times_usual = [row["times usual"] for row in shown]
    report.figures = {
        "usual gap of the 8 on both sides, p50, p99 ms": _pair(usual),
        "usual gap just before the prompt, ms": [round(row["usual before"], 1) for row in shown],
        "usual gap just after it, ms": [round(row["usual after"], 1) for row in shown],
        "longest gap beside the prompt, ms": [round(row["longest"], 1) for row in shown],
        "the same, times the usual one of that moment": [round(times, 2) for times in times_usual],
        "the same without a prompt": [round(times, 2) for times in noise],
        "longest, times the median of both sides": median([gap for gap, _ in longest]) / usual_gap,
        "gaps beside the prompt, p50, times usual": median(within),
        "gaps beside the prompt, p95, times usual": percentile(within, 95),
        "first token of the prompt alone, ms": 1e3 * median(alone),
        "first token of the prompt beside the 8, ms": 1e3 * median(beside),
    }
    report.checks = [
        Check("longest gap of the 8, times usual", median(times_usual), 2.5),
        Check("first token of the prompt, times alone", median(beside) / median(alone), 2.0),
    ]
    return report


async def tenants(target: Target, pid: int | None, scale: float) -> Report:
    """A small tenant beside one that sends ten times as much."""
    report = Report("tenants: one sends ten times the load of the other")
    prompt, output, seconds = 128, 128, max(3.0, 40.0 * scale)
    async with Crowd(target) as crowd:  # what the server manages
        crowd.keep_busy(itertools.cycle(requests(2000, prompt, output, seed=30)), 24)
        await _until_tokens(crowd, 8)
        await asyncio.sleep(1.0)
        begin = time.perf_counter()
        await asyncio.sleep(max(2.0, 10.0 * scale))
        capacity = rate_between(crowd.token_times(), begin, time.perf_counter()) / output
    small_rate = 0.12 * capacity  # with ten times as much beside it: 1.3 times saturation

    async def run(with_large: bool) -> list[Any]:
        async with Crowd(target) as crowd:
            # At the same moments, but prompts of its own: kept ones would help the second time.
            asked = requests(_count(small_rate, seconds), prompt, output,
                             seed=34 if with_large else 31, tenant="small")  # fmt: skip
            tasks = crowd.at_rate(asked, small_rate, 31)
            if with_large:
                crowd.at_rate(requests(_count(10 * small_rate, seconds), prompt, output, seed=32,
                         tenant="large"), 10 * small_rate, 32)  # fmt: skip
            return list(must([await task for task in tasks]))

    alone = await run(False)
    beside = await run(True)

    async with Crowd(target) as crowd:  # both always have something waiting
        for name, clients in (("large", 40), ("small", 16)):
            supply = itertools.cycle(requests(2000, prompt, output, seed=33, tenant=name))
            crowd.keep_busy(supply, clients)
        await _until_tokens(crowd, 8)
        await asyncio.sleep(2.0)
        begin = time.perf_counter()
        await asyncio.sleep(max(2.0, 15.0 * scale))
        end = time.perf_counter()
        service = {
            name: sum(begin <= moment < end for moment in crowd.token_times(tenant=name))
            for name in ("small", "large")
        }
    gap = 2 * abs(service["small"] - service["large"])  # an output token counts twice
    bound = 2 * max(prompt, 2 * 8 * (prompt + output))
    latency = {name: [r.latency for r in records] for name, records in
               (("alone", alone), ("beside", beside))}  # fmt: skip
    report.figures = {
        "requests per second that the server manages": capacity,
        "small tenant, requests per second": small_rate,
        "small alone: first token p50, p99 ms": _pair([r.ttft for r in alone]),
        "small beside large: first token p50, p99 ms": _pair([r.ttft for r in beside]),
        "small alone: whole answer p50, p99 ms": _pair(latency["alone"]),
        "small beside large: whole answer p50, p99 ms": _pair(latency["beside"]),
        "both backlogged: output tokens of each": service,
    }
    report.checks = [
        Check(
            "small tenant's whole answer, p50, times alone",
            median(latency["beside"]) / median(latency["alone"]),
            1.5,
        ),
        Check("service gap of backlogged tenants, weighted tokens", float(gap), float(bound)),
    ]
    return report


async def overload(target: Target, pid: int | None, scale: float) -> Report:
    """Far too much for a minute, then nothing."""
    report = Report("overload: ten times saturation for a minute")
    prompt, output, seconds = 128, 32, max(4.0, 60.0 * scale)
    probe = requests(400, prompt, output, seed=40, service_class="interactive")
    async with Crowd(target) as crowd:
        idle = must([await crowd.ask(request) for request in probe[:10]])
    async with Crowd(target) as crowd:
        crowd.keep_busy(itertools.cycle(requests(2000, prompt, output, seed=41)), 48)
        await _until_tokens(crowd, 16)
        begin = time.perf_counter()
        await asyncio.sleep(max(2.0, 8.0 * scale))
        capacity = rate_between(crowd.token_times(), begin, time.perf_counter()) / output
    await asyncio.sleep(1.0)
    before = resident_mb(pid)
    rate = 10.0 * capacity
    asked = assigned(
        requests(_count(rate, seconds), prompt, output, seed=42),
        classes=parse_classes("interactive=0.5,standard=0.3,batch=0.2", []),
        seed=42,
    )
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    peak = before
    async with Crowd(target) as crowd:
        begin = time.perf_counter()
        tasks = crowd.at_rate(asked, rate, 42)
        while time.perf_counter() < begin + seconds:
            await asyncio.sleep(0.5)
            peak = max(peak or 0.0, resident_mb(pid) or 0.0)
        end = time.perf_counter()
        normal = 1.5 * percentile([record.ttft for record in idle], 90)
        recovered = await _time_to_normal(crowd, probe[10:], end, normal)
        await asyncio.wait(tasks, timeout=120.0)
        lost = sum(not task.done() for task in tasks)
        records = [task.result() for task in tasks if task.done()]
        elapsed = time.perf_counter() - begin
        batch = sorted(
            moment for r in records if r.request.service_class == "batch" for moment in moments(r)
        )
    used = resource.getrusage(resource.RUSAGE_SELF)
    client_cpu = used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime
    await asyncio.sleep(2.0)
    after = resident_mb(pid)
    kinds = Counter(record.failure_kind or "answered" for record in records)
    unhandled = lost + sum(
        record.error is not None
        and not (record.status in (429, 503) and record.retry_after is not None)
        for record in records
    )
    silence = longest_gap(batch, begin, end) if batch else seconds
    good = [record for record in records if record.is_success]
    report.figures = {
        "requests per second that the server manages": capacity,
        "sent, and how they ended": {"sent": len(tasks), **kinds},
        "answered by class": dict(Counter(r.request.service_class for r in good)),
        "interactive first token p50, p99 ms": _pair(
            [r.ttft for r in good if r.request.service_class == "interactive"]
        ),
        "memory before, at most, after, MB": [before, peak, after],
        "latency normal again after, s": recovered,
        "longest silence of the batch class, s": silence,
        "client CPU, share of one core": client_cpu / elapsed,
    }
    report.checks = [
        Check("requests neither answered nor refused with Retry-After", float(unhandled), 0.0),
        Check("latency normal again", recovered, 5.0, " s"),
        Check("longest silence of the batch class", silence, 10.0, " s"),
    ]
    if before is not None and after is not None:
        report.checks.append(Check("memory grown", after - before, 64.0, " MB"))
    return report


async def _time_to_normal(
    crowd: Crowd, probe: Sequence[BenchRequest], since: float, normal: float
) -> float:
    """Seconds until a first token comes as soon as on an idle server, three times in a row."""
    in_a_row = 0
    for request in probe:
        sent = time.perf_counter()
        record = await crowd.ask(request)
        in_a_row = in_a_row + 1 if record.is_success and record.ttft <= normal else 0
        if in_a_row == 1:
            first = sent
        if in_a_row == 3:
            return first - since
        if time.perf_counter() - since > 60.0:
            break
        await asyncio.sleep(0.1)
    return float("inf")


def _count(rate: float, seconds: float) -> int:
    return max(3, round(rate * seconds))


async def _until_tokens(crowd: Crowd, count: int, patience: float = 120.0) -> None:
    """Waits until so many requests have got a token."""
    deadline = time.perf_counter() + patience
    while sum(bool(record.raw or record.chunk_times) for record in crowd.records) < count:
        if time.perf_counter() > deadline:
            raise RuntimeError(f"fewer than {count} requests run after {patience:.0f} s")
        await asyncio.sleep(0.05)


def _gaps(records: Sequence[Any], begin: float, end: float) -> list[tuple[float, float]]:
    """Gaps between a request's tokens, of those that end between two moments, each with its end."""
    return [
        (later - earlier, later)
        for record in records
        for earlier, later in itertools.pairwise(moments(record))
        if begin <= later < end
    ] or [(float("inf"), begin)]


def _pair(values: Sequence[float]) -> list[float]:
    return [round(1e3 * percentile(values, percent), 1) for percent in (50, 99)]


Scenario = Callable[[Target, "int | None", float], Coroutine[Any, Any, Report]]
SCENARIOS: dict[str, tuple[Scenario, list[str]]] = {
    "urgent": (urgent, ["--max-num-seqs", "32"]),
    "long": (long, []),
    "tenants": (tenants, ["--max-num-seqs", "8"]),
    # What an owner who wants this would say: seats up to the knee, and nobody waits long in vain.
    "overload": (
        overload,
        ["--max-num-seqs", "32", "--max-queue-wait", "1", "--max-queue-requests", "64"],
    ),
}


async def stage(scenario: Scenario, url: str, pid: int | None, scale: float) -> Report:
    target = Target(url, model="", extra_body={"temperature": 0.0})
    (trial,) = requests(1, 32, 4, seed=0)
    target = await wait_until_ready(target, trial, 60.0)
    async with Crowd(target) as crowd:  # warms up
        warm = [crowd.start(request) for request in requests(16, 128, 16, seed=5)]
        must([await task for task in warm])
    gc.collect()
    gc.disable()  # a collection of all that was heard so far would look like a gap
    return await scenario(replace(target), pid, scale)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--only", type=names, default=list(SCENARIOS))
    parser.add_argument("--url", help="a running server; else one is started for each")
    parser.add_argument("--pid", type=int, help="of that server, for its memory")
    parser.add_argument("--brief", action="store_true", help="short, to try it out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("serve_options", nargs="*", metavar="-- SERVE OPTIONS")
    arguments = parser.parse_args(argv)
    for name in arguments.only:
        if name not in SCENARIOS:
            parser.error(f"--only knows {', '.join(SCENARIOS)}, not {name!r}")
    return arguments


def main(argv: Sequence[str] | None = None, command: Sequence[str] = SERVE) -> int:
    arguments = parse(argv)
    print(describe(**{key: value for key, value in vars(arguments).items() if key != "json"}))
    scale = 0.1 if arguments.brief else 1.0
    reports = []
    for name in arguments.only:
        scenario, options = SCENARIOS[name]
        try:
            if arguments.url:
                report = asyncio.run(stage(scenario, arguments.url, arguments.pid, scale))
            else:
                # The same prompts come before and during: kept answers must not serve them.
                plain = ["--no-speculate", *options, *arguments.serve_options]
                with server_process(plain, command=command) as server:
                    report = asyncio.run(stage(scenario, server.url, server.pid, scale))
        except (ServerFailedError, RuntimeError) as error:
            print(f"error in {name}: {error}", file=sys.stderr)
            return 1
        print(report.text(), flush=True)
        reports.append(report)
    if arguments.json:
        record = {
            "machine": describe().splitlines(),
            "scenarios": [report.record() for report in reports],
        }
        arguments.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return 0 if all(report.is_passed for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
