"""`hotbatch top`: what /live says, drawn with letters."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from hotbatch.dashboard.terminal import BatchPicture, cell_of

HELLO = {
    "model": "m", "precision": "int8", "device": "cpu", "seats": 8,
    "classes": ["batch", "standard", "interactive"],
}  # fmt: skip
RUNNING, PAUSED, EVICTED, DONE, CUT = range(5)


def gauges(steps: int = 0, generated: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "totals": {"steps": steps}, "generated": generated, "running": 2, "paused": 1,
        "waiting": [0, 0, 3], "waits": [0.0, 0.0, 1.5], "kv": [10, 10, 20], "healthy": True,
        "accepting": True, "latency_ms": [[None, None], [None, None], [[80.0, 120.0], None]],
        **changes,
    }  # fmt: skip


def lane(number: int, rank: int, state: int, *work: int) -> list[int]:
    """Prompt, decode, drafts, accepted."""
    return [number, rank, state, *work, *[0] * (4 - len(work)), 50]


def picture(*frames: dict[str, Any]) -> BatchPicture:
    shown = BatchPicture()
    shown.take("hello", HELLO)
    for frame in frames:
        shown.take("frame", frame)
    return shown


def drawn(shown: BatchPicture, height: int = 30) -> list[str]:
    console = Console(width=60, height=height, record=True, color_system=None)
    with console.capture() as capture:
        console.print(shown, height=height)
    return capture.get().splitlines()


@pytest.mark.parametrize(
    ("work", "glyph"),
    [
        ([RUNNING, 30, 0, 0, 0], "█"),
        ([RUNNING, 0, 1, 0, 0], "▄"),
        ([RUNNING, 0, 3, 4, 2], "▆"),
        ([RUNNING, 0, 1, 4, 0], "▄"),
        ([RUNNING, 0, 0, 0, 0], "─"),
        ([PAUSED, 0, 0, 0, 0], "╌"),
        ([EVICTED, 0, 0, 0, 0], "┄"),
        ([CUT, 0, 0, 0, 0], "✕"),
        ([DONE, 0, 0, 0, 0], " "),
    ],
)
def test_each_deed_has_its_letter(work: list[int], glyph: str) -> None:
    assert cell_of(work, "blue").glyph == glyph


def test_drafts_that_were_all_dropped_are_red() -> None:
    assert cell_of([RUNNING, 0, 1, 4, 0], "blue").style == "red"
    assert cell_of([RUNNING, 0, 2, 4, 1], "blue").style == "blue"


def test_lanes_grow_to_the_right_and_a_freed_one_is_taken_again() -> None:
    shown = picture(
        {"t": 1.05, "lanes": lane(1, 2, RUNNING, 30) + lane(2, 0, RUNNING, 8), "gauges": gauges()},
        {"t": 1.15, "lanes": lane(1, 2, RUNNING, 0, 1) + lane(2, 0, PAUSED)},
        {"t": 1.25, "lanes": lane(2, 0, PAUSED)},
        {"t": 1.35, "lanes": lane(2, 0, PAUSED) + lane(3, 1, RUNNING, 5)},
    )
    lines = [line for line in drawn(shown) if line.rstrip().endswith(("█", "╌"))]
    assert len(lines) == 2
    assert lines[0].split() == ["standard", "█"], "in the lane that the first one left"
    assert lines[1].split() == ["batch", "█╌╌╌"]


def test_figures_are_rates_between_two_gauges() -> None:
    shown = picture(
        {"t": 1.0, "lanes": [], "gauges": gauges(steps=100, generated=1000)},
        {"t": 3.0, "lanes": [], "gauges": gauges(steps=140, generated=1600)},
    )
    text = "\n".join(drawn(shown))
    assert "300 tokens/s" in text and "20 steps/s" in text
    assert "2/8 running" in text and "3 waiting" in text and "25% KV" in text
    assert "the batch is empty" in text
    assert "1.5 s" in text and "80 / 120 ms" in text


def test_what_has_no_room_is_counted() -> None:
    lanes = [number for index in range(30) for number in lane(index, 1, RUNNING, 0, 1)]
    lines = drawn(picture({"t": 1.0, "lanes": lanes, "gauges": gauges()}), height=20)
    assert sum("standard" in line and "▄" in line for line in lines) == 10
    assert any("and 20 more lanes" in line for line in lines)


def test_trouble_is_told_at_the_top() -> None:
    ill = picture({"t": 1.0, "lanes": [], "gauges": gauges(healthy=False)})
    assert "the model's steps fail" in drawn(ill)[0]
    leaving = picture({"t": 1.0, "lanes": [], "gauges": gauges(accepting=False)})
    assert "shutting down" in drawn(leaving)[0]


def test_a_new_server_begins_anew() -> None:
    shown = picture({"t": 9.0, "lanes": lane(1, 1, RUNNING, 0, 1), "gauges": gauges()})
    shown.take("hello", HELLO | {"model": "another"})
    shown.take("frame", {"t": 1.0, "lanes": [], "gauges": gauges()})
    text = drawn(shown)
    assert "another" in text[0] and any("the batch is empty" in line for line in text)
