"""The engine in its thread: every wait here ends on a condition, none on the passing of time."""

from __future__ import annotations

import random
import threading
import time

import pytest
from engine_parts import Rig, make_request, make_scheduler, solo_tokens

from hotbatch.core.errors import EngineStoppedError
from hotbatch.core.plan import FinishReason
from hotbatch.core.request import Request


@pytest.fixture
def rig():
    rig = Rig(real_time=True)
    yield rig
    rig.executor.before_step = lambda plan: None
    rig.engine.stop()


class Gate:
    """Holds the executor at the start of each step until opened."""

    def __init__(self, rig: Rig) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        rig.executor.before_step = self._wait

    def _wait(self, plan: object) -> None:
        self.reached.set()
        assert self.open.wait(30)


def test_requests_are_served_in_the_background(rig: Rig):
    rig.engine.start()
    rig.engine.start()  # once is enough
    rig.engine.submit(make_request("a", tokens=6))
    assert rig.heard.wait_for_end("a") is FinishReason.LENGTH
    assert rig.heard.tokens("a") == solo_tokens(make_request(tokens=6))
    assert sum(t.name == "hotbatch-engine" for t in threading.enumerate()) == 1


def test_it_wakes_up_from_rest(rig: Rig):
    checked = threading.Event()
    rig.scheduler.check_integrity = checked.set
    rig.engine.start()
    assert checked.wait(30)
    rig.engine.submit(make_request("a"))
    assert rig.heard.wait_for_end("a") is FinishReason.LENGTH


def test_what_was_submitted_before_the_start_is_served(rig: Rig):
    rig.engine.submit(make_request("a"))
    rig.engine.start()
    assert rig.heard.wait_for_end("a") is FinishReason.LENGTH


def test_a_lone_request_of_a_static_batch_is_served_when_its_time_is_up():
    rig = Rig(
        real_time=True,
        scheduler=make_scheduler(batching="static", static_batch_size=4, static_timeout=0.01),
    )
    rig.engine.start()
    rig.engine.submit(make_request("a"))
    assert rig.heard.wait_for_end("a") is FinishReason.LENGTH
    rig.engine.stop()


def test_stop_lets_the_running_finish_and_refuses_new_ones(rig: Rig):
    gate = Gate(rig)
    rig.engine.start()
    rig.engine.submit(make_request("a", tokens=6))
    assert gate.reached.wait(30)
    stopper = threading.Thread(target=rig.engine.stop, args=(30.0,))
    stopper.start()
    while rig.engine.is_accepting:
        time.sleep(0.001)
    with pytest.raises(EngineStoppedError):
        rig.engine.submit(make_request("b"))
    gate.open.set()
    stopper.join(30)
    assert rig.heard.ends("a") == [FinishReason.LENGTH]
    assert rig.executor.num_closed == 1
    assert not rig.engine._thread.is_alive()


def test_stop_cuts_what_does_not_finish_within_its_grace(rig: Rig):
    gate = Gate(rig)
    rig.engine.start()
    rig.engine.submit(make_request("a", tokens=200))
    assert gate.reached.wait(30)
    stopper = threading.Thread(target=rig.engine.stop)
    stopper.start()
    while rig.engine._inbox.empty():
        time.sleep(0.001)
    gate.open.set()
    stopper.join(30)
    assert rig.heard.ends("a") == [FinishReason.ABORT]
    assert rig.engine.stats().blocks_used == 0


def test_a_second_stop_shortens_the_grace_of_the_first(rig: Rig):
    gate = Gate(rig)
    rig.engine.start()
    rig.engine.submit(make_request("a", tokens=200))
    assert gate.reached.wait(30)
    stoppers = [threading.Thread(target=rig.engine.stop, args=(grace,)) for grace in (3600.0, 0.0)]
    for stopper in stoppers:
        stopper.start()
    while rig.engine._inbox.qsize() < 2:
        time.sleep(0.001)
    gate.open.set()
    for stopper in stoppers:
        stopper.join(30)
        assert not stopper.is_alive()
    assert rig.heard.ends("a") == [FinishReason.ABORT]
    assert rig.executor.num_closed == 1


def test_a_step_that_never_ends_does_not_hang_the_stop(rig: Rig, monkeypatch):
    monkeypatch.setattr("hotbatch.engine.engine._STUCK_SECONDS", 0.01)
    gate = Gate(rig)
    rig.engine.start()
    rig.engine.submit(make_request("a"))
    assert gate.reached.wait(30)
    rig.engine.stop()
    assert rig.heard.ends("a") == [FinishReason.ERROR]
    assert rig.executor.num_closed == 0  # still in use
    gate.open.set()
    rig.engine._thread.join(30)
    assert rig.heard.ends("a") == [FinishReason.ERROR]  # and nothing after it


def test_stop_from_the_callback_does_not_wait_for_itself(rig: Rig):
    rig.engine.request_observers.append(lambda timings: rig.engine.stop())
    rig.engine.start()
    rig.engine.submit(make_request("a"))
    assert rig.heard.wait_for_end("a") is FinishReason.LENGTH
    rig.engine._thread.join(30)
    assert not rig.engine._thread.is_alive()


def test_many_threads_submit_and_cancel_and_each_request_has_one_end(rig: Rig):
    rig.engine.start()

    def requests(number: int) -> list[Request]:
        rng = random.Random(number)
        return [
            make_request(
                f"{number}-{index}",
                prompt=rng.randint(1, 40),
                tokens=rng.randint(1, 12),
                seed=number,
            )
            for index in range(25)
        ]

    def client(number: int) -> None:
        rng = random.Random(-number)
        for request in requests(number):
            rig.engine.submit(request)
            if rng.random() < 0.4:
                rig.engine.cancel(request.request_id)
            elif rng.random() < 0.3:
                rig.heard.wait_for_end(request.request_id)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(60)
    rig.engine.stop(60.0)
    for request in [request for number in range(4) for request in requests(number)]:
        (end,) = rig.heard.ends(request.request_id)
        tokens, alone = rig.heard.tokens(request.request_id), solo_tokens(request)
        assert tokens == (alone if end is FinishReason.LENGTH else alone[: len(tokens)])
    assert rig.engine.is_healthy
    assert rig.engine.stats().blocks_used == 0
    rig.scheduler.check_integrity()
