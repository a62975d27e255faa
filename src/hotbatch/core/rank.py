"""Ranks: what a request competes as, from the lowest to the highest.

Each service class has one. Between batch work and all that was promised something soon stands
`LATE`: requests of the upper classes that cannot keep their promise any more (`lateness`). They
go on with what the others leave, and displace nobody who can still be served in time. Above all
stands whoever is owed a share now, of the batch class or of those that are long overdue
(`owed_share`).
"""

from __future__ import annotations

import enum

from hotbatch.core.service_class import ServiceClass


class Rank(enum.IntEnum):
    """A higher rank goes first and displaces a lower one."""

    BATCH = 0
    LATE = 1
    STANDARD = 2
    INTERACTIVE = 3
    OWED = 4


RANK_OF = (Rank.BATCH, Rank.STANDARD, Rank.INTERACTIVE)
"""By service class: the rank of a request of it that nothing lifted and nothing made late."""

DESCENDING = tuple(reversed(Rank))


def class_of_rank(rank: int) -> ServiceClass | None:
    """The class that a rank belongs to; None for those that stand between and above."""
    return ServiceClass(RANK_OF.index(rank)) if rank in RANK_OF else None
