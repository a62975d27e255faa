"""Conversations: each turn asks with everything that was said before.

The next question comes `think` seconds after the last answer, as a person reads it first. So
the arrivals depend on the server's speed, and its prefix cache is what makes the second turn
cheap. For the chat endpoint a turn is a list of messages, for completions one growing text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hotbatch.bench.workload import BenchRequest, Message, RandomLengths, random_requests


@dataclass(frozen=True, slots=True)
class Turn:
    """A question of its own, the tokens of the answer, the seconds to think before asking."""

    question: str
    question_len: int
    answer_len: int
    think: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """Begins at `start` seconds; `first` carries the class, the tenant and the like."""

    start: float
    turns: tuple[Turn, ...]
    first: BenchRequest

    def request(self, index: int, answers: Sequence[str], *, is_chat: bool) -> BenchRequest:
        """Turn `index`, after the answers to all turns before it."""
        said = list(zip(self.turns, answers, strict=False))[:index]
        turn = self.turns[index]
        known = sum(earlier.question_len + earlier.answer_len for earlier, _ in said)
        messages: tuple[Message, ...] = ()
        for earlier, answer in said:
            messages += (
                {"role": "user", "content": earlier.question},
                {"role": "assistant", "content": answer},
            )
        if is_chat:
            prompt: str | tuple[Message, ...] = (
                *messages,
                {"role": "user", "content": turn.question},
            )
        else:
            prompt = "".join(f"{message['content']}\n" for message in messages) + turn.question
        return BenchRequest(
            prompt,
            known + turn.question_len,
            turn.answer_len,
            service_class=self.first.service_class,
            tenant=self.first.tenant,
            limits=self.first.limits,
            fields=self.first.fields,
            api_key=self.first.api_key,
            turn=index,
        )


def random_conversations(
    arrivals: Sequence[float],
    firsts: Sequence[BenchRequest],
    *,
    num_turns: RandomLengths,
    question_len: RandomLengths,
    answer_len: RandomLengths,
    think: float,
    seed: int = 0,
) -> list[Conversation]:
    """One conversation an arrival. Thinking takes `think` seconds on average (exponential);
    the first question of each comes at its arrival."""
    rng = random.Random(f"conversations {seed}")
    result = []
    for start, first in zip(arrivals, firsts, strict=True):
        count = num_turns.draw(rng)
        questions = random_requests(
            count,
            input_len=question_len,
            output_len=answer_len,
            as_text=True,
            seed=rng.getrandbits(32),
        )
        turns = tuple(
            Turn(
                str(question.prompt),
                question.prompt_len,
                question.output_len,
                0.0 if index == 0 or think <= 0.0 else rng.expovariate(1.0 / think),
            )
            for index, question in enumerate(questions)
        )
        result.append(Conversation(start, turns, first))
    return result
