"""Foresees requests: hears what clients ask and get, and offers the engine what may come next.

The server tells of every request that comes and ends; `core.speculation.successors` learns from
it, and says what may follow. Each likely prompt becomes a request that the engine computes in
idle capacity. When such a guess is computed to its end, what may follow *it* is guessed in turn,
at the product of both chances: a loop whose every step is known runs ahead of its client as far
as the machine has time for.

All of it happens in one place one after another (`run`, a thread of its own in a server), so that
neither the event loop nor a step waits for it, and nothing here needs a lock.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hotbatch.core.errors import HotbatchError
from hotbatch.core.owner import Owner
from hotbatch.core.plan import FinishReason
from hotbatch.core.request import Request
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.core.speculation import Fate, GuessNews
from hotbatch.core.speculation.ahead_pricing import LEAST_CHANCE
from hotbatch.core.speculation.answers import is_known_before
from hotbatch.core.speculation.successors import Habits, Successor, Successors, Turn
from hotbatch.engine.engine import Engine
from hotbatch.engine.seeds import child_seed

logger = logging.getLogger(__name__)

_MOST_SUCCESSORS = 3  # of a turn that are guessed
_DEEPEST = 8  # guesses upon guesses
_UNLIKELY = 0.5  # what else may follow a turn that has been followed is given up below this
_MOST_OPEN = 256  # guesses that are followed here


@dataclass(frozen=True, slots=True)
class Manner:
    """How a prompt is asked for.

    `add_special_tokens` says how its text becomes tokens; None: its symbols are token ids.
    """

    params: SamplingParams
    add_special_tokens: bool | None


class Words(NamedTuple):
    """How texts and tokens become each other, as the clients see it.

    Attributes:
        encode: (text, add special tokens) -> token ids.
        decode: (token ids, their sampling, prompt ids, stop token) -> what a client is shown of
            an answer.
    """

    encode: Callable[[str, bool], list[int]]
    decode: Callable[[Sequence[int], SamplingParams, Sequence[int], int | None], str]


class Followed:
    """A request that a client sent. `note` and `end` may be called on another thread than the
    foresight runs in."""

    __slots__ = ("_foresight", "_ids", "_manner", "_text", "guesses", "owner", "turn")

    def __init__(self, foresight: Foresight, owner: Owner, manner: Manner) -> None:
        self.owner = owner
        self.turn: Turn | None = None
        self.guesses: list[str] = []  # of what may follow it
        self._foresight = foresight
        self._manner = manner
        self._text: list[str] = []
        self._ids: list[int] = []

    def note(self, text: str, token_ids: Sequence[int]) -> None:
        """Its client got more of the answer."""
        if self._manner.add_special_tokens is None:
            self._ids += token_ids
        elif text:
            self._text.append(text)

    def end(self, reason: str, stop_token_id: int | None) -> None:
        """Its client has the whole answer."""
        if reason not in (FinishReason.STOP.value, FinishReason.LENGTH.value):
            return
        answer = "".join(self._text)
        if self._manner.add_special_tokens is None:
            answer = symbols(self._ids, stop_token_id)
        was_cut = reason == FinishReason.LENGTH.value
        self._foresight.ended(self, answer, was_cut)


class _Open(NamedTuple):
    """A guess that was offered."""

    owner: Owner
    successor: Successor
    prompt_ids: list[int]
    depth: int
    chance: float
    children: list[str]


class Foresight:
    """What clients may ask next.

    Args:
        engine: one that takes guesses.
        words: of its model.
        eos_token_ids: tokens that end an answer.
        run: calls a function, here or elsewhere; one after another, in order.
    """

    def __init__(
        self,
        engine: Engine,
        words: Words,
        eos_token_ids: frozenset[int],
        run: Callable[[Callable[[], None]], object],
    ) -> None:
        self._engine = engine
        self._words = words
        self._eos_token_ids = eos_token_ids
        self._run = run
        self._successors = Successors()
        self._open: dict[str, _Open] = {}
        self._ids: dict[tuple[Owner, str, Hashable], str] = {}  # of those, by what is guessed
        self._followed: dict[Turn, Followed] = {}  # those that may be followed yet
        self._next_number = 0
        engine.guess_observers.append(self._hear)

    # What happens

    def arrived(self, prompt: str, owner: Owner, manner: Manner) -> Followed:
        """A request has come."""
        followed = Followed(self, owner, manner)
        self._later(lambda: self._learn_arrival(followed, prompt, manner))
        return followed

    def ended(self, followed: Followed, answer: str, was_cut: bool) -> None:
        """A request has its answer, as its client sees it."""
        self._later(lambda: self._learn_end(followed, answer, was_cut))

    def _hear(self, news: list[GuessNews]) -> None:
        """On the engine's thread."""
        self._later(lambda: self._learn_news(news))

    def _later(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception:
                logger.exception("foreseeing requests failed")

        try:
            self._run(guarded)
        except RuntimeError:
            logger.debug("no more requests are foreseen: shutting down")

    # What is learnt from it

    def _learn_arrival(self, followed: Followed, prompt: str, manner: Manner) -> None:
        habits = self._successors.of(followed.owner)
        arrival = habits.arrive(prompt, manner, self._engine.now())
        followed.turn = arrival.turn
        if arrival.follows is None:
            return
        before = self._followed.get(arrival.follows)
        if before is None:
            return
        came = self._ids.get((followed.owner, prompt, manner))
        for request_id in list(before.guesses):
            guess = self._open.get(request_id)
            if guess is not None and request_id != came and guess.chance < _UNLIKELY:
                self._give_up(request_id)

    def _learn_end(self, followed: Followed, answer: str, was_cut: bool) -> None:
        turn = followed.turn
        if turn is None:
            return
        habits = self._successors.of(followed.owner)
        habits.end(turn, answer, was_cut, self._engine.now())
        self._forget_followed()
        self._followed[turn] = followed
        followed.guesses = self._guess(habits, turn, followed.owner, 1.0, 1)

    def _learn_news(self, news: list[GuessNews]) -> None:
        for piece in news:
            guess = self._open.get(piece.request_id)
            if guess is None:
                continue
            if piece.fate is not Fate.COMPUTED:
                self._close(piece.request_id)
            elif piece.finish_reason is not None and guess.depth < _DEEPEST:
                self._guess_on(guess, piece)

    def _guess_on(self, guess: _Open, news: GuessNews) -> None:
        """What may follow a guess that is computed."""
        successor = guess.successor
        manner = successor.manner
        assert isinstance(manner, Manner)
        if not is_known_before(manner.params):
            return
        if manner.add_special_tokens is None:
            answer = symbols(news.token_ids, news.stop_token_id)
        else:
            answer = self._words.decode(
                news.token_ids, manner.params, guess.prompt_ids, news.stop_token_id
            )
        turn = Turn(successor.prompt, (successor.state,), successor.hole)
        turn.end(answer, news.finish_reason is FinishReason.LENGTH)
        habits = self._successors.of(guess.owner)
        guess.children.extend(self._guess(habits, turn, guess.owner, guess.chance, guess.depth + 1))

    # What is guessed

    def _guess(
        self, habits: Habits, turn: Turn, owner: Owner, chance: float, depth: int
    ) -> list[str]:
        """Offer what may follow a turn that itself comes with this chance; returns their ids."""
        ids = []
        for successor in habits.successors(turn)[:_MOST_SUCCESSORS]:
            joint = chance * successor.chance
            if joint < LEAST_CHANCE:
                break
            known = self._ids.get((owner, successor.prompt, successor.manner))
            if known is not None:
                self._raise_chance(known, joint)
                ids.append(known)
                continue
            request_id = self._offer(owner, successor, joint, depth)
            if request_id is not None:
                ids.append(request_id)
        return ids

    def _offer(self, owner: Owner, successor: Successor, chance: float, depth: int) -> str | None:
        manner = successor.manner
        assert isinstance(manner, Manner)
        while len(self._open) >= _MOST_OPEN:
            self._give_up(next(iter(self._open)))
        prompt_ids = self._prompt_ids(successor.prompt, manner)
        params = manner.params
        if not is_known_before(params):  # its prompt alone
            params = dataclasses.replace(params, max_tokens=1, min_tokens=0)
        request_id = f"ahead-{self._next_number}"
        request = Request(
            request_id,
            prompt_ids,
            params,
            seed=0 if params.is_greedy else child_seed(params.seed, 0),
            eos_token_ids=self._eos_token_ids,
            cache_salt=owner.cache_salt,
            tenant=owner.tenant,
        )
        try:
            self._engine.guess(request, chance)
        except HotbatchError:
            return None  # too long: it could not come either
        self._next_number += 1
        self._open[request_id] = _Open(owner, successor, prompt_ids, depth, chance, [])
        self._ids[owner, successor.prompt, manner] = request_id
        return request_id

    def _prompt_ids(self, prompt: str, manner: Manner) -> list[int]:
        if manner.add_special_tokens is None:
            return [ord(symbol) for symbol in prompt]
        return self._words.encode(prompt, manner.add_special_tokens)

    def _raise_chance(self, request_id: str, chance: float) -> None:
        guess = self._open[request_id]
        if chance > guess.chance:
            self._open[request_id] = guess._replace(chance=chance)
            self._engine.reprice_guess(request_id, chance)

    def _give_up(self, request_id: str) -> None:
        """A guess is refuted, and so is all that was to follow it."""
        guess = self._open.get(request_id)
        if guess is None:
            return
        self._close(request_id)
        self._engine.reprice_guess(request_id, 0.0)
        for child in guess.children:
            self._give_up(child)

    def _close(self, request_id: str) -> None:
        guess = self._open.pop(request_id)
        self._ids.pop((guess.owner, guess.successor.prompt, guess.successor.manner), None)

    def _forget_followed(self) -> None:
        while len(self._followed) >= _MOST_OPEN:
            del self._followed[next(iter(self._followed))]


def symbols(token_ids: Sequence[int], stop_token_id: int | None = None) -> str:
    """Token ids as a string of symbols, without the stop token at the end."""
    shown = token_ids if stop_token_id is None else token_ids[:-1]
    return "".join(map(chr, shown))
