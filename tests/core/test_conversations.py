"""Whole conversations under random guesses at every distance: no output changes, no block is lost.

Guesses are of the next tokens, of what the next turn begins with, and of the next turns themselves
(one or two ahead); some are right, some are wrong in a token, in their sampling or in both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from core_factories import EOS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_schedules import DRAFTERS, MODEL, Case, Habits, Heard, RandomDay

from hotbatch.core import Policies, Request, SamplingParams, SchedulerConfig
from hotbatch.core.policies import full_policies
from hotbatch.core.speculation.warming import KnownPrefix

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
_LONGEST = 60  # tokens of a conversation


@dataclass
class Talk:
    """A conversation: what was said, what will be said, and the turn that is being answered."""

    number: int
    params: SamplingParams
    seed: int
    said: list[int]
    to_say: list[list[int]]  # the next one first
    tenant: str
    turn: int = 0
    request: Request | None = None
    forgets: bool = False  # the template strips the first token of each answer
    heard: list[int] = field(default_factory=list)

    def next_prompt(self, answer: list[int]) -> list[int]:
        kept = answer[1:] if self.forgets else answer
        return [*self.said, *kept, *self.to_say[0]]


class Conversations(RandomDay):
    """Turns come when the answer before them has ended; guesses know what will be said."""

    def __init__(self, case: Case, talks: list[Talk]) -> None:
        super().__init__(case)
        self.talks = talks

    def run(self, max_turns: int = 6000) -> None:
        for _ in range(max_turns):
            if not (any(self._may_go_on(talk) for talk in self.talks) or self.scheduler.has_work):
                return
            self._turn()
        raise AssertionError("some conversation never ends")

    def _may_go_on(self, talk: Talk) -> bool:
        return bool(talk.to_say) and len(talk.next_prompt(talk.heard)) < _LONGEST - 4

    def _request(self, talk: Talk, name: str, prompt: list[int]) -> Request:
        return Request(
            name,
            prompt,
            talk.params,
            seed=talk.seed,
            eos_token_ids=frozenset({EOS}),
            tenant=talk.tenant,
        )

    def _arrivals(self) -> None:
        for talk in self.talks:
            if talk.request is not None:
                heard = self.heard[talk.request.request_id]
                if heard.end is None:
                    continue
                talk.said = talk.request.tokens[: talk.request.num_prompt]
                talk.heard = heard.token_ids
                talk.request = None
            if self._may_go_on(talk) and self._chance(self.case.habits.arrival):
                prompt = talk.next_prompt(talk.heard)
                talk.to_say.pop(0)
                request = self._request(talk, f"talk{talk.number}.{talk.turn}", prompt)
                talk.turn += 1
                talk.request = request
                request.arrival = self.executor.clock.now()
                self.requests.append(request)
                self.heard[request.request_id] = Heard()
                self.scheduler.add(request)

    def _something_may_happen(self) -> None:
        if self.requests:
            super()._something_may_happen()

    def _expected(self, talk: Talk) -> list[int] | None:
        """The prompt of the next turn, if nobody interferes."""
        if not talk.to_say:
            return None
        if talk.request is None:
            return talk.next_prompt(talk.heard)
        asked = self._request(talk, "asked", talk.request.tokens[: talk.request.num_prompt])
        answer, _ = MODEL.continuation(asked, self.config.context_len - asked.num_prompt)
        kept = answer[1:] if talk.forgets else answer
        return [*asked.tokens, *kept, *talk.to_say[0]]

    def _offer(self) -> None:
        talk = self.random.choice(self.talks)
        prompt = self._expected(talk)
        if prompt is None:
            return
        prompt = prompt[: self.random.randint(1, len(prompt))]
        if self._chance(0.3):
            prompt[-1] = self.random.randrange(MODEL.vocab_size)
        prefix = KnownPrefix(prompt[: self.config.context_len], talk.tenant)
        self.scheduler.idle_work.offer(prefix, self.executor.clock.now())
        self.scheduler.check_integrity()

    def _guess_something(self) -> None:
        while self._chance(self.case.habits.guess):
            talk = self.random.choice(self.talks)
            prompt = self._expected(talk)
            if prompt is None or len(prompt) >= self.config.context_len - 1:
                return
            name = f"guess-{len(self.heard)}-{self.random.random()}"
            request = self._request(talk, name, prompt)
            if self._chance(0.3) and len(talk.to_say) > 1:  # the turn after it, too
                answer, _ = MODEL.continuation(request, self.config.context_len - len(prompt))
                kept = answer[1:] if talk.forgets else answer
                longer = [*prompt, *kept, *talk.to_say[1]]
                if len(longer) < self.config.context_len - 1:
                    request = self._request(talk, name, longer)
            wrong = self.random.choice(["nothing", "nothing", "token", "sampling", "tenant"])
            if wrong == "token":
                place = self.random.randrange(len(request.tokens))
                request.tokens[place] = self.random.randrange(MODEL.vocab_size)
            elif wrong == "sampling":
                other = replace(talk.params, temperature=1.0 - talk.params.temperature)
                request.params = other
            elif wrong == "tenant":
                request = Request(
                    name,
                    request.tokens,
                    talk.params,
                    seed=talk.seed,
                    eos_token_ids=frozenset({EOS}),
                    tenant="somebody else",
                )
            self.guesses[name] = request
            now = self.executor.clock.now()
            self.scheduler.idle_work.guess(request, self.random.random(), now)
            self.scheduler.check_integrity()
            self._hear_news()
            if self.guesses and self._chance(0.1):
                self.scheduler.idle_work.reprice(self.random.choice(list(self.guesses)), 0.0)
                self._hear_news()


@st.composite
def conversations(draw: st.DrawFn) -> Conversations:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    seats = draw(st.integers(1, 4))
    config = SchedulerConfig(
        num_blocks=-(-draw(st.integers(64, 160)) // block_size),
        block_size=block_size,
        max_model_len=_LONGEST,
        max_num_seqs=seats,
        max_num_batched_tokens=seats + draw(st.integers(1, 16)),
        prefix_eviction=draw(st.sampled_from(["return-time", "lru"])),
        prefill_ahead=True,
        ahead_kv_share=draw(st.sampled_from([0.25, 1.0])),
        vocab_size=MODEL.vocab_size,
    )
    tokens = st.lists(st.integers(0, MODEL.vocab_size - 1), min_size=1, max_size=5)
    common = draw(tokens)
    talks = [
        Talk(
            number,
            SamplingParams(
                temperature=draw(st.sampled_from([0.0, 0.0, 1.0])),
                max_tokens=draw(st.integers(1, 9)),
                seed=draw(st.sampled_from([None, 1])),
            ),
            seed=number,
            said=list(common),
            to_say=draw(st.lists(tokens, min_size=1, max_size=4)),
            tenant=draw(st.sampled_from(["", "", "a"])),
            forgets=draw(st.booleans()),
        )
        for number in range(draw(st.integers(1, 4)))
    ]
    rare = st.sampled_from([0.0, 0.0, 0.02])
    habits = Habits(
        seed=draw(st.integers(0, 2**32)),
        arrival=draw(st.sampled_from([0.05, 0.3, 1.0])),
        cancel=draw(st.sampled_from([0.0, 0.0, 0.02])),
        lookahead=draw(st.sampled_from([0.0, 0.5])),
        fail_step=draw(rare),
        fail_request=draw(rare),
        offer=draw(st.sampled_from([0.1, 0.5])),
        guess=draw(st.sampled_from([0.1, 0.4])),
    )
    policies: Policies = draw(st.sampled_from([Policies(), full_policies()]))
    drafting = draw(st.sampled_from(list(DRAFTERS)))
    return Conversations(
        Case(config, (), habits, draw(st.integers(1, 20)), drafting, policies), talks
    )


def run(day: Conversations) -> None:
    day.run()
    day.judge()


@settings(max_examples=150, **QUIET)  # type: ignore[arg-type]
@given(day=conversations())
def test_conversations_with_guesses_at_every_distance_are_answered_as_alone(
    day: Conversations,
) -> None:
    run(day)


@pytest.mark.slow
@settings(max_examples=2000, **QUIET)  # type: ignore[arg-type]
@given(day=conversations())
def test_many_conversations_are_answered_as_alone(day: Conversations) -> None:
    run(day)
