"""A server's engine in virtual time with clients that talk, loop and repeat themselves.

The very scheduler, engine and foresight of the server; only steps take made-up time (a measured
curve) and tokens come from a made-up model. Its text consists of phrases, some of which come more
often than others: it goes on in a phrase with a chance that is the phrase's own, from almost
certain to rather not. So a part of the tokens can be guessed from what was said before, as in
real text; how many is made up as well, and figures of this world tell about scheduling.

A token is shown to clients, and to the foresight, as one character.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from policy_machine import Machine

from hotbatch.core import Request, SamplingParams, Scheduler, SchedulerConfig, ServiceClass
from hotbatch.core.cost_model import CostModel
from hotbatch.core.plan import TokenEvent
from hotbatch.core.policies import full_policies
from hotbatch.core.speculation import AheadBook, Speculator
from hotbatch.engine.foresight import Foresight, Manner, Owner, Words
from hotbatch.simulator import EngineRun, SimulatedExecutor, TokenModel, UnsteadyStepTime

EOS = 0
_PHRASE = 32  # tokens
_NUM_PHRASES = 500
_STEADINESS = (0.98, 0.9, 0.6)  # of phrases: the chance to go on in one
_SPREAD = 0.05  # of step times around the curve
_FIRST = 0x100  # the character of token 0


@dataclass(frozen=True, slots=True)
class PhraseModel(TokenModel):
    """Goes on in a phrase or begins another one. A context is a hash, and the last token."""

    vocab_size: int = _PHRASE * _NUM_PHRASES
    eos_token_id: int | None = EOS
    eos_probability: float = 0.004

    def extend(self, context: int, token_id: int) -> int:
        return TokenModel.extend(self, context >> 16, token_id) << 16 | token_id

    def sample(
        self,
        context: int,
        params: SamplingParams,
        *,
        seed: int,
        position: int,
        banned: Sequence[int] = (),
    ) -> int:
        drawn = TokenModel.sample(
            self, context >> 16, params, seed=seed, position=position, banned=banned
        )
        if drawn == EOS:
            return EOS
        last = context & 0xFFFF
        phrase, place = divmod(last, _PHRASE)
        draw = drawn % 1000 / 1000
        if place + 1 < _PHRASE and draw < _STEADINESS[phrase % len(_STEADINESS)]:
            return last + 1
        other = drawn * 2654435761 % 2**32 / 2**32
        return max(1, int(_NUM_PHRASES * other**3) * _PHRASE)


def shown(token_ids: Sequence[int]) -> str:
    return "".join(chr(_FIRST + token_id) for token_id in token_ids if token_id != EOS)


def typed(draw: random.Random, count: int) -> str:
    """Something new of `count` tokens that somebody types."""
    return "".join(chr(_FIRST + draw.randrange(1, _PHRASE * _NUM_PHRASES)) for _ in range(count))


def phrase(number: int, count: int) -> str:
    """Always the same `count` tokens, which nothing else begins with."""
    draw = random.Random(f"phrase {number}")
    return typed(draw, count)


@dataclass
class Asked:
    """What came of one request."""

    kind: str
    arrival: float
    num_prompt: int
    num_tokens: int = 0
    first: float = 0.0
    end: float = 0.0


@dataclass
class Tally:
    """All requests that have ended, in that order."""

    asked: list[Asked] = field(default_factory=list)

    def of(self, kind: str | None = None, since: float = 0.0, until: float = 1e99) -> list[Asked]:
        """Those of a kind that came in this time."""
        return [
            one
            for one in self.asked
            if (kind is None or one.kind == kind) and since <= one.arrival < until
        ]


class World:
    """An engine, with guesses at all distances or at none.

    Args:
        num_blocks: of the KV cache; the machine's own if None.
        ahead_kv_share: of it, that requests computed ahead may hold.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        speculates: bool,
        seed: int = 0,
        num_blocks: int | None = None,
        ahead_kv_share: float = 0.25,
    ) -> None:
        blocks = num_blocks or machine.num_blocks
        executor = SimulatedExecutor(
            num_blocks=blocks,
            block_size=machine.block_size,
            max_model_len=machine.max_model_len,
            model=PhraseModel(),
            step_time=UnsteadyStepTime(machine.step_time, _SPREAD, seed=seed),
            strict=False,
        )
        config = SchedulerConfig(
            num_blocks=blocks,
            block_size=machine.block_size,
            max_model_len=machine.max_model_len,
            max_num_seqs=machine.max_num_seqs,
            max_num_batched_tokens=max(512, machine.max_num_seqs),
            prefix_eviction="return-time" if speculates else "lru",
            prefill_ahead=speculates,
            ahead_kv_share=ahead_kv_share,
        )
        model = CostModel()
        self.scheduler = Scheduler(
            config,
            full_policies(),
            model,
            Speculator(model) if speculates else None,
            AheadBook() if speculates else None,
        )
        self.executor = executor
        self.run = EngineRun(self.scheduler, executor, on_event=self._hear)
        self.foresight: Foresight | None = None
        if speculates:
            words = Words(
                lambda text, special: [ord(symbol) - _FIRST for symbol in text],
                lambda token_ids, params, prompt, stop: shown(token_ids),
            )
            self.foresight = Foresight(
                self.run.engine, words, frozenset({EOS}), lambda work: work()
            )
        self.tally = Tally()
        self._ears: dict[str, Callable[[TokenEvent], None]] = {}
        self._next_number = 0

    @property
    def now(self) -> float:
        return self.run.clock.now()

    def _hear(self, event: TokenEvent) -> None:
        self._ears[event.request_id](event)

    def ask(
        self,
        kind: str,
        text: str,
        then: Callable[[str], None],
        *,
        at: float,
        tenant: str = "",
        service_class: ServiceClass = ServiceClass.STANDARD,
        **params: Any,
    ) -> None:
        """Send a prompt at a moment; `then` hears the answer."""
        sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 128} | params))

        def send() -> None:
            name = f"r{self._next_number}"
            self._next_number += 1
            request = Request(
                name,
                [ord(symbol) - _FIRST for symbol in text],
                sampling,
                seed=sampling.seed if sampling.seed is not None else self._next_number,
                arrival=self.now,
                eos_token_ids=frozenset({EOS}),
                tenant=tenant,
                service_class=service_class,
            )
            asked = Asked(kind, self.now, request.num_prompt)
            heard: list[int] = []
            followed = None
            if self.foresight is not None:
                manner = Manner(sampling, False)
                followed = self.foresight.arrived(text, Owner(tenant, None), manner)

            def hear(event: TokenEvent) -> None:
                assert event.error is None, event.error
                if event.token_ids and not heard:
                    asked.first = self.now
                heard.extend(event.token_ids)
                if followed is not None:
                    followed.note(shown(event.token_ids), event.token_ids)
                if event.finish_reason is None:
                    return
                del self._ears[name]
                asked.end, asked.num_tokens = self.now, len(heard)
                self.tally.asked.append(asked)
                if followed is not None:
                    followed.end(event.finish_reason.value, event.stop_token_id)
                then(shown(heard))

            self._ears[name] = hear
            self.run.engine.submit(request)

        self.run.at(at, send)


# ---- clients: each asks until `is_open` says no more, one thing after another


def talk(world: World, number: int, tenant: str, until: Callable[[], float]) -> None:
    """Conversations of one to six turns, at a temperature, with time to read and to type."""
    draw = random.Random(f"talk {number}")
    system = phrase(1, 64)

    def begin() -> None:
        turn(system, draw.randint(1, 6))

    def turn(history: str, left: int) -> None:
        at = world.now + draw.lognormvariate(1.8, 0.6)  # 6 seconds, more or less
        if at >= until():
            return
        question = history + typed(draw, draw.randint(15, 60))

        def then(answer: str) -> None:
            if left > 1 and len(question) < 1500:
                turn(question + answer, left - 1)
            else:
                begin()

        world.ask(
            "interactive", question, then, at=at, tenant=tenant,
            service_class=ServiceClass.INTERACTIVE, temperature=0.8,
        )  # fmt: skip

    begin()


def loop(world: World, number: int, tenant: str, until: Callable[[], float]) -> None:
    """An agent: loops of six steps, each in a frame of its own, with a tool between."""
    draw = random.Random(f"loop {number}")

    def begin() -> None:
        task = phrase(2, 30) + typed(draw, 30) + phrase(3, 8)
        step(task, phrase(4, 2), 0)

    def step(task: str, last: str, place: int) -> None:
        at = world.now + draw.uniform(0.3, 2.0)
        if at >= until():
            return
        prompt = task + last + phrase(10 + place, 12)

        def then(answer: str) -> None:
            if place < 5:
                step(task, answer, place + 1)
            else:
                begin()

        world.ask("agent", prompt, then, at=at, tenant=tenant)

    begin()


def job(world: World, number: int, tenant: str, until: Callable[[], float]) -> None:
    """The same 16 entries again and again, one after another; each time a quarter has changed."""
    versions = [0] * 16

    def entry(night: int, place: int) -> None:
        pause = 0.5 if place % 4 == 0 else 0.0
        at = world.now + pause
        if at >= until():
            return
        versions[place] += (night + place) % 4 == 0
        which = 1000 * (number + 1) + place
        prompt = phrase(5, 20) + phrase(which * 97 + versions[place], 80)

        def then(answer: str) -> None:
            entry(night + (place == 15), (place + 1) % 16)

        world.ask("job", prompt, then, at=at, tenant=tenant, service_class=ServiceClass.BATCH)

    entry(0, 0)


CLIENTS: dict[str, Callable[[World, int, str, Callable[[], float]], None]] = {
    "interactive": talk,
    "agent": loop,
    "job": job,
}
