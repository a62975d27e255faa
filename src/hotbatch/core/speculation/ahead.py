"""The books of guessed requests: which there are, how likely each is, and what became of it.

A guess is a whole request that nobody has sent yet. Somebody who knows its client's habits
(`successors`) offers it with a chance; it is computed in capacity that would idle (the scheduler's
`ahead_filling`), and claimed when the very request comes: same tenant and salt, same prompt ids,
same sampling, and an answer that is known before (`answers`). What was computed of it is then
given at once. A request with the same prompt but another sampling has its prompt's KV.

Answers that were given to somebody are kept as well: an exact repeat is the cheapest guess.

Every guess is booked once, when it is settled: claimed, refuted (its client did something else)
or grown old. Bounded by number; the least likely goes first.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

from hotbatch.core.plan import FinishReason, TokenLogprob
from hotbatch.core.request import Request
from hotbatch.core.speculation.ahead_pricing import LEAST_CHANCE
from hotbatch.core.speculation.answers import (
    Answer,
    AnswerKey,
    AnswerStore,
    PromptKey,
    answer_key,
    prompt_key,
)
from hotbatch.core.speculation.ledger import (
    NEXT_REQUEST,
    REPEATED_REQUEST,
    Account,
    CalibrationRow,
    Ledger,
)

_MOST_GUESSES = 64
_PATIENCE = 180.0  # seconds after which a guess that did not come is taken for wrong
_MOST_NEWS = 1024  # that wait to be heard


class Fate(enum.Enum):
    """What became of a guess."""

    COMPUTED = "computed"  # to its end; waits to be claimed
    CLAIMED = "claimed"
    DROPPED = "dropped"  # refuted, grown old, or had to make way for a likelier one


class GuessNews(NamedTuple):
    """Something happened to a guess; `token_ids` are its answer as far as it was computed."""

    request_id: str
    fate: Fate
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


class Guess:
    """A request that may come, and what was spent on it.

    Attributes:
        key: of its answer; None where that is not known before, so that only its prompt counts.
        attempted: tokens computed for it.
        seconds: predicted, that these added to steps.
        num_found: prompt tokens whose KV was there already.
        num_computed: the most tokens whose KV there ever was.
    """

    __slots__ = (
        "attempted",
        "chance",
        "key",
        "logprobs",
        "made_at",
        "num_computed",
        "num_found",
        "prompt",
        "request",
        "seconds",
    )

    def __init__(self, request: Request, chance: float, now: float) -> None:
        self.request = request
        self.prompt: PromptKey = prompt_key(request)
        self.key: AnswerKey | None = answer_key(request, self.prompt)
        self.chance = chance
        self.made_at = now
        self.attempted = 0
        self.seconds = 0.0
        self.num_found: int | None = None
        self.num_computed = 0
        self.logprobs: list[TokenLogprob] = []

    @property
    def num_own_prompt(self) -> int:
        """Prompt tokens that were computed for it."""
        return max(0, min(self.num_computed, self.request.num_prompt) - (self.num_found or 0))


class Claim(NamedTuple):
    """What a request that came finds: the beginning of its answer, and the guess behind it.

    `is_exact` says whether the guess was this very request.
    """

    answer: Answer | None
    guess: Guess | None
    is_exact: bool


class AheadBook:
    """Guesses by what they guess. Not thread-safe.

    Args:
        keeps_answers: remember what was answered, for exact repeats.
    """

    def __init__(self, *, keeps_answers: bool = True) -> None:
        self.ledger = Ledger()
        self.repeats = Ledger()
        self.answers = AnswerStore()
        self._keeps_answers = keeps_answers
        self._live: dict[str, Guess] = {}  # by request id; not computed to their end
        self._computed: dict[str, Guess] = {}  # oldest first
        self._by_prompt: dict[PromptKey, Guess] = {}
        self._news: list[GuessNews] = []

    def __len__(self) -> int:
        """Guesses that are not settled."""
        return len(self._by_prompt)

    @property
    def has_live(self) -> bool:
        return bool(self._live)

    def live(self) -> list[Guess]:
        """Guesses that are not computed to their end, the likeliest first."""
        return sorted(
            (guess for guess in self._live.values() if guess.chance >= LEAST_CHANCE),
            key=lambda guess: (-guess.chance, guess.request.order),
        )

    # In

    def offer(self, request: Request, chance: float, now: float) -> list[Guess]:
        """Take a guess in; returns guesses that have to go for it."""
        gone = self._grown_old(now)
        guess = Guess(request, chance, now)
        known = self._by_prompt.get(guess.prompt)
        if known is not None:
            if known.key == guess.key:
                known.chance = max(known.chance, chance)
            self._tell(guess.request, Fate.DROPPED)
            return gone
        if guess.key is not None:
            answer = self.answers.get(guess.key)
            if answer is not None and _is_whole(request, answer):
                self._tell_known(request, answer)
                return gone
        if len(self._by_prompt) >= _MOST_GUESSES:
            least = min(self._by_prompt.values(), key=lambda known: known.chance)
            if least.chance >= chance:
                self._tell(guess.request, Fate.DROPPED)
                return gone
            gone.append(least)
            self.refute(least)
        self._live[request.request_id] = guess
        self._by_prompt[guess.prompt] = guess
        return gone

    def reprice(self, request_id: str, chance: float) -> Guess | None:
        """A guess became more or less likely; at 0 it is refuted, settled and returned."""
        guess = self._live.get(request_id) or self._computed.get(request_id)
        if guess is None:
            return None
        if chance > 0.0:
            guess.chance = chance
            return None
        self.refute(guess)
        return guess

    def remember(self, request: Request) -> None:
        """A request has ended: whoever asks the same will get the same."""
        if not self._keeps_answers or request.num_output == 0:
            return
        if request.params.logprobs is not None:
            return  # the tokens alone would not do, and the rest is not kept
        key = answer_key(request)
        if key is not None:
            self.answers.put(key, Answer(request.tokens[request.num_prompt :]))

    # Out

    def claim(self, request: Request) -> Claim | None:
        """What is known of the answer of a request that came. Its guess is not settled yet."""
        if not (self._by_prompt or len(self.answers)):
            return None
        if request.group_id is not None or request.params.prompt_logprobs is not None:
            return None
        prompt = prompt_key(request)
        key = answer_key(request, prompt)
        answer = None if key is None else self.answers.get(key)
        guess = self._by_prompt.get(prompt)
        if guess is None:
            return None if answer is None else Claim(answer, None, False)
        is_exact = guess.key == key
        if is_exact and key is not None and guess.request.request_id in self._live:
            output = guess.request.tokens[guess.request.num_prompt :]
            if output and (answer is None or len(answer.token_ids) < len(output)):
                answer = Answer(output, tuple(guess.logprobs), guess.request.request_id)
        return Claim(answer, guess, is_exact)

    def settle_claim(self, claim: Claim, num_used: int, saved: float, saved_prompt: float) -> None:
        """Book a claim.

        Args:
            num_used: tokens of the answer that were given.
            saved: seconds that computing these would have taken.
            saved_prompt: likewise, of the prompt's tokens that were computed for the guess.
        """
        guess = claim.guess
        is_own = (
            guess is not None
            and claim.answer is not None
            and claim.answer.guess_id == guess.request.request_id
        )
        if num_used and not is_own:
            self.repeats.book(num_used, num_used, 0.0, saved)
        if guess is None:
            return
        accepted = guess.num_own_prompt + (num_used if is_own else 0)
        seconds = saved_prompt + (saved if is_own else 0.0)
        self._book(guess, min(accepted, guess.attempted), seconds, claim.is_exact)
        self._forget(guess)
        if guess.key is not None:
            self.answers.own(guess.key)
        self._tell(guess.request, Fate.CLAIMED)

    def finish(self, guess: Guess, reason: FinishReason | None) -> None:
        """A guess is computed to its end, or as far as there is room for it (no reason)."""
        request = guess.request
        del self._live[request.request_id]
        self._computed[request.request_id] = guess
        output = request.tokens[request.num_prompt :]
        if guess.key is not None and output:
            self.answers.put(guess.key, Answer(output, tuple(guess.logprobs), request.request_id))
        self._tell(guess.request, Fate.COMPUTED, reason)

    def refute(self, guess: Guess) -> None:
        """A guess did not come, or cannot be computed."""
        self._book(guess, 0, 0.0, False)
        self._forget(guess)
        self._tell(guess.request, Fate.DROPPED)

    def take_news(self) -> list[GuessNews]:
        """What happened since the last time."""
        news, self._news = self._news, []
        return news

    def accounts(self) -> Mapping[str, Account]:
        return {NEXT_REQUEST: self.ledger.account(), REPEATED_REQUEST: self.repeats.account()}

    def calibration(self) -> list[CalibrationRow]:
        return self.ledger.calibration()

    def check_integrity(self) -> None:
        """Assert that every guess is in one place."""
        guesses = [*self._live.values(), *self._computed.values()]
        assert len(guesses) == len(self._by_prompt), "a guess is lost"
        for guess in guesses:
            assert self._by_prompt.get(guess.prompt) is guess, f"{guess.request!r} is not found"

    def _grown_old(self, now: float) -> list[Guess]:
        old = [guess for guess in self._by_prompt.values() if now - guess.made_at > _PATIENCE]
        for guess in old:
            self.refute(guess)
        return old

    def _book(self, guess: Guess, accepted: int, saved: float, is_true: bool) -> None:
        self.ledger.note_chance(guess.chance, is_true)
        if guess.attempted:
            self.ledger.book(guess.attempted, accepted, guess.seconds, saved)

    def _forget(self, guess: Guess) -> None:
        request_id = guess.request.request_id
        self._live.pop(request_id, None)
        self._computed.pop(request_id, None)
        del self._by_prompt[guess.prompt]

    def _tell_known(self, request: Request, answer: Answer) -> None:
        """A guess whose answer is known already: as if it had just been computed. There is
        nothing to be claimed, as whoever asks finds the answer itself."""
        reason = None
        for token_id in answer.token_ids:
            reason = request.append(token_id)
            if reason is not None:
                break
        self._tell(request, Fate.COMPUTED, reason)
        self._tell(request, Fate.DROPPED)

    def _tell(self, request: Request, fate: Fate, reason: FinishReason | None = None) -> None:
        if len(self._news) < _MOST_NEWS:
            self._news.append(
                GuessNews(
                    request.request_id,
                    fate,
                    tuple(request.tokens[request.num_prompt :]),
                    reason,
                    request.stop_token_id,
                )
            )


def _is_whole(request: Request, answer: Answer) -> bool:
    """Would the request end within this answer?"""
    if len(answer.token_ids) >= request.max_output:
        return True
    return any(
        token_id in request.stop_tokens and count >= request.params.min_tokens
        for count, token_id in enumerate(answer.token_ids)
    )
