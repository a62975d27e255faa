"""Ranks: what a request competes as, from the lowest to the highest.

Each service class has one. Between batch work and all that was promised something soon stand two
more. `LATE` are requests of the upper classes that cannot keep their promise any more
(`lateness`): they go on with what the others leave, and displace nobody who can still be served
in time. `PROMISED` is batch work that was promised a first token, and can keep that if it is begun
soon: it goes before those that are late already. Above all stands whoever is owed a share now, of
the batch class or of those that are long overdue (`owed_share`).
"""

from __future__ import annotations

import enum


class Rank(enum.IntEnum):
    """A higher rank goes first and displaces a lower one."""

    BATCH = 0
    LATE = 1
    PROMISED = 2
    STANDARD = 3
    INTERACTIVE = 4
    OWED = 5


RANK_OF = (Rank.BATCH, Rank.STANDARD, Rank.INTERACTIVE)
"""By service class: the rank of a request of it that nothing lifted and nothing made late."""

IN_TURN = frozenset((Rank.BATCH, Rank.PROMISED, Rank.STANDARD, Rank.INTERACTIVE))
"""The ranks in which tenants take turns, each with books of its own."""

DESCENDING = tuple(reversed(Rank))


def late_key(service_class: int, order: int = 0) -> tuple[float, ...]:
    """The place of a late one among its like: by class, then by age."""
    return (-service_class, order)
