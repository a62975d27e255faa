"""How a text may go on, and with what chance: from its own past, or from what others were answered.

Which texts are looked into and what comes of it is told here, in the plain form. As it is asked
for many requests in every step, whoever composes a server puts a native one in its place that
yields the same (`Texts`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from hotbatch.core.speculation.acceptance import chance_of
from hotbatch.core.speculation.suffix_index import AGREEMENTS, Match, RecentText, key_of


class Text(Protocol):
    """What a tenant was answered lately, or a request knows."""

    def __len__(self) -> int: ...

    def extend(self, token_ids: list[int], start: int, end: int) -> None:
        """`token_ids[start:end]` follow."""
        ...

    def break_off(self) -> None:
        """What comes next is another text."""
        ...


Proposal = tuple[list[int], list[int], list[float]]
"""Next tokens; for each its cell in the table of acceptance, and the chance of all up to there."""


class Texts(NamedTuple):
    """An implementation of texts.

    Attributes:
        make: (tokens that are forgotten at once) -> an empty text.
        propose: as the function of this name, for texts that were made so.
    """

    make: Callable[[int], Text]
    propose: Callable[..., tuple[int, Proposal | None]]


def propose(
    own: Any,
    answers: Any,
    tokens: list[int],
    levels: tuple[int, int],
    cells: tuple[int, int],
    rates: list[float],
    factor: float,
    least: float,
    most: int,
    ends: frozenset[int],
) -> tuple[int, Proposal | None]:
    """The likeliest next tokens after the longest match of `tokens`' end.

    Args:
        own, answers: texts; there may be no answers.
        levels: of the shortest match that is of use, in either.
        cells: the first of either in `rates`.
        factor: of the request's own record (`acceptance.chance_of`).
        least: a token that is less likely to be reached and right is the last one.
        most: tokens.
        ends: tokens that are the last one, too.

    Returns:
        The level of the longest match (-1: none; matches below both of `levels` are not looked
        for in tables), and the tokens if it is long enough. The request's own text goes first if
        both matches are as long.
    """
    own_level, answers_level = levels
    lowest = min(levels)
    key = key_of(tokens)
    in_own: Match | None = own.find(tokens, lowest, key)
    in_answers: Match | None = None if answers is None else answers.find(tokens, lowest, key)
    level = max(-1 if match is None else match.level for match in (in_own, in_answers))
    if in_own is not None and in_own.level == level and level >= own_level:
        match, first_cell = in_own, cells[0]
    elif in_answers is not None and in_answers.level >= answers_level:
        match, first_cell = in_answers, cells[1]
    elif in_own is not None and in_own.level >= own_level:
        match, first_cell = in_own, cells[0]
    else:
        return level, None
    proposed: Proposal = ([], [], [])
    reached = 1.0
    for token_id, depth, agreement in match.continuation():
        cell = first_cell + depth * AGREEMENTS + agreement
        reached *= chance_of(rates[cell], factor)
        proposed[0].append(token_id)
        proposed[1].append(cell)
        proposed[2].append(reached)
        if reached < least or len(proposed[0]) >= most or token_id in ends:
            break
    return level, proposed if proposed[0] else None


PLAIN = Texts(RecentText, propose)
