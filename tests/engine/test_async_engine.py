"""Streams of events on asyncio, with the engine in its thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
from engine_parts import Rig, make_request, solo_tokens

from hotbatch.core.errors import ContextLengthError, EngineStoppedError, InvalidRequestError
from hotbatch.core.plan import FinishReason, TokenEvent, TokenLogprob
from hotbatch.engine import AsyncEngine, EventStream, merge_events


def run(scenario: Callable[[Rig, AsyncEngine], Awaitable[None]]) -> Rig:
    """Runs the scenario against a started engine and stops it; returns what is left."""
    rig = Rig(real_time=True)
    rig.engine._deliver = None

    async def main() -> None:
        engine = AsyncEngine(rig.engine)
        engine.start()
        try:
            await asyncio.wait_for(scenario(rig, engine), 60)
        finally:
            rig.executor.before_step = lambda plan: None
            await engine.stop()
        assert not engine._streams

    asyncio.run(main())
    return rig


async def collect(stream: EventStream) -> list[TokenEvent]:
    return [event async for event in stream]


def hold_steps(rig: Rig, after: int) -> threading.Event:
    """Steps beyond the first `after` wait until the event is set."""
    proceed = threading.Event()

    def before_step(plan: object) -> None:
        if len(rig.executor.plans) > after:
            assert proceed.wait(30)

    rig.executor.before_step = before_step
    return proceed


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def test_a_stream_gives_all_tokens_and_ends_with_the_reason():
    async def scenario(rig: Rig, engine: AsyncEngine) -> None:
        events = await collect(engine.submit(make_request(tokens=9)))
        assert tokens_of(events) == solo_tokens(make_request(tokens=9))
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason is FinishReason.LENGTH
        assert events[-1].num_output == 9

    run(scenario)


def test_many_streams_at_once_are_each_their_own():
    async def scenario(rig: Rig, engine: AsyncEngine) -> None:
        requests = [make_request(f"r{i}", prompt=3 + i, tokens=6, seed=i) for i in range(20)]
        results = await asyncio.gather(*(collect(engine.submit(r)) for r in requests))
        for index, events in enumerate(results):
            alone = make_request(prompt=3 + index, tokens=6, seed=index)
            assert tokens_of(events) == solo_tokens(alone)

    run(scenario)


def test_a_loop_is_woken_once_a_step_whatever_the_number_of_streams():
    async def scenario(rig: Rig, engine: AsyncEngine) -> None:
        loop = asyncio.get_running_loop()
        calls = []
        original = loop.call_soon_threadsafe

        def counting(callback, *args, **options):
            if threading.current_thread().name == "hotbatch-engine":
                calls.append(callback)
            return original(callback, *args, **options)

        loop.call_soon_threadsafe = counting
        streams = [engine.submit(make_request(f"r{i}", tokens=6)) for i in range(10)]
        await asyncio.gather(*map(collect, streams))
        assert len(calls) == len(rig.executor.plans)

    run(scenario)


def test_a_slow_consumer_finds_what_piled_up_merged():
    async def scenario(rig: Rig, engine: AsyncEngine) -> None:
        stream = engine.submit(make_request(tokens=100))
        while engine.engine.num_outstanding:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        assert len(stream._pending) < 40  # of a hundred events
        (event,) = await collect(stream)
        assert list(event.token_ids) == solo_tokens(make_request(tokens=100))
        assert event.finish_reason is FinishReason.LENGTH

    run(scenario)


def test_cancel_ends_the_stream_with_abort_and_frees_everything():
    async def scenario(rig: Rig, engine: AsyncEngine) -> None:
        proceed = hold_steps(rig, after=1)
        stream = engine.submit(make_request(tokens=200))
        await anext(stream)
        stream.cancel()
        stream.cancel()
        proceed.set()
        events = await collect(stream)
        assert events[-1].finish_reason is FinishReason.ABORT

    assert run(scenario).engine.stats().blocks_used == 0


@pytest.mark.parametrize("way", ["close", "raise", "task"])
def test_leaving_the_generator_early_cancels(way: str):
    async def scenario(rig: Rig, engine: AsyncEngine) -> None:
        proceed = hold_steps(rig, after=2)
        events = engine.generate(make_request(tokens=200))

        async def consume() -> None:
            async for _ in events:
                if way == "raise":
                    raise KeyError

        if way == "close":
            await anext(events)
            await events.aclose()
        elif way == "raise":
            with pytest.raises(KeyError):
                await consume()
            await events.aclose()
        else:
            task = asyncio.create_task(consume())
            while len(rig.executor.plans) < 3:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        proceed.set()
        while engine.engine.num_outstanding:
            await asyncio.sleep(0.001)
        assert len(rig.executor.plans) <= 4  # not two hundred

    assert run(scenario).engine.stats().blocks_used == 0


def test_a_stream_as_context_is_cancelled_on_the_way_out():
    async def scenario(rig: Rig, engine: AsyncEngine) -> None:
        proceed = hold_steps(rig, after=1)
        with engine.submit(make_request(tokens=200)) as stream:
            await anext(stream)
        proceed.set()
        events = await collect(stream)
        assert events[-1].finish_reason is FinishReason.ABORT

    run(scenario)


def test_cancelling_a_finished_stream_spares_the_next_request_of_its_id():
    async def scenario(rig: Rig, engine: AsyncEngine) -> None:
        stream = engine.submit(make_request("a"))
        while engine.engine.num_outstanding or engine._streams:
            time.sleep(0.001)  # its last event waits for this loop, unread
        other = engine.submit(make_request("a", tokens=30))
        stream.cancel()
        assert (await collect(other))[-1].finish_reason is FinishReason.LENGTH
        assert (await collect(stream))[-1].finish_reason is FinishReason.LENGTH

    run(scenario)


def test_refusals_are_raised_at_once_and_leave_nothing():
    async def scenario(rig: Rig, engine: AsyncEngine) -> None:
        with pytest.raises(ContextLengthError):
            engine.submit(make_request(prompt=300))
        proceed = hold_steps(rig, after=0)
        stream = engine.submit(make_request("a"))
        with pytest.raises(InvalidRequestError) as refusal:
            engine.submit(make_request("a"))
        assert refusal.value.param == "request_id"
        proceed.set()
        assert (await collect(stream))[-1].finish_reason is FinishReason.LENGTH
        await engine.stop()
        with pytest.raises(EngineStoppedError):
            engine.submit(make_request("b"))

    run(scenario)


def test_streams_hear_of_the_death_of_the_engine():
    async def scenario(rig: Rig, engine: AsyncEngine) -> None:
        def broken(*args: object) -> None:
            raise ZeroDivisionError("a bug of ours")

        rig.scheduler.commit = broken
        events = await collect(engine.submit(make_request()))
        assert events[-1].finish_reason is FinishReason.ERROR
        assert "a bug of ours" in events[-1].error
        assert not engine.is_healthy

    run(scenario)


def test_stop_ends_the_streams_that_wait():
    async def scenario(rig: Rig, engine: AsyncEngine) -> None:
        proceed = hold_steps(rig, after=1)
        stream = engine.submit(make_request(tokens=200))
        reader = asyncio.create_task(collect(stream))
        while len(rig.executor.plans) < 2:
            await asyncio.sleep(0.001)
        stopper = asyncio.create_task(engine.stop())
        while engine.engine._inbox.empty():  # until the stop is in it
            await asyncio.sleep(0.001)
        proceed.set()
        await stopper
        assert (await reader)[-1].finish_reason is FinishReason.ABORT

    run(scenario)


def test_a_closed_event_loop_costs_its_requests_and_nothing_else():
    rig = Rig(real_time=True)
    rig.engine._deliver = None
    engine = AsyncEngine(rig.engine)

    async def leave_behind() -> None:
        engine.submit(make_request("left", tokens=200))

    asyncio.run(leave_behind())
    engine.start()

    async def use() -> None:
        events = await collect(engine.submit(make_request("used", tokens=5)))
        assert tokens_of(events) == solo_tokens(make_request(tokens=5))
        while rig.engine.num_outstanding:
            await asyncio.sleep(0.001)
        assert max(len(plan.requests) for plan in rig.executor.plans) <= 2
        assert len(rig.executor.plans) < 150  # the one nobody hears was not run to its end
        await engine.stop()

    asyncio.run(asyncio.wait_for(use(), 60))
    assert rig.engine.is_healthy
    assert rig.engine.stats().blocks_used == 0


def test_merging_keeps_every_token_and_the_latest_counts():
    logprob = TokenLogprob(1, -0.5, 1)
    merged = merge_events(
        [
            TokenEvent("a", (1,), (logprob,), (logprob,), num_prompt=2, num_output=1),
            TokenEvent("a", (2, 3), (logprob, logprob), num_prompt=2, num_output=3),
            TokenEvent("a", finish_reason=FinishReason.ABORT, num_prompt=2, num_output=3),
        ]
    )
    assert merged.token_ids == (1, 2, 3)
    assert merged.logprobs == (logprob,) * 3
    assert merged.prompt_logprobs == (logprob,)
    assert merged.finish_reason is FinishReason.ABORT
    assert merged.num_output == 3
