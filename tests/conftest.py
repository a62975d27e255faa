"""Keeps the settings of the person who runs the tests out of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotbatch.executor import precision, profile


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key or proxy in the environment must neither lock a test out nor lead it away."""
    monkeypatch.delenv("HOTBATCH_API_KEY", raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(scope="session")
def _profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _no_profiles_from_outside(monkeypatch: pytest.MonkeyPatch, _profiles: Path) -> None:
    """What `hotbatch tune` found here must not set a test's options. One folder for all tests,
    so that the machine is measured once."""
    monkeypatch.setattr(profile, "cache_dir", lambda: _profiles)


@pytest.fixture(autouse=True)
def _precision_without_a_stopwatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All precisions are about as fast, so `auto` means the first: with models of a few kilobytes
    the stopwatch decides otherwise now and then, and later tests would find its choice."""
    monkeypatch.setattr(precision, "product_seconds", lambda *_: 1.0)
