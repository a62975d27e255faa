"""Whose something is: what was learnt of one owner is never used for another."""

from __future__ import annotations

from typing import NamedTuple


class Owner(NamedTuple):
    """A tenant, and the `cache_salt` that it may keep some of its requests apart by."""

    tenant: str
    cache_salt: str | None
