"""The native texts yield what the plain ones yield, to the bit."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbatch.core.speculation.acceptance import AcceptanceTable
from hotbatch.core.speculation.continuing import PLAIN, Texts
from hotbatch.core.speculation.suffix_index import LEVELS
from hotbatch.kernels import continuation

NATIVE = Texts(continuation.RecentText, continuation.propose)
QUIET = {"deadline": None, "derandomize": True}
levels = st.integers(0, len(LEVELS))


def rates(seed: int) -> list[float]:
    random = Random(seed)
    return [random.random() for _ in AcceptanceTable().rates]


@settings(max_examples=600, **QUIET)  # type: ignore[arg-type]
@given(
    parts=st.lists(st.lists(st.integers(0, 3), max_size=60), max_size=4),
    others=st.none() | st.lists(st.integers(0, 2), max_size=80),
    context=st.lists(st.integers(0, 3), min_size=1, max_size=80),
    generation=st.sampled_from([1, 7, 30, 1000]),
    own_level=levels,
    answers_level=levels,
    factor=st.sampled_from([0.3, 1.0, 2.5]),
    least=st.sampled_from([0.0, 0.1, 0.6]),
    most=st.integers(1, 32),
    ends=st.frozensets(st.integers(0, 3), max_size=1),
)
def test_proposals_are_equal(
    parts: list[list[int]],
    others: list[int] | None,
    context: list[int],
    generation: int,
    own_level: int,
    answers_level: int,
    factor: float,
    least: float,
    most: int,
    ends: frozenset[int],
) -> None:
    proposals = []
    for texts in (PLAIN, NATIVE):
        own: Any = texts.make(generation)
        for part in parts:
            own.extend(part, 0, len(part) // 2)
            own.extend(part, len(part) // 2, len(part) + 3)
            own.break_off()
        answers: Any = None
        if others is not None:
            answers = texts.make(generation)
            answers.extend(others, 0, len(others))
        proposed = texts.propose(
            own,
            answers,
            context,
            (own_level, answers_level),
            (0, 48),
            rates(len(context)),
            factor,
            least,
            most,
            ends,
        )
        proposals.append((len(own), proposed))
    assert proposals[0] == proposals[1]


def test_long_texts_are_equal_while_they_grow() -> None:
    """Tables are made anew as they fill, and texts are forgotten."""
    random = Random(3)
    text = [min(int(random.paretovariate(0.6)), 40_000) for _ in range(6000)]
    text += text[1000:1400]
    own = [texts.make(2000) for texts in (PLAIN, NATIVE)]
    table = rates(1)
    num_found = 0
    for start in range(0, len(text), 16):
        for known in own:
            known.extend(text, start, start + 16)
        context = text[: start + 19]
        one, other = (
            texts.propose(known, None, context, (0, 0), (0, 48), table, 1.0, 0.0, 8, frozenset())
            for texts, known in zip((PLAIN, NATIVE), own, strict=True)
        )
        assert one == other
        num_found += one[1] is not None
    assert num_found > 300


def test_a_text_needs_a_generation() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        continuation.RecentText(0)
