"""Keeps the settings of the person who runs the tests out of them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key or proxy in the environment must neither lock a test out nor lead it away."""
    monkeypatch.delenv("HOTBATCH_API_KEY", raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
