"""Guesses that pay: tokens computed before anybody knows that they are asked for.

The walk of a guess, one module a station: `suffix_index` finds what followed the last time,
`continuing` how a text may go on, `guessing` says whom it pays to ask, `history` keeps what tenants
were answered, `acceptance` knows how often such guesses come true, `pricing` decides how many a
step computes, `speculator` joins them, `ledger` keeps the books.
`draft_model` is a second source: it says when a smaller model is asked, and what for.
Whole requests are guessed by what they follow (`successors`, `frames`); `answers` keeps what is
known of answers, `ahead` the books of such guesses, `ahead_pricing` says when they pay. `warming`
computes what the next turn of a conversation begins with.
"""

from hotbatch.core.speculation.ahead import AheadBook, Fate, GuessNews
from hotbatch.core.speculation.continuing import Texts
from hotbatch.core.speculation.draft_model import DraftModel, DraftModelShape
from hotbatch.core.speculation.ledger import Account, CalibrationRow
from hotbatch.core.speculation.speculator import Drafter, EachAlone, Speculator

__all__ = [
    "Account",
    "AheadBook",
    "CalibrationRow",
    "DraftModel",
    "DraftModelShape",
    "Drafter",
    "EachAlone",
    "Fate",
    "GuessNews",
    "Speculator",
    "Texts",
]
