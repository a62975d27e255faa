"""Profiles: kept under their key, used only where they belong and while they are fresh."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hotbatch.engine.ceiling import Ceiling
from hotbatch.executor import profile as profile_module
from hotbatch.executor.profile import Profile, ProfileKey, load_profile, store_profile

KEY = ProfileKey(
    model="some/Model-1B",
    size="2 layers",
    precision="int8",
    kv_dtype="bf16",
    hardware="a processor, 2 threads",
    version="1.0",
)
PROFILE = Profile(
    ceiling=Ceiling(3.2e10, 9e11, 4.5e11, "measured at start"),
    made=1000.0,
    curve=((1, 1, 128, 128, 1, 0.005), (8, 8, 1024, 1024, 8, 0.006)),
    host_seconds=0.0004,
    settings={"max_num_seqs": 64, "threads": 2},
    tuned_for="bursts",
)
DAY = 24 * 3600.0


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "cache_dir", lambda: tmp_path)


def test_what_was_stored_comes_back() -> None:
    assert load_profile(KEY, now=1000.0) is None
    path = store_profile(KEY, PROFILE)
    assert path is not None and path.name.startswith("model-1b-int8-")
    assert load_profile(KEY, now=1000.0) == PROFILE


@pytest.mark.parametrize("name", ["model", "size", "precision", "kv_dtype", "hardware", "version"])
def test_a_foreign_profile_is_not_used(name: str) -> None:
    other = replace(KEY, **{name: "other"})
    assert other.path != KEY.path
    store_profile(KEY, PROFILE)
    assert load_profile(other, now=1000.0) is None
    # Not even when somebody copies the file to where the other would be.
    other.path.write_bytes(KEY.path.read_bytes())
    assert load_profile(other, now=1000.0) is None


def test_a_quick_measurement_is_believed_for_a_day_a_full_one_for_a_month() -> None:
    store_profile(KEY, PROFILE)
    assert load_profile(KEY, now=1000.0 + 0.9 * DAY) is not None
    assert load_profile(KEY, now=1000.0 + 1.1 * DAY) is None
    store_profile(KEY, replace(PROFILE, is_full=True))
    assert load_profile(KEY, now=1000.0 + 29 * DAY) is not None
    assert load_profile(KEY, now=1000.0 + 31 * DAY) is None


def test_one_from_the_future_is_not_used() -> None:
    store_profile(KEY, PROFILE)
    assert load_profile(KEY, now=999.0) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda stored: stored.update(format=99),
        lambda stored: stored["profile"].update(ceiling={"bandwidth": 1.0}),
        lambda stored: stored["profile"]["ceiling"].update(bandwidth=0.0),
        lambda stored: stored["profile"]["ceiling"].update(compute="fast"),
        lambda stored: stored["profile"].update(curve=[[1, 2, 3]]),
        lambda stored: stored["profile"].update(settings=[1]),
        lambda stored: stored.pop("profile"),
    ],
)
def test_a_damaged_profile_is_not_used(damage) -> None:  # type: ignore[no-untyped-def]
    store_profile(KEY, PROFILE)
    stored = json.loads(KEY.path.read_text())
    damage(stored)
    KEY.path.write_text(json.dumps(stored))
    assert load_profile(KEY, now=1000.0) is None


def test_half_a_file_is_not_used() -> None:
    store_profile(KEY, PROFILE)
    KEY.path.write_text(KEY.path.read_text()[:100])
    assert load_profile(KEY, now=1000.0) is None


def test_a_folder_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(profile_module, "cache_dir", lambda: file)
    assert store_profile(KEY, PROFILE) is None
