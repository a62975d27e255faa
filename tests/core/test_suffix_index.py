"""The index finds what a look through the whole text finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from hotbatch.core.speculation.suffix_index import (
    ALL,
    LEVELS,
    MOST,
    SOLE,
    SOME,
    RecentText,
    SuffixIndex,
)

texts = st.lists(st.integers(0, 3), max_size=60)
QUIET = {"deadline": None, "derandomize": True}


def index_of(*parts: Sequence[int]) -> SuffixIndex:
    index = SuffixIndex()
    for part in parts:
        index.extend(part)
        index.break_off()
    return index


def places_by_hand(text: Sequence[int], context: Sequence[int], length: int) -> list[int]:
    """Where the last `length` tokens of the context stand before, newest first."""
    end = list(context[-length:])
    return [
        place
        for place in range(len(text) - 1, length - 1, -1)
        if list(text[place - length : place]) == end
    ]


@settings(max_examples=400, **QUIET)  # type: ignore[arg-type]
@given(text=texts, context=texts)
def test_the_longest_match_is_found_with_its_newest_places(
    text: list[int], context: list[int]
) -> None:
    index = SuffixIndex()
    index.extend(text)
    match = index.find(context)
    longest = [
        level
        for level, length in enumerate(LEVELS)
        if length <= len(context) and places_by_hand(text, context, length)
    ]
    if not longest:
        assert match is None
        return
    assert match is not None
    # The longest may be among older places than those that are looked at.
    recent = places_by_hand(text, context, min(LEVELS[longest[-1]], 4))[:16]
    found = [
        level
        for level in longest
        if set(places_by_hand(text, context, LEVELS[level])) & set(recent)
    ]
    assert match.level == found[-1]
    by_hand = places_by_hand(text, context, LEVELS[match.level])
    assert match.places == [place for place in by_hand if place in recent]


@settings(max_examples=300, **QUIET)  # type: ignore[arg-type]
@given(text=texts, context=texts)
def test_a_continuation_is_what_most_places_say(text: list[int], context: list[int]) -> None:
    index = SuffixIndex()
    index.extend(text)
    match = index.find(context)
    if match is None:
        return
    places = match.places
    for offset, token in enumerate(islice(match.continuation(), 20)):
        ahead = [text[place + offset] for place in places if place + offset < len(text)]
        votes = Counter(ahead)
        assert votes[token.token_id] == max(votes.values())
        kinds = {SOLE: len(ahead) == 1, ALL: len(votes) == 1 and len(ahead) > 1}
        kinds[MOST] = len(votes) > 1 and 2 * votes[token.token_id] > len(ahead)
        kinds[SOME] = len(votes) > 1 and not kinds[MOST]
        assert kinds[token.agreement]
        places = [p for p in places if p + offset < len(text) and text[p + offset] == token[0]]


def test_a_continuation_ends_with_its_text_and_at_a_break() -> None:
    index = index_of([1, 2, 3, 4, 5, 6], [7, 8])
    match = index.find([0, 2, 3, 4])
    assert match is not None and LEVELS[match.level] == 2
    assert [token.token_id for token in match.continuation()] == [5, 6]
    assert index.find([6]) is None, "nothing follows the end of a text"
    assert index.find([6, 7]) is not None, "but 8 follows 7"


def test_the_match_grows_with_what_is_guessed() -> None:
    text = list(range(100))
    index = index_of(text)
    match = index.find([7, 8, 9, 10, 11])
    assert match is not None
    levels = [LEVELS[token.level] for token in islice(match.continuation(), 30)]
    assert levels[:5] == [4, 4, 4, 4, 8] and levels[-1] == 32
    assert levels == sorted(levels)


def test_recent_text_forgets_what_is_old() -> None:
    recent = RecentText(generation=10)
    recent.extend([1, 2, 3, 4, 5], 0, 5)
    for start in range(100, 140, 4):
        recent.extend(list(range(start, start + 4)), 0, 4)
        assert len(recent) <= 20
    assert recent.find([1, 2, 3, 4]) is None
    match = recent.find([130, 131])
    assert match is not None and next(match.continuation()).token_id == 132


def test_the_longer_match_of_both_generations_is_taken() -> None:
    recent = RecentText(generation=6)
    recent.extend([1, 2, 3, 4, 5, 6], 0, 6)
    recent.extend([9, 4, 7], 0, 3)
    match = recent.find([1, 2, 3, 4])
    assert match is not None and next(match.continuation()).token_id == 5
    match = recent.find([0, 4])
    assert match is not None and next(match.continuation()).token_id == 7, "as long: the younger"
