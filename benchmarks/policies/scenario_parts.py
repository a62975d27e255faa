"""What the staged scenarios have in common: requests, windows of time, and verdicts."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hotbatch.bench.client import Record, Target, open_session, parse, send
from hotbatch.bench.workload import BenchRequest, RandomLengths, arrival_times, random_requests

TIER = {"interactive": "priority", "standard": "default", "batch": "flex"}


@dataclass(frozen=True, slots=True)
class Check:
    """One promise: what was measured, the most it may be, and whether it was kept."""

    text: str
    measured: float
    limit: float
    unit: str = ""

    @property
    def is_kept(self) -> bool:
        return self.measured <= self.limit

    def line(self) -> str:
        verdict = "pass" if self.is_kept else "FAIL"
        return f"  {verdict}  {self.text}: {self.measured:.3g}{self.unit} (at most " \
               f"{self.limit:.3g}{self.unit})"  # fmt: skip


@dataclass(slots=True)
class Report:
    """What one scenario saw."""

    name: str
    figures: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    @property
    def is_passed(self) -> bool:
        return all(check.is_kept for check in self.checks)

    def text(self) -> str:
        lines = [f"\n{self.name}"]
        lines += [f"  {key:44} {_shown(value)}" for key, value in self.figures.items()]
        return "\n".join([*lines, *(check.line() for check in self.checks)])

    def record(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "figures": self.figures,
            "checks": [
                {
                    "text": check.text,
                    "measured": check.measured,
                    "limit": check.limit,
                    "is_kept": check.is_kept,
                }
                for check in self.checks
            ],
            "is_passed": self.is_passed,
        }


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Crowd:
    """Sends requests to one server and remembers them all; closed by leaving its block."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.records: list[Record] = []
        self._session: Any = None
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Crowd:
        self._session = await open_session(self.target).__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.__aexit__(*exc)

    async def ask(self, request: BenchRequest) -> Record:
        """Sends one and waits for its end; the record is parsed."""
        record = Record(request, due=time.perf_counter())
        self.records.append(record)
        await send(self._session, self.target, record)
        parse(record)
        return record

    def start(self, request: BenchRequest) -> asyncio.Task[Record]:
        task = asyncio.create_task(self.ask(request))
        self._tasks.append(task)
        return task

    def keep_busy(self, requests: Iterable[BenchRequest], clients: int) -> None:
        """Clients that ask one request after the other until the block ends."""
        supply = iter(requests)

        async def loop() -> None:
            for request in supply:
                record = await self.ask(request)
                if record.error is not None:
                    await asyncio.sleep(min(5.0, record.retry_after or 0.5))

        self._tasks += [asyncio.create_task(loop()) for _ in range(clients)]

    def at_rate(
        self, asked: Sequence[BenchRequest], rate: float, seed: int
    ) -> list[asyncio.Task[Record]]:
        """Sends requests at Poisson moments from now on; their tasks are there at once."""
        begin = time.perf_counter()

        async def one(request: BenchRequest, due: float) -> Record:
            await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
            return await self.ask(request)

        dues = arrival_times(len(asked), request_rate=rate, seed=seed)
        tasks = [
            asyncio.create_task(one(request, due)) for request, due in zip(asked, dues, strict=True)
        ]
        self._tasks += tasks
        return tasks

    def token_times(
        self, service_class: str | None = None, tenant: str | None = None
    ) -> list[float]:
        """Moments of all chunks so far, those of unfinished answers included."""
        return sorted(
            moment
            for record in list(self.records)
            if service_class in (None, record.request.service_class)
            and tenant in (None, record.request.tenant)
            for moment in moments(record)
        )


def moments(record: Record) -> list[float]:
    """When chunks came; of an answer under way, when its bytes came (a step's tokens of one
    request are one write)."""
    return record.chunk_times or [moment for moment, _ in record.raw]


def requests(
    count: int,
    prompt: int,
    output: int,
    *,
    seed: int,
    service_class: str = "",
    tenant: str = "",
) -> list[BenchRequest]:
    """Random prompts of one length, each its own, with a class or a tenant."""
    fields: dict[str, Any] = {}
    if service_class:
        fields["service_tier"] = TIER[service_class]
    if tenant:
        fields["user"] = tenant
    return [
        replace(request, service_class=service_class, tenant=tenant, fields=fields)
        for request in random_requests(
            count, input_len=RandomLengths(prompt), output_len=RandomLengths(output), seed=seed
        )
    ]


def talkers(count: int, prompt: int, output: int, *, seed: int) -> list[BenchRequest]:
    """Requests whose every token is heard when it is there: with its id, as one that ends in the
    middle of a character has no text yet, and would look like a gap twice as long."""
    return [
        replace(request, fields={**request.fields, "return_token_ids": True})
        for request in requests(count, prompt, output, seed=seed)
    ]


@dataclass(frozen=True, slots=True)
class UsualGap:
    """The usual gap between tokens while contexts grow, and gaps with them: (moment, seconds)
    before and after something happened; in between, it is on the line between the two."""

    before: tuple[float, float]
    after: tuple[float, float]

    def times(self, gap: float, moment: float) -> float:
        """How many times the usual one of that moment a gap is."""
        (begin, first), (end, last) = self.before, self.after
        share = min(1.0, max(0.0, (moment - begin) / (end - begin)))
        return gap / (first + share * (last - first))


def must(records: Sequence[Record]) -> Sequence[Record]:
    """Raises RuntimeError where one failed: its figures would mean nothing."""
    for record in records:
        if record.error is not None:
            raise RuntimeError(f"a request failed: {record.error}")
    return records


def rate_between(times: Sequence[float], begin: float, end: float) -> float:
    return sum(begin <= moment < end for moment in times) / (end - begin)


def longest_gap(times: Sequence[float], begin: float, end: float) -> float:
    """The longest time without a token between two moments, their ends included."""
    inside = [begin, *(moment for moment in times if begin <= moment <= end), end]
    return max(later - earlier for earlier, later in itertools.pairwise(inside))


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    if not ordered:
        return float("inf")
    place = (len(ordered) - 1) * percent / 100.0
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("inf")


def resident_mb(pid: int | None) -> float | None:
    """Memory of a process in MB, or None where the system does not say."""
    if pid is None:
        return None
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024.0
    except OSError:
        pass
    return None
