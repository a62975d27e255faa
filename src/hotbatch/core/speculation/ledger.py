"""What guesses earned and what they cost, and whether their chances were told right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# The distances of guesses, by name.
NEXT_TOKENS = "token"  # drafts
NEXT_TURN = "turn"  # what a conversation's next prompt begins with
NEXT_REQUEST = "request"  # requests computed before they came
REPEATED_REQUEST = "repeat"  # requests that came again; their answers cost nothing

_DECILES = 10


class CalibrationRow(NamedTuple):
    """Guesses whose chance was told to be about `told`, and the share of them that came true."""

    told: float
    true: float
    number: int


@dataclass(frozen=True, slots=True)
class Account:
    """One distance's guesses so far, tokens and seconds.

    Attributes:
        attempted: tokens computed on a guess.
        accepted: of these, those that came true.
        seconds_spent: predicted time that computing them added to steps.
        seconds_saved: predicted time that the accepted ones would have taken otherwise.
        seconds_wasted: of the seconds spent, the refused tokens' share.
    """

    attempted: int = 0
    accepted: int = 0
    seconds_spent: float = 0.0
    seconds_saved: float = 0.0
    seconds_wasted: float = 0.0

    @property
    def wasted(self) -> int:
        return self.attempted - self.accepted


class Ledger:
    """Books of one distance; only grows."""

    def __init__(self) -> None:
        self._account = Account()
        self._told = [0.0] * _DECILES
        self._true = [0] * _DECILES
        self._count = [0] * _DECILES

    def book(
        self, attempted: int, accepted: int, seconds_spent: float, seconds_saved: float
    ) -> None:
        """The drafts of one step."""
        old = self._account
        wasted = seconds_spent * (attempted - accepted) / max(1, attempted)
        self._account = Account(
            old.attempted + attempted,
            old.accepted + accepted,
            old.seconds_spent + seconds_spent,
            old.seconds_saved + seconds_saved,
            old.seconds_wasted + wasted,
        )

    def note_chance(self, told: float, is_true: bool) -> None:
        """One guess, verified or not, and what came of it."""
        decile = min(int(told * _DECILES), _DECILES - 1)
        self._told[decile] += told
        self._true[decile] += is_true
        self._count[decile] += 1

    def account(self) -> Account:
        return self._account

    def calibration(self) -> list[CalibrationRow]:
        """By told chance, in tenths; those that never occurred are left out."""
        return [
            CalibrationRow(told / count, true / count, count)
            for told, true, count in zip(self._told, self._true, self._count, strict=True)
            if count
        ]
