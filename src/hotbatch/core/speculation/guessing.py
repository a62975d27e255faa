"""Guesses from text: what followed the last time, for those requests where looking may pay.

Asking a request takes some ten microseconds in all, where the model has just swept the caches,
and more in the plain form of `continuing`. That is a small part of a step of one request and a
large one of the price of a row where many run. So a request is looked up only if the table of
acceptance and its own record allow a guess that is worth a row and the looking; they say how long
a match must be at least, and a shorter one is not looked for. As a match grows by no more than a
token each token, one that was short cannot be long enough for a while, in which nothing is looked
up at all.

What is not looked for cannot be learnt from. So now and then each request is looked up in full,
after 1, 2, 4, ... steps as long as nothing comes of it: every step where few run, every
`2 x n`th where n do, which makes half a look-up a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from hotbatch.core.request import Request
from hotbatch.core.speculation.acceptance import ANSWERS, OWN, AcceptanceTable, OwnRecord, cell_of
from hotbatch.core.speculation.continuing import PLAIN, Text, Texts
from hotbatch.core.speculation.history import AnswerHistory
from hotbatch.core.speculation.ledger import Ledger
from hotbatch.core.speculation.suffix_index import KEYED, LEVELS
from hotbatch.core.step import Step

_DEEPEST = 32  # guesses for a request in a step
_TOGETHER = 512  # for all of them: to sort and to learn from more takes longer than they earn
_INDEXED_PER_STEP = 512  # tokens of all texts; a third of a millisecond
_INDEXED_TOGETHER = (4, 16)  # tokens of an output, where few run and where many do
_FEW = 4  # requests that may be looked up in every step
_OWN_GENERATION = 16_384  # tokens of a request that are forgotten at once
_MOST_OWN_TOKENS = 524_288  # of all requests that run: some 160 MB
_NO_LEVEL = len(LEVELS)
_LENGTHS = (*LEVELS, inf)
_CELLS = [
    (cell_of(OWN, is_sampled, 0, 0), cell_of(ANSWERS, is_sampled, 0, 0))
    for is_sampled in (False, True)
]


class Guess(NamedTuple):
    """The guessed next tokens of the request at `place` in the step; all lists run parallel.

    `cells` say where the table has the chance of each, given that the tokens before are right;
    `reach` is the chance of all up to there, with the request's own record.
    """

    place: int
    request: Request
    tokens: list[int]
    cells: list[int]
    reach: list[float]


class _Track:
    """What is known of one request. `levels` are the shortest matches that may pay, in its own
    text and in answers, at the price `bar`, and `needed` is the length of the shorter one. Its
    longest match has at most `headroom` tokens more than it has tokens in all (below 0)."""

    __slots__ = (
        "bar",
        "headroom",
        "levels",
        "needed",
        "num_indexed",
        "pause",
        "record",
        "text",
        "until_trial",
    )

    def __init__(self, text: Text) -> None:
        self.text = text
        self.num_indexed = 0
        self.record = OwnRecord()
        self.bar = -1.0
        self.levels = (0, 0)
        self.needed = 0.0
        self.headroom = 0
        self.pause = 1  # steps until the next trial; doubles each time that nothing comes of it
        self.until_trial = 0


class Guesser:
    """Knows the texts, and how often guesses from them come true."""

    def __init__(self, texts: Texts = PLAIN) -> None:
        self.acceptance = AcceptanceTable()
        self.history = AnswerHistory(make=texts.make)
        self._make, self._propose = texts
        self._tracks: dict[Request, _Track] = {}
        self._num_own_tokens = 0

    @property
    def num_own_tokens(self) -> int:
        """Tokens of running requests that can be found."""
        return self._num_own_tokens

    def guess_all(
        self,
        step: Step,
        limit_of: Callable[[Request], int],
        num_expected: int,
        bar: float,
        least: float,
        deepest: int | None = None,
    ) -> list[Guess]:
        """Guesses of the decodes of a step that may pay, and of those whose turn it is.

        Args:
            limit_of: how many guesses a request may have.
            num_expected: requests that decode or soon will.
            bar: the chance of its first token from which on a guess is worth a look.
            least: the chance from which on it is worth its row, once it is there.
            deepest: most guesses of a request.
        """
        guesses = []
        tracks = self._tracks
        most = deepest_guess(num_expected) if deepest is None else deepest
        for place, (request, planned) in enumerate(zip(step.requests, step.planned, strict=True)):
            if planned.sample is None or len(planned.tokens) != 1 or not request.speculate:
                continue
            track = tracks.get(request)
            if track is None:
                track = tracks[request] = _Track(self._make(_OWN_GENERATION))
            if track.bar != bar:
                self._set_levels(track, request, bar)
            is_trial = track.until_trial <= 0
            if not is_trial:
                track.until_trial -= 1
                if len(request.tokens) + track.headroom < track.needed:
                    continue
            levels = (0, 0) if is_trial else track.levels
            guess = self._guess(place, request, track, limit_of, most, levels, least, num_expected)
            if guess is not None:
                guesses.append(guess)
            if guess is not None and guess.reach[0] >= bar:
                track.pause = 1
            elif is_trial:
                track.until_trial = min(track.pause, _longest_pause(num_expected))
                track.pause = min(2 * track.pause, 1024)
        return guesses

    def _set_levels(self, track: _Track, request: Request, bar: float) -> None:
        rate = track.record.needed_rate(bar)
        is_sampled = not request.params.is_greedy
        table = self.acceptance
        track.bar = bar
        own = table.least_level(OWN, is_sampled, rate)
        answers = table.least_level(ANSWERS, is_sampled, rate)
        track.levels = (own, answers)
        track.needed = _LENGTHS[min(own, answers)]

    def _guess(
        self,
        place: int,
        request: Request,
        track: _Track,
        limit_of: Callable[[Request], int],
        most: int,
        levels: tuple[int, int],
        least: float,
        num_expected: int,
    ) -> Guess | None:
        """The likeliest next tokens, as far as their chance is at least `least`, and one more."""
        num_new = len(request.tokens) - track.num_indexed
        if num_new >= _INDEXED_TOGETHER[num_expected > _FEW]:
            self._index(track, request, _INDEXED_PER_STEP)
        level, proposal = self._propose(
            track.text,
            self.history.text_of(request),
            request.tokens,
            levels,
            _CELLS[not request.params.is_greedy],
            self.acceptance.rates,
            track.record.factor,
            least,
            most,
            request.stop_tokens,
        )
        if level < _NO_LEVEL - 1:
            # Where none was found, tables of lesser length than the least were not asked.
            longest = LEVELS[level + 1 if level >= 0 else min(*levels, KEYED - 1)] - 1
            track.headroom = longest - len(request.tokens)
        else:
            track.headroom = 0
        if proposal is None:
            return None
        limit = limit_of(request)
        if limit < len(proposal[0]):
            proposal = (proposal[0][:limit], proposal[1][:limit], proposal[2][:limit])
        return Guess(place, request, *proposal) if limit > 0 else None

    # Learning

    def learn(self, guess: Guess, token_ids: Sequence[int], ledger: Ledger) -> None:
        """Compare with what came, up to the first that differs; past the end of the drafts one
        more token is known."""
        track = self._tracks.get(guess.request)
        before = 1.0
        for token_id, guessed, cell, reach in zip(
            token_ids, guess.tokens, guess.cells, guess.reach, strict=False
        ):
            is_right = token_id == guessed
            if track is not None:
                track.record.note(self.acceptance.rates[cell], is_right)
                track.bar = -1.0
            self.acceptance.note(cell, is_right)
            ledger.note_chance(reach / before, is_right)
            if not is_right:
                return
            before = reach

    def end(self, request: Request) -> None:
        """A request has ended: its answer is remembered for others, and nothing else of it."""
        track = self._tracks.pop(request, None)
        if track is not None:
            self._num_own_tokens -= track.num_indexed
        if request.speculate:
            self.history.remember(request)

    def catch_up(self) -> None:
        """Index some of the answers that have ended."""
        self.history.catch_up(_INDEXED_PER_STEP)

    def index_prompts(self, step: Step) -> None:
        """Index what is known of prompts while they are computed."""
        left = _INDEXED_PER_STEP
        for request, planned in zip(step.requests, step.planned, strict=True):
            if len(planned.tokens) > 1 and request.speculate and left > 0:
                track = self._tracks.get(request)
                if track is None:
                    track = self._tracks[request] = _Track(self._make(_OWN_GENERATION))
                left -= self._index(track, request, left)

    def _index(self, track: _Track, request: Request, num_tokens: int) -> int:
        """Index at most so many tokens more of a request's text; returns how many."""
        start = track.num_indexed
        num_tokens = min(
            num_tokens, len(request.tokens) - start, _MOST_OWN_TOKENS - self._num_own_tokens
        )
        if num_tokens <= 0:
            return 0
        track.text.extend(request.tokens, start, start + num_tokens)
        track.num_indexed += num_tokens
        self._num_own_tokens += num_tokens
        return num_tokens


def deepest_guess(num_expected: int) -> int:
    """Tokens of a guess at most, where so many requests decode or soon will."""
    return max(1, min(_DEEPEST, _TOGETHER // max(1, num_expected)))


def _longest_pause(num_expected: int) -> int:
    """Steps between two trials of a request at most."""
    return 0 if num_expected < _FEW else 2 * num_expected
