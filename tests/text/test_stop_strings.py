"""No text past a stop string, whatever the pieces; nothing held that cannot become one."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotbatch.text import StopStringMatcher

ALPHABET = "abơ👍"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Adds characters one by one until the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    pieces=st.lists(st.text(ALPHABET, max_size=5), max_size=8), stops=STOPS, include=st.booleans()
)
@example(pieces=["a", "b"], stops=["ab", "b"], include=False)
@example(pieces=["aa", "ab"], stops=["aab"], include=False)
def test_equals_the_naive_definition(pieces: list[str], stops: list[str], include: bool) -> None:
    expected, stop = naive("".join(pieces), stops, include)
    matcher = StopStringMatcher(stops, include_stop_str_in_output=include)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        assert expected.startswith(shown)
    shown += matcher.flush()
    assert (shown, matcher.matched) == (expected, stop)


@given(text=st.text(ALPHABET, max_size=12), stops=STOPS)
def test_held_text_is_the_beginning_of_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    shown = matcher.push(text)
    if matcher.matched is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        ([], ["a", "b"], ["a", "b", ""]),
        (["END"], ["x E", "N", "D y"], ["x ", "", "", ""]),
        (["END"], ["x E", "N", "d"], ["x ", "", "ENd", ""]),
        (["END"], ["x E", "N"], ["x ", "", "EN"]),
        (["\n\n"], ["a\n", "b\n", "\nc", "d"], ["a", "\nb", "", "", ""]),
        (["xyz", "y"], ["x", "y"], ["", "x", ""]),
    ],
)
def test_pieces_as_they_come(stops: list[str], pieces: list[str], shown: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    assert [*[matcher.push(piece) for piece in pieces], matcher.flush()] == shown
