"""The regret benchmark: what is fixed in its grid, and what it holds tuning against."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "tuning"
sys.path[:0] = [str(FOLDER), str(FOLDER.parent), str(FOLDER.parent / "policies")]

import regret  # noqa: E402

from hotbatch.tuning import Figures, Settings, Targets  # noqa: E402


def test_each_pair_is_in_the_grid_in_three_ways() -> None:
    ways = [regret.is_first_come, regret.is_still, regret.has_loops]
    assert all(sum(way(settings) for way in ways) == 1 for settings in regret.grid())
    pairs = [
        {(s.max_num_seqs, s.max_num_batched_tokens) for s in filter(way, regret.grid())}
        for way in ways
    ]
    assert pairs[0] == pairs[1] == pairs[2]
    still = regret.Still(8, 64).policies()
    assert still.deadlines and not still.online and Settings(8, 64).policies().online


def test_held_still_chunks_are_as_large_as_the_budget() -> None:
    setup = regret.Setup("documents", 30, 1, Targets(1.0, 0.03), regret.documented_curve())
    still = regret.evaluate((setup, regret.Still(64, 2048)))
    loops = regret.evaluate((setup, Settings(64, 2048)))
    assert loops.goodput > 1.2 * still.goodput, "steps of 2,048 tokens are felt by all"


def outcome(tuned: float, still: float) -> regret.Outcome:
    figures = {settings: Figures(1.0, 1.0, 1.0) for settings in regret.grid()}
    figures[Settings(8, 64)] = Figures(10.0, 1.0, 1.0)
    figures[Settings(16, 64)] = Figures(tuned, 1.0, 1.0)
    figures[regret.Still(8, 64)] = Figures(still, 1.0, 1.0)
    return regret.Outcome("made up", Settings(16, 64), figures)


@pytest.mark.parametrize(
    ("tuned", "still", "missed"), [(9.9, 9.0, 0), (9.4, 9.0, 1), (9.6, 9.7, 1), (9.0, 9.5, 2)]
)
def test_both_aims_are_checked(
    tuned: float, still: float, missed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert regret.report([outcome(tuned, still)]) == missed
    assert capsys.readouterr().out.count("MISSED") == missed
