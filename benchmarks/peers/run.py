"""hotbatch against its peers: the same workloads, the same client, one server at a time.

    python benchmarks/peers/run.py [--peers hotbatch,vllm-w8a8] [--repeats 3]
        [--workloads 128x128@1,16,32,64 512x128@16,64] [--time-limit 7200]

In each repeat every peer in turn is started, warmed up, measured at all workloads and ended;
the next repeat goes through them in the opposite order, so that a machine that drifts favours
nobody. A peer that fails is reported in the table and does not end the run. Results are saved
after every measurement; `--table-only RESULTS.json` writes the table again from them.

Prompts are random token ids, fresh for each repeat, the same for all peers. The load generator
is that of `hotbatch bench serve`, in this process; OpenVINO GenAI, which has no server, runs
its own loop in process, without HTTP, which favours it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from peer_catalog import DEFAULT_PEERS, PEERS, Peer, Workload, is_measured, parse_workloads
from peer_models import MODELS, peers_root
from peer_process import PeerFailedError, PeerProcess
from peer_table import markdown, write_section

from hotbatch import __version__
from hotbatch.bench import RandomLengths, Target, random_requests, run_load, summarize
from hotbatch.bench.workload import BenchRequest

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
DEFAULT_WORKLOADS = ["128x128@1,16,32,64", "512x128@16,64"]
MIN_REQUESTS = 8
WARM_UP_OUTPUT = 8
# A rate below this means that the peer hangs: no measurement waits longer.
_SLOWEST_TOKENS_PER_SECOND = 4.0


@dataclass(frozen=True)
class PeerTarget(Target):
    """A target with the headers that a peer needs."""

    peer_headers: tuple[tuple[str, str], ...] = ()

    @property
    def headers(self) -> dict[str, str]:
        return dict(self.peer_headers)


@dataclass(frozen=True)
class Clock:
    """The time that is left for all measurements."""

    deadline: float

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()


def requests_of(workload: Workload, waves: int, seed: int) -> list[BenchRequest]:
    return random_requests(
        max(MIN_REQUESTS, waves * workload.clients),
        input_len=RandomLengths(workload.prompt),
        output_len=RandomLengths(workload.output),
        seed=seed,
    )


def warm_up_of(workload: Workload, seed: int) -> list[BenchRequest]:
    """One short answer for each client: caches, compiled shapes and connections are ready."""
    return random_requests(
        workload.clients,
        input_len=RandomLengths(workload.prompt),
        output_len=RandomLengths(WARM_UP_OUTPUT),
        seed=seed,
    )


def measure(
    process: PeerProcess, workload: Workload, *, waves: int, seed: int, limit: float
) -> dict[str, Any]:
    """The figures of one workload.

    Raises:
        PeerFailedError: it took longer than `limit` seconds, or the peer's process ended.
    """
    warm_up, requests = warm_up_of(workload, seed + 1), requests_of(workload, waves, seed)
    tokens = sum(request.prompt_len // 8 + request.output_len for request in requests)
    limit = min(limit, 120.0 + tokens / _SLOWEST_TOKENS_PER_SECOND)
    if process.peer.is_in_process:
        process.ask(_job(warm_up, workload), limit)
        return process.ask(_job(requests, workload), limit)
    target = PeerTarget(
        base_url=process.url,
        model=process.served_name(),
        extra_body={"temperature": 0.0},
        peer_headers=tuple(process.peer.headers.items()),
    )

    async def run() -> dict[str, Any]:
        await run_load(target, warm_up, max_concurrency=workload.clients)
        load = await run_load(target, requests, max_concurrency=workload.clients)
        return summarize(load)

    try:
        figures = asyncio.run(asyncio.wait_for(run(), limit))
    except TimeoutError:
        raise PeerFailedError(f"not done after {limit:.0f} s") from None
    if not figures["completed"]:
        raise PeerFailedError(f"all requests failed: {figures['first_error']}")
    return figures


def _job(requests: Sequence[BenchRequest], workload: Workload) -> dict[str, Any]:
    return {
        "prompts": [list(request.prompt) for request in requests],
        "output_len": requests[0].output_len,
        "clients": workload.clients,
    }


# ---- the run


def measure_peer(
    peer: Peer,
    workloads: Sequence[Workload],
    repeat: int,
    options: argparse.Namespace,
    clock: Clock,
) -> list[dict[str, Any]]:
    """One start of a peer and all its workloads; failures become entries, never exceptions."""
    runs: list[dict[str, Any]] = []

    def note(workload: Workload, **outcome: Any) -> None:
        runs.append({"peer": peer.name, "workload": workload.label, "repeat": repeat, **outcome})
        _progress(runs[-1], clock)

    logs = options.output.parent / f"{options.output.stem}-logs"
    started = time.monotonic()
    rest = list(workloads)
    try:
        with PeerProcess(
            peer, options.model, options.threads, logs / f"{peer.name}.log"
        ) as process:
            process.wait_until_ready(min(peer.patience, max(1.0, clock.left)))
            seconds_to_start = time.monotonic() - started
            while rest and clock.left > 0:
                workload = rest[0]
                figures = measure(
                    process,
                    workload,
                    waves=options.waves,
                    seed=1000 * repeat + 10 * options.workloads.index(workload),
                    limit=max(1.0, clock.left),
                )
                rest.pop(0)
                note(
                    workload,
                    figures=_without_lists(figures),
                    peak_memory_mb=process.peak_memory_mb(),
                    seconds_to_start=seconds_to_start,
                )
    except (PeerFailedError, OSError) as error:
        for workload in rest:
            note(workload, error=str(error))
    return runs


def _without_lists(figures: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in figures.items() if not isinstance(value, list)}


def _progress(run: dict[str, Any], clock: Clock) -> None:
    if "figures" in run:
        figures = run["figures"]
        outcome = (
            f"{figures['output_throughput']:.0f} tok/s, TTFT {figures['mean_ttft_ms']:.0f} ms, "
            f"TPOT {figures['mean_tpot_ms']:.1f} ms, {figures['failed']} failed"
        )
    else:
        outcome = f"FAILED: {run['error'].strip().splitlines()[0][:200]}"
    now = datetime.now().strftime("%H:%M:%S")
    print(
        f"{now} repeat {run['repeat'] + 1} {run['peer']} {run['workload']}: {outcome} "
        f"({clock.left / 60:.0f} min left)",
        flush=True,
    )


def measure_all(options: argparse.Namespace, results: dict[str, Any]) -> None:
    clock = Clock(time.monotonic() + options.time_limit)
    for repeat in range(options.repeats):
        order = options.peers if repeat % 2 == 0 else options.peers[::-1]
        for name in order:
            if clock.left <= 0:
                print("the time limit is reached; the table has what was measured", flush=True)
                return
            peer = PEERS[name]
            wanted = [
                workload
                for workload in options.workloads
                if options.every_cell or is_measured(peer, workload)
            ]
            if wanted:
                results["runs"] += measure_peer(peer, wanted, repeat, options, clock)
                save(options.output, results)


def save(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(results, indent=1))
    partial.rename(path)


# ---- what stands beside the figures


def machine() -> dict[str, Any]:
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    return {
        "cpu": cpu.group(1).strip() if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(int(memory.group(1)) / 2**20, 1) if memory else None,
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
    }


def versions(peers: Sequence[str]) -> dict[str, str]:
    """As install.py left them."""
    found = {"hotbatch": __version__}
    for product in dict.fromkeys(PEERS[name].product for name in peers):
        file = peers_root() / product / "versions.json"
        if product and file.exists():
            found |= json.loads(file.read_text())
    return found


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default=",".join(DEFAULT_PEERS), help=f"of {','.join(PEERS)}")
    parser.add_argument("--workloads", nargs="+", default=DEFAULT_WORKLOADS)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--waves", type=int, default=2, help="requests of each client")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds for all")
    parser.add_argument("--every-cell", action="store_true", help="also where it takes minutes")
    parser.add_argument("--output", type=Path, default=None, help="JSON file of the results")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--no-document", action="store_true", help="print the table only")
    parser.add_argument("--table-only", type=Path, metavar="RESULTS.json", default=None)
    options = parser.parse_args()
    options.peers = options.peers.split(",")
    if unknown := [name for name in options.peers if name not in PEERS]:
        parser.error(f"unknown peers: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    try:
        options.workloads = parse_workloads(options.workloads)
    except ValueError as error:
        parser.error(str(error))
    if options.output is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        options.output = peers_root() / "results" / f"{options.model}-{stamp}.json"
    return options


def main() -> None:
    options = parse_options()
    if options.table_only is not None:
        results = json.loads(options.table_only.read_text())
    else:
        results = {
            "model": options.model,
            "date": datetime.now().strftime("%Y-%m-%d"),
            "machine": machine(),
            "versions": versions(options.peers),
            "threads": options.threads,
            "repeats": options.repeats,
            "waves": options.waves,
            "commands": {
                name: PEERS[name].command(options.model, options.threads) for name in options.peers
            },
            "runs": [],
        }
        try:
            measure_all(options, results)
        except KeyboardInterrupt:
            print("interrupted; the table has what was measured", flush=True)
        save(options.output, results)
        print(f"results: {options.output}", flush=True)
    text = markdown(results)
    print(text)
    if not options.no_document:
        write_section(options.document, results["model"], text)
        print(f"written to {options.document}")
    if not any("figures" in run for run in results["runs"]):
        sys.exit("nothing was measured")


if __name__ == "__main__":
    main()
