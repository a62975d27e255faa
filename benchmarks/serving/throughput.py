"""What batching gains: total output tokens per second at 1, 16 and 64 concurrent clients.

    python benchmarks/serving/throughput.py [--concurrency 1,16,64] [--input-len 128]
        [--output-len 128] [--repeats 3] [--require 16:3] [--json out.json] [-- SERVE OPTIONS]

One server for all; each measurement is a closed loop of `concurrency` clients that send
`--rounds` requests each, every prompt fresh, every answer to its full length. Repeats go
through the concurrencies in turn and the median is shown. `--require 16:3` fails unless 16
clients reach 3 times the throughput of the first. What follows `--` goes to `hotbatch serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import describe

from hotbatch.bench import RandomLengths, Target, random_requests, run_load, summarize
from hotbatch.bench.server_process import ServerFailedError, serving

SHOWN = (
    ("output tok/s", "output_throughput", ".1f"),
    ("TTFT p50 ms", "median_ttft_ms", ".0f"),
    ("TTFT p99 ms", "p99_ttft_ms", ".0f"),
    ("ITL p50 ms", "median_itl_ms", ".1f"),
    ("ITL p99 ms", "p99_itl_ms", ".1f"),
    ("client CPU %", "client_cpu_share", ".0%"),
)


def measure(url: str, concurrency: int, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one closed loop.

    Raises:
        RuntimeError: a request failed, which makes the figures worthless.
    """
    requests = random_requests(
        concurrency * arguments.rounds,
        input_len=RandomLengths(arguments.input_len),
        output_len=RandomLengths(arguments.output_len),
        seed=seed,
    )
    target = Target(url, model=arguments.model_name, extra_body={"temperature": 0.0})
    load = asyncio.run(run_load(target, requests, max_concurrency=concurrency))
    figures = summarize(load, percentiles=(50, 99))
    if figures["failed"]:
        raise RuntimeError(f"{figures['failed']} requests failed: {figures['first_error']}")
    wanted = len(requests) * arguments.output_len
    if figures["total_output_tokens"] != wanted:
        raise RuntimeError(f"{figures['total_output_tokens']} tokens came instead of {wanted}")
    return figures


def run(arguments: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Median figures by concurrency."""
    samples: dict[int, list[dict[str, Any]]] = {count: [] for count in arguments.concurrency}
    with serving(["--no-speculate", *arguments.serve_options]) as url:
        measure(url, max(arguments.concurrency), 2**31, _short(arguments))  # warms up
        for repeat in range(arguments.repeats):
            for count in arguments.concurrency:
                seed = 1000 * repeat + count
                samples[count].append(measure(url, count, seed, arguments))
    return {
        count: {key: statistics.median(run[key] for run in runs) for _, key, _ in SHOWN}
        for count, runs in samples.items()
    }


def _short(arguments: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**vars(arguments) | {"rounds": 1, "output_len": 8})


def show(results: dict[int, dict[str, float]]) -> None:
    print(f"{'clients':>8}" + "".join(f"{name:>14}" for name, _, _ in SHOWN) + f"{'ratio':>8}")
    for count, figures in results.items():
        cells = "".join(f"{format(figures[key], form):>14}" for _, key, form in SHOWN)
        print(f"{count:>8}{cells}{ratio(results, count):>8.2f}")


def ratio(results: dict[int, dict[str, float]], count: int) -> float:
    """Throughput of `count` clients against that of the first concurrency measured."""
    first = next(iter(results.values()))
    return results[count]["output_throughput"] / first["output_throughput"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--concurrency", type=_counts, default=[1, 16, 64], metavar="N,N,...")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=2, help="requests of each client")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model-name", default="smollm2-135m-instruct")
    parser.add_argument("--require", metavar="CLIENTS:RATIO", help="fail below this ratio")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("serve_options", nargs="*", metavar="-- SERVE OPTIONS")
    return parser.parse_args(argv)


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    print(describe(**settings), flush=True)
    try:
        results = run(arguments)
    except (ServerFailedError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(results)
    if arguments.json:
        record = {"machine": describe(**settings).splitlines(), "clients": results}
        arguments.json.write_text(json.dumps(record, indent=2))
    if arguments.require:
        count, _, least = arguments.require.partition(":")
        reached = ratio(results, int(count))
        if reached < float(least):
            print(f"too little: {count} clients reach {reached:.2f} times, not {least}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
