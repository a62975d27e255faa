"""What followed the last time: places in known text whose past equals the present.

An index over a text answers one question: where did the last tokens of this context occur
before, as many of them as possible, and what came after? That is a suffix tree's question
(SuffixDecoding, arXiv 2411.04975), answered here by the structure of LZ77 compressors (RFC
1951, section 4): for runs of 1, 2 and 4 tokens a table of the newest place that follows each,
and from every place a link to the one before. Longer matches are told by comparing slices. Of
the places found, those with the longest match vote on each next token; the share of votes is
what a suffix tree would have counted, over the most recent occurrences instead of all.

Cost: half a microsecond and 300 bytes a token; a few microseconds a look-up that finds
something, less than one that does not. Nothing is ever
deleted from an index: text of bounded age lives in two of them, of which the older is dropped
when the younger is full.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

LEVELS = (1, 2, 4, 8, 16, 32)
"""Lengths of match that are told apart; one of 13 tokens counts as one of 8."""

SOLE, ALL, MOST, SOME = range(4)
"""How far the places agree on a token: there is one only; all of several; more than half; less."""

AGREEMENTS = 4

KEYED = 3
"""Levels that have a table; longer matches are found by comparing."""
_BITS = 24  # of a token id in a key
_MOST_PLACES = 16  # that are looked at, newest first
_NOWHERE = -1
_BREAK = -1  # stands between two texts; follows nothing, and nothing follows it
_HIGHEST = len(LEVELS) - 1
_LEVEL_OF = [bisect_right(LEVELS, length) - 1 for length in range(LEVELS[-1] + 1)]


class NextToken(NamedTuple):
    token_id: int
    level: int  # index into LEVELS of the match behind it, tokens before it in the guess included
    agreement: int  # SOLE, ALL, MOST or SOME


class Match(NamedTuple):
    """Places in `text` before which the last `LEVELS[level]` tokens of a context stand."""

    level: int
    places: list[int]
    text: Sequence[int]

    def continuation(self) -> Iterator[NextToken]:
        """The likeliest next tokens, as long as there are any: each is what most of the places
        say that agree with all tokens before it; the newest decides between equals."""
        text, places = self.text, self.places
        end = len(text)
        depth = LEVELS[self.level]
        offset = 0
        while len(places) > 1:
            ahead = [text[place + offset] for place in places if place + offset < end]
            if not ahead:
                return
            token_id, votes = ahead[0], ahead.count(ahead[0])
            if votes < len(ahead):
                token_id, votes = Counter(ahead).most_common(1)[0]
            if token_id == _BREAK:
                return
            level = _LEVEL_OF[depth] if depth < LEVELS[-1] else _HIGHEST
            yield NextToken(token_id, level, _agreement(votes, len(ahead)))
            if votes < len(places):
                places = [
                    place
                    for place in places
                    if place + offset < end and text[place + offset] == token_id
                ]
            offset += 1
            depth += 1
        for place in range(places[0] + offset, end):
            token_id = text[place]
            if token_id == _BREAK:
                return
            yield NextToken(token_id, _LEVEL_OF[depth] if depth < LEVELS[-1] else _HIGHEST, SOLE)
            depth += 1


def _agreement(votes: int, num_places: int) -> int:
    if num_places == 1:
        return SOLE
    if votes == num_places:
        return ALL
    return MOST if 2 * votes > num_places else SOME


class _Table:
    """For runs of `order` tokens: the newest place after each, and from each the one before."""

    __slots__ = ("earlier", "mask", "newest", "order")

    def __init__(self, order: int) -> None:
        self.order = order
        self.mask = (1 << (_BITS * order)) - 1
        self.newest: dict[int, int] = {}
        self.earlier: list[int] = []


class SuffixIndex:
    """Grows at its end only. Token ids are below 2**24."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._tables = [_Table(order) for order in LEVELS[:KEYED]]
        self._longest_order = self._tables[-1].order
        self._key = 0  # the last tokens, packed
        self._run = 0  # of these, how many since the last break

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        num_first = min(len(token_ids), max(0, self._longest_order - self._run))
        for token_id in token_ids[:num_first]:
            self._extend_by_one(token_id)
        key, mask = self._key, self._tables[-1].mask
        # The same for all that follow, with nothing looked up twice: it runs for every token.
        (find1, set1, add1, mask1), (find2, set2, add2, mask2), (find4, set4, add4, _) = [
            (table.newest.get, table.newest.__setitem__, table.earlier.append, table.mask)
            for table in self._tables
        ]
        place = len(self._tokens)
        for token_id in token_ids[num_first:]:
            key1, key2 = key & mask1, key & mask2
            add1(find1(key1, _NOWHERE))
            set1(key1, place)
            add2(find2(key2, _NOWHERE))
            set2(key2, place)
            add4(find4(key, _NOWHERE))
            set4(key, place)
            place += 1
            key = (key << _BITS | token_id) & mask
        self._tokens += token_ids[num_first:]
        self._key = key

    def _extend_by_one(self, token_id: int) -> None:
        """Near the beginning of a text, where there is no long run before it."""
        place = len(self._tokens)
        for table in self._tables:
            before = _NOWHERE
            if self._run >= table.order:
                key = self._key & table.mask
                before = table.newest.get(key, _NOWHERE)
                table.newest[key] = place
            table.earlier.append(before)
        self._tokens.append(token_id)
        self._key = (self._key << _BITS | token_id) & self._tables[-1].mask
        self._run += 1

    def break_off(self) -> None:
        """What comes next is another text."""
        if not self._run:
            return
        self._tokens.append(_BREAK)
        for table in self._tables:
            table.earlier.append(_NOWHERE)
        self._run = 0

    def find(
        self, context: Sequence[int], least_level: int = 0, key: int | None = None
    ) -> Match | None:
        """The longest match of the context's end, and where it is; None if there is none.

        Args:
            least_level: tables of shorter runs are not asked. The match may be shorter still.
            key: of the context, if it was asked for already (`key_of`).
        """
        if key is None:
            key = key_of(context)
        length = len(context)
        lowest = least_level if least_level < KEYED else KEYED - 1
        for level in range(KEYED - 1, lowest - 1, -1):
            table = self._tables[level]
            if length < table.order:
                continue
            place = table.newest.get(key & table.mask, _NOWHERE)
            if place == _NOWHERE:
                continue
            if level < KEYED - 1:
                return Match(level, list(_walk(place, table)), self._tokens)
            return self._longest(context, place, table)
        return None

    def _longest(self, context: Sequence[int], place: int, table: _Table) -> Match:
        """Of the places after the last four tokens, those with the longest match."""
        ends = [context[-length:] for length in LEVELS[KEYED:] if length <= len(context)]
        known = self._tokens
        best, places = 0, []
        for candidate in _walk(place, table):
            level = 0
            for end in ends:
                start = candidate - len(end)
                if start < 0 or known[start:candidate] != end:
                    break
                level += 1
            if level > best:
                best, places = level, [candidate]
            elif level == best:
                places.append(candidate)
        return Match(KEYED - 1 + best, places, known)


def key_of(context: Sequence[int]) -> int:
    """The end of a context as the tables know it."""
    key = 0
    for token_id in context[-LEVELS[KEYED - 1] :]:
        key = key << _BITS | token_id
    return key


def _walk(place: int, table: _Table) -> Iterator[int]:
    for _ in range(_MOST_PLACES):
        if place == _NOWHERE:
            return
        yield place
        place = table.earlier[place]


class RecentText:
    """The last one to two times `generation` tokens of a text, or of several.

    Two indexes of which the younger grows; when it is full, it becomes the older one.
    """

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._younger = SuffixIndex()
        self._older: SuffixIndex | None = None

    def __len__(self) -> int:
        return len(self._younger) + (len(self._older) if self._older is not None else 0)

    def extend(self, token_ids: list[int], start: int, end: int) -> None:
        """`token_ids[start:end]` follow."""
        end = min(end, len(token_ids))
        while start < end:
            if len(self._younger) >= self._generation:
                self._older, self._younger = self._younger, SuffixIndex()
            part = min(end, start + self._generation - len(self._younger))
            self._younger.extend(token_ids[start:part])
            start = part

    def break_off(self) -> None:
        self._younger.break_off()

    def find(
        self, context: Sequence[int], least_level: int = 0, key: int | None = None
    ) -> Match | None:
        """The longest match of both, the younger one's if both are as long; `SuffixIndex.find`."""
        match = self._younger.find(context, least_level, key)
        if self._older is None:
            return match
        older = self._older.find(context, least_level, key)
        if match is None or (older is not None and older.level > match.level):
            return older
        return match
