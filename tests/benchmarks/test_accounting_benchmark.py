"""The check of accounts and predictions: it finds what it looks for."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hotbatch.assembly import assemble
from hotbatch.core.cost_model import StepFeatures
from hotbatch.engine.accounting import Cause
from hotbatch.executor import profile as profile_module
from hotbatch.options import EngineOptions

FOLDER = Path(__file__).parents[2] / "benchmarks" / "accounting"


def load() -> ModuleType:
    # Several benchmarks have a run.py, so it is loaded under a name of its own.
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
    spec = importlib.util.spec_from_file_location("accounting_run", FOLDER / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run = load()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory):
    cache = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    patch.setattr(profile_module, "cache_dir", lambda: cache)
    parts = assemble(
        EngineOptions(
            model="tiny", load_format="dummy", precision="int8", kv_cache_memory_bytes=4 << 20
        )
    )
    try:
        yield run.play(parts, 2.0, seed=1)
    finally:
        parts.close()
        patch.undo()


def verdict(played, start: str, *others) -> bool:
    runs = [played, *others]
    (aim,) = [aim for aim in run.aims_of(runs) if aim.text.startswith(start)]
    return aim.is_met


def test_the_load_is_played_whole_and_accounted_for(played) -> None:
    assert played.num_errors == 0
    assert len(played.steps) == len(played.accounts) > 20
    assert verdict(played, "attributed")
    assert verdict(played, "parts below zero")
    assert "wall, by another clock" in run.table_of_causes(played.before, played.after, played.wall)


def test_time_that_nobody_accounts_for_is_seen(played) -> None:
    causes = {**played.after.by_cause, Cause.DECODE: played.after.by_cause[Cause.DECODE] - 0.5}
    after = dataclasses.replace(played.after, by_cause=causes)
    assert not verdict(dataclasses.replace(played, after=after), "attributed")


def steps(ratios: list[float], safe: float = 1.1, cores: float = 2.0) -> list:
    features = StepFeatures(4, 4, 40, 40, 4)
    return [run.Step(features, 4, 1.0, safe, ratio, cores) for ratio in ratios]


def test_predictions_are_judged_by_median_and_tail(played) -> None:
    good = dataclasses.replace(played, steps=steps([1.0] * 95 + [1.2] * 5))
    assert verdict(good, "median") and verdict(good, "95th") and verdict(good, "steps beyond")
    assert not verdict(dataclasses.replace(good, steps=steps([1.1] * 100)), "median")
    spread = dataclasses.replace(good, steps=steps([1.0] * 90 + [1.4] * 10))
    assert not verdict(spread, "95th")
    assert not verdict(spread, "steps beyond")
    # Too careful is wrong as well: room that was there is not used.
    assert not verdict(dataclasses.replace(good, steps=steps([1.0] * 100)), "steps beyond")


def test_one_run_beside_a_busy_neighbour_decides_nothing(played) -> None:
    good = dataclasses.replace(played, steps=steps([1.0] * 95 + [1.2] * 5))
    spread = dataclasses.replace(good, steps=steps([1.0] * 90 + [1.4] * 10))
    assert verdict(good, "95th", spread, good)
    assert not verdict(good, "95th", spread, spread)


def test_the_worst_steps_are_named_and_those_that_were_interrupted_counted() -> None:
    told = run.table_of_worst(
        [*steps([1.0] * 20), *steps([2.0] * 3, cores=1.1), *steps([0.5], cores=2.0)]
    )
    assert "4 of 24 steps" in told
    assert "decode, up to 4 tokens" in told and "3 of them slower" in told
    assert "3 of the 4 had less" in told


def test_steps_are_told_apart_by_kind() -> None:
    prompt = StepFeatures().plus_chunk(0, 30, 1)
    kinds = [run.Step(prompt, number, 1.0, 1.0, 1.0, 2.0).kind for number in (0, 4, 30)]
    assert kinds == ["prefill", "mixed", "decode"]
