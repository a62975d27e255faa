"""The benchmarks of guessing in virtual time, made short."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (ROOT, ROOT / "policies", ROOT / "speculation"):
        monkeypatch.syspath_prepend(str(folder))
    for name in ("workloads", "machine"):  # other benchmarks have modules of these names
        sys.modules.pop(name, None)


def load(name: str) -> Any:
    return importlib.import_module(name)


def test_who_was_there_before_stays() -> None:
    day = load("mixed_day")
    clients = day.presence([5, 20, 5])
    assert len(clients) == 20
    staying = [client for client in clients if client[2:] == (0, 2)]
    assert len(staying) == 5
    for part, count in enumerate([5, 20, 5]):
        there = [kind for kind, _, first, last in clients if first <= part <= last]
        assert sorted(there) == sorted(day.kinds_of(count))


def test_a_short_day_has_all_kinds_and_guesses_pay() -> None:
    day = load("mixed_day")
    arguments = day.parse(["--clients", "5", "--seconds", "40", "--seeds", "0"])
    sides = {}
    for speculates in (False, True):
        parts, world = day.virtual_day(arguments, speculates, 0)
        sides[speculates] = day.figures(parts)
        assert {row["kind"] for row in sides[speculates]} == set(day.KINDS)
        assert ("token" in world.scheduler.stats().guesses) == speculates
    _, gains = day.compare(sides[False], sides[True], [5])
    assert gains["job"] > 2.0
    assert gains["all"] > 1.2


def test_nothing_is_lost_where_nothing_can_be_gained() -> None:
    harm = load("harm")
    arguments = harm.parse(["--requests", "80"])
    off, _ = harm.virtual(arguments, False, None, 0)
    on, world = harm.virtual(arguments, True, None, 0)
    assert on["tok_per_s"] > 0.98 * off["tok_per_s"]
    assert on["ttft_p99"] < 1.02 * off["ttft_p99"]
    assert world.scheduler.stats().guesses["request"].attempted == 0
