"""Clients in virtual time whose next requests are foreseen, computed and claimed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.plan import TokenEvent
from hotbatch.core.policies import full_policies
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.scheduler import Scheduler
from hotbatch.core.speculation import AheadBook
from hotbatch.engine.foresight import Foresight, Manner, Owner, Words, symbols
from hotbatch.simulator import ConstantStepTime, SimulatedExecutor, TokenModel
from hotbatch.simulator.engine_run import EngineRun

EOS = 1
STEP_SECONDS = 0.01
_FIRST = 0x100  # a token is shown as this character and those after it


def shown(token_ids: list[int], params: Any, prompt: Any, stop: int | None) -> str:
    return "".join(chr(_FIRST + t) for t in (token_ids if stop is None else token_ids[:-1]))


def typed(text: str) -> str:
    """A text in the characters that are tokens here."""
    return "".join(chr(_FIRST + ord(letter) % 200) for letter in text)


class World:
    """A server's engine with clients that ask one thing after another."""

    def __init__(self, *, foresees: bool = True) -> None:
        self.model = TokenModel(vocab_size=200, eos_token_id=EOS, eos_probability=0.01)
        self.executor = SimulatedExecutor(
            num_blocks=500,
            max_model_len=2048,
            model=self.model,
            step_time=ConstantStepTime(STEP_SECONDS),
        )
        config = SchedulerConfig(
            num_blocks=500, max_model_len=2048, max_num_seqs=16, max_num_batched_tokens=256
        )
        self.scheduler = Scheduler(config, full_policies(), ahead=AheadBook() if foresees else None)
        self.run = EngineRun(self.scheduler, self.executor, on_event=self._hear)
        self.foresight = None
        if foresees:
            words = Words(lambda text, special: [ord(c) - _FIRST for c in text], shown)
            self.foresight = Foresight(
                self.run.engine, words, frozenset({EOS}), lambda work: work()
            )
        self.waits: list[float] = []
        self._ears: dict[str, Callable[[TokenEvent], None]] = {}

    def _hear(self, event: TokenEvent) -> None:
        self._ears[event.request_id](event)

    def ask(
        self, at: float, text: str, then: Callable[[str], None], tenant: str = "", **changes: Any
    ) -> None:
        """Send a prompt at a moment; `then` hears the answer, which is checked."""
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": 40} | changes))
        prompt = [ord(letter) - _FIRST for letter in text]

        def send() -> None:
            request = Request(
                f"r{len(self._ears)}",
                prompt,
                params,
                seed=params.seed or 0,
                arrival=self.run.clock.now(),
                eos_token_ids=frozenset({EOS}),
                tenant=tenant,
            )
            expected = self.model.continuation(request, 2048)
            heard: list[int] = []
            followed = None

            def hear(event: TokenEvent) -> None:
                heard.extend(event.token_ids)
                if followed is not None:
                    text = shown(list(event.token_ids), params, None, event.stop_token_id)
                    followed.note(text, event.token_ids)
                if event.finish_reason is not None:
                    assert (heard, event.finish_reason) == expected
                    self.waits.append(self.run.clock.now() - request.arrival)
                    if followed is not None:
                        followed.end(event.finish_reason.value, event.stop_token_id)
                    then(shown(heard, params, None, event.stop_token_id))

            self._ears[request.request_id] = hear
            self.run.engine.submit(request)
            if self.foresight is not None:
                manner = Manner(params, False)
                followed = self.foresight.arrived(text, Owner(tenant, None), manner)

        self.run.at(at, send)

    def loop(self, number: int, tenant: str = "", **changes: Any) -> list[float]:
        """One loop of six steps, each a frame of its own; the seconds that each waited."""
        gaps = random.Random(number)
        before = len(self.waits)

        def step(turn: int, last: str) -> None:
            text = typed(f"Task {number * 7919}.\nSo far: ") + last
            text += typed("\nNow do step " + "abcdef"[turn])

            def then(answer: str) -> None:
                if turn < 5:
                    step(turn + 1, answer)

            at = self.run.clock.now() + gaps.uniform(0.3, 2.0)
            self.ask(at, text, then, tenant, **changes)

        step(0, typed("nothing"))
        self.run.run()
        self.scheduler.check_integrity()
        return self.waits[before:]

    def account(self) -> Any:
        return self.scheduler.stats().guesses["request"]


def test_from_the_third_loop_on_only_the_first_step_waits() -> None:
    world = World()
    loops = [world.loop(number) for number in range(4)]
    assert all(wait >= 2 * STEP_SECONDS for wait in loops[0][:2])
    for waits in loops[2:]:
        assert waits[0] > 0.0
        # A step that runs when the request comes is waited for.
        assert all(wait <= STEP_SECONDS + 1e-9 for wait in waits[1:])
    account = world.account()
    assert account.accepted >= 0.9 * account.attempted > 0


def test_without_foresight_every_step_waits() -> None:
    world = World(foresees=False)
    for number in range(3):
        waits = world.loop(number)
    assert min(waits) >= 2 * STEP_SECONDS


def test_requests_that_cannot_be_foreseen_cost_nothing() -> None:
    world = World()
    draw = random.Random(1)

    def next_question(left: int, answer: str) -> None:
        if left:
            text = typed("Question " + "".join(draw.choices("abcdefgh", k=30)))
            at = world.run.clock.now() + 0.5
            world.ask(at, text, lambda answer: next_question(left - 1, answer))

    next_question(20, "")
    world.run.run()
    account = world.account()
    assert (account.attempted, account.accepted) == (0, 0)


def test_habits_of_one_tenant_are_not_guessed_for_another() -> None:
    world = World()
    for number in range(3):
        world.loop(number, tenant="one")
    attempted = world.account().attempted
    assert attempted > 0
    world.loop(3, tenant="two")
    assert world.account().attempted == attempted


def test_of_a_drawn_answer_only_the_prompt_is_computed() -> None:
    """A loop of one repeated frame, so that the drawn answer's successor is known once it is."""
    world = World()
    for number in range(4):
        world.loop(number, temperature=1.0, seed=None)
    account = world.account()
    assert account.accepted > 0
    assert world.scheduler.stats().guesses["repeat"].accepted == 0
    book = world.scheduler.idle_work._ahead.book
    assert all(guess.request.num_output <= 1 for guess in book._computed.values())


def test_token_ids_can_be_followed_too() -> None:
    assert symbols([5, 200_000, 7], 7) == "\x05" + chr(200_000)
    assert [ord(symbol) for symbol in symbols([0xD800, 3])] == [0xD800, 3]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_request_that_was_cut_is_not_followed(reason: str) -> None:
    world = World()
    assert world.foresight is not None
    manner = Manner(SamplingParams(temperature=0.0), False)
    for _ in range(3):
        followed = world.foresight.arrived("some prompt or other", Owner("", None), manner)
        followed.note("a part of an answer", ())
        followed.end(reason, None)
        world.foresight.arrived("after: a part of an answer", Owner("", None), manner)
    assert world.scheduler.stats().num_guesses == 0
    assert len(world.foresight._successors.of(Owner("", None))) == 0
