"""The table of the benchmark of guesses: which rounds count."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "speculation" / "table.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("speculation_table", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def done(repeat: int, **seconds: float) -> dict[str, Any]:
    runs = {name: {"seconds": value, "tokens": 100} for name, value in seconds.items()}
    return {"workload": "chat", "requests": 2, "repeat": repeat, "runs": runs}


def test_of_the_same_prompts_the_least_time_counts_and_sets_are_summed() -> None:
    table = load()
    fast = [done(0, off=2.0, on=1.0, k2=9.0), done(1, off=4.0, on=3.0, k2=2.5)]
    other = [done(2, off=6.0, on=9.0, k2=5.5), done(3, off=7.0, on=3.0, k2=6.0)]
    for rounds in (*fast, *other):
        rounds["runs"]["k=2"] = rounds["runs"].pop("k2")
    records = [{"settings": {"turns": 2}, "rounds": part} for part in (fast, other)]
    figures = table.rates(records)["chat", 2]
    assert figures["off"] == pytest.approx(200 / 8.0)
    assert figures["on"] == pytest.approx(200 / 4.0)
    assert figures["k=2"] == pytest.approx(200 / 8.0)
    row = table.table({("chat", 2): figures}).splitlines()[-1]
    assert row == "| chat | 2 | 25 | 2.00 | 1.00 (k=2) | 2.00 |  |"
