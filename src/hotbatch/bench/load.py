"""Sends a workload: at given moments, under a cap, as clients that each wait their turn, as a
number of clients that changes over time, or as conversations."""

from __future__ import annotations

import asyncio
import gc
import itertools
import resource
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hotbatch.bench.client import Record, Target, open_session, parse, send
from hotbatch.bench.conversations import Conversation
from hotbatch.bench.workload import BenchRequest

if TYPE_CHECKING:
    import aiohttp

# Above this many bytes kept unparsed, records are parsed as they end.
_MAX_RAW_BYTES = 256 * 1024 * 1024

_PAUSE, _LONGEST_PAUSE = 0.5, 5.0  # seconds before a refused client asks again

OnEnd = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The records in the order of the requests; `started` and `duration` span the load alone.

    `client_cpu_seconds` is what this process spent while the load ran.
    """

    records: list[Record]
    started: float
    duration: float
    client_cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Client:
    """A client that comes at `start` seconds, sends its requests one after the other, leaves."""

    start: float
    requests: tuple[BenchRequest, ...]


async def run_load(
    target: Target,
    requests: Sequence[BenchRequest],
    *,
    arrivals: Sequence[float] | None = None,
    max_concurrency: int | None = None,
    on_end: OnEnd | None = None,
) -> LoadResult:
    """Sends each request at its arrival (seconds; None: at once) and waits for all.

    With `max_concurrency` at most so many are under way; with all arrivals at once that is a
    closed loop. A request that waits for its turn keeps the order of arrival.
    """
    records = [Record(request) for request in requests]
    free = asyncio.Semaphore(max_concurrency) if max_concurrency else None

    async def one(load: _Load, record: Record) -> None:
        try:
            await load.send(record)
        finally:
            if free is not None:
                free.release()

    async def dispatch(load: _Load) -> None:
        async with asyncio.TaskGroup() as tasks:
            for index, record in enumerate(records):
                record.due = load.started + (arrivals[index] if arrivals else 0.0)
                await _sleep_until(record.due)
                if free is not None:
                    await free.acquire()
                tasks.create_task(one(load, record))

    return await _measure(target, records, dispatch, on_end)


async def run_clients(
    target: Target, clients: Sequence[Client], *, on_end: OnEnd | None = None
) -> LoadResult:
    """Lets each client come, ask and go; records are in the order of clients, then requests."""
    records = [[Record(request) for request in client.requests] for client in clients]

    async def one(load: _Load, client: Client, own: list[Record]) -> None:
        await _sleep_until(load.started + client.start)
        for record in own:
            record.due = time.perf_counter()
            await load.send(record)

    async def dispatch(load: _Load) -> None:
        async with asyncio.TaskGroup() as tasks:
            for client, own in zip(clients, records, strict=True):
                tasks.create_task(one(load, client, own))

    return await _measure(target, [record for own in records for record in own], dispatch, on_end)


@dataclass(frozen=True, slots=True)
class Phase:
    """For `seconds`, so many clients ask one request after the other."""

    clients: int
    seconds: float


async def run_phases(
    target: Target,
    requests: Sequence[BenchRequest],
    phases: Sequence[Phase],
    *,
    on_end: OnEnd | None = None,
) -> LoadResult:
    """A closed loop whose number of clients changes from phase to phase.

    Clients take the requests in their order and begin again when none is left. One that has
    to go ends its last request first. Records are in the order of sending.
    """
    records: list[Record] = []
    supply = itertools.cycle(requests)

    async def one(load: _Load, spans: list[tuple[float, float]]) -> None:
        for begin, end in spans:
            await _sleep_until(load.started + begin)
            while time.perf_counter() < load.started + end:
                record = Record(next(supply), due=time.perf_counter())
                records.append(record)
                await load.send(record)
                if record.error is not None:
                    await asyncio.sleep(_pause_after(record))

    async def dispatch(load: _Load) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(max(phase.clients for phase in phases)):
                tasks.create_task(one(load, presence(phases, number)))

    return await _measure(target, records, dispatch, on_end)


def presence(phases: Sequence[Phase], number: int) -> list[tuple[float, float]]:
    """When client `number` (from 0) is there: seconds from and to, neighbours joined."""
    spans: list[tuple[float, float]] = []
    now = 0.0
    for phase in phases:
        if number < phase.clients:
            if spans and spans[-1][1] == now:
                spans[-1] = (spans[-1][0], now + phase.seconds)
            else:
                spans.append((now, now + phase.seconds))
        now += phase.seconds
    return spans


def _pause_after(record: Record) -> float:
    """A client that was refused does not ask again at once: that would be another load."""
    return min(_LONGEST_PAUSE, record.retry_after or _PAUSE)


async def run_conversations(
    target: Target, conversations: Sequence[Conversation], *, on_end: OnEnd | None = None
) -> LoadResult:
    """Holds each conversation to its end, or to its first failure. Records are those of the
    first conversation, then of the second and so on."""
    records: list[list[Record]] = [[] for _ in conversations]

    async def one(load: _Load, conversation: Conversation, own: list[Record]) -> None:
        answers: list[str] = []
        due = load.started + conversation.start
        for index, turn in enumerate(conversation.turns):
            due += turn.think
            await _sleep_until(due)
            request = conversation.request(index, answers, is_chat=target.is_chat)
            record = Record(request, due=due)
            own.append(record)
            await load.send(record)
            parse(record)
            if record.error is not None:
                return
            answers.append(record.text)
            due = record.ended

    async def dispatch(load: _Load) -> None:
        async with asyncio.TaskGroup() as tasks:
            for conversation, own in zip(conversations, records, strict=True):
                tasks.create_task(one(load, conversation, own))

    load = await _measure(target, [], dispatch, on_end)
    return replace(load, records=[record for own in records for record in own])


class _Load:
    """The load under way: the session, the start, and the bytes kept so far."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, on_end: OnEnd | None
    ) -> None:
        self.started = time.perf_counter()
        self._session = session
        self._target = target
        self._on_end = on_end
        self._raw_bytes = 0

    async def send(self, record: Record) -> None:
        await send(self._session, self._target, record)
        self._raw_bytes += sum(len(chunk) for _, chunk in record.raw)
        if self._raw_bytes > _MAX_RAW_BYTES:
            parse(record)
        if self._on_end is not None:
            self._on_end(record)


async def _measure(
    target: Target,
    records: list[Record],
    dispatch: Callable[[_Load], Coroutine[Any, Any, None]],
    on_end: OnEnd | None,
) -> LoadResult:
    gc.collect()
    gc.freeze()  # the workload is static: keep the collector from walking it during the load
    try:
        async with open_session(target) as session:
            load = _Load(session, target, on_end)
            cpu_before = _cpu_seconds()
            await dispatch(load)
            duration = time.perf_counter() - load.started
            cpu = _cpu_seconds() - cpu_before
    finally:
        gc.unfreeze()
    for record in records:
        parse(record)
    return LoadResult(records, load.started, duration, cpu)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def _sleep_until(moment: float) -> None:
    delay = moment - time.perf_counter()
    if delay > 0:
        await asyncio.sleep(delay)
