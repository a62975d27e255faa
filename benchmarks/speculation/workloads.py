"""Prompts for the benchmark of guesses: three that copy, one that does not.

Each workload makes any number of different prompts from the texts in `data/`; the same number
always makes the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

DATA = Path(__file__).parent / "data"
_NAMES = ("store", "depot", "pantry", "cellar", "magazine", "larder", "shed", "vault")


def _text(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8").strip()


def _lines(name: str, turn: int, count: int) -> list[str]:
    """`count` lines of a file, another cyclic part of it each turn."""
    lines = _text(name).splitlines()
    start = turn * 5 % len(lines)
    return [*lines[start:], *lines[:start]][:count]


def edit_code(turn: int) -> str:
    """A module to be written out again with one word changed."""
    new = _NAMES[turn % len(_NAMES)] + ("" if turn < len(_NAMES) else str(turn))
    return (
        f"Here is a Python module.\n\n```python\n{_text('code.txt')}\n```\n\n"
        f"Write the whole module again, with the class Inventory renamed to {new.title()}. "
        "Change nothing else."
    )


def extract_json(turn: int) -> str:
    """Letters whose facts are to be written as JSON, with one example."""
    letters = "\n".join(_lines("prose.txt", turn, 6))
    return (
        f"{letters}\n\nWrite each of these letters (number {turn}) as a JSON object in a list, "
        'such as {"name": "Anna Berger", "city": "Vienna", "date": "3 March", "count": 12, '
        '"article": "oak chairs", "delivery": "20 April", "telephone": "555-0142"}.'
    )


def continue_list(turn: int) -> str:
    """A structured list of which the beginning is given."""
    hall = _NAMES[turn % len(_NAMES)]
    first = 1 + 3 * (turn // len(_NAMES))
    entries = [
        f"- id: {number}\n  name: {hall}-{number}\n  kind: temperature sensor\n  unit: celsius\n"
        f"  interval_seconds: 60\n  location: {hall}, row {number}\n  enabled: true"
        for number in range(first, first + 4)
    ]
    return (
        "Here is the beginning of a list of sensors in YAML.\n\n```yaml\n"
        + "\n".join(entries)
        + f"\n```\n\nWrite the whole list, from {hall}-{first} to {hall}-{first + 11}."
    )


def chat(turn: int) -> str:
    """A question."""
    questions = _text("questions.txt").splitlines()
    again = turn // len(questions)
    suffix = "" if again == 0 else f" Answer in at most {100 + 10 * again} words."
    return questions[turn % len(questions)] + suffix


WORKLOADS: dict[str, Callable[[int], str]] = {
    "edit code": edit_code,
    "extract JSON": extract_json,
    "continue list": continue_list,
    "chat": chat,
}
