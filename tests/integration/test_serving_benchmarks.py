"""The benchmarks of the server, at sizes that only show that they work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "serving"


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / script), *options], capture_output=True, text=True
    )


@pytest.mark.slow
def test_soak() -> None:
    done = run("soak.py", "--requests", "50", "--concurrency", "16", "--max-growth-mb", "300")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no leak, no error" in done.stdout and "hung up" in done.stdout
    assert done.stdout.startswith("machine ")


@pytest.mark.slow
def test_soak_fails_when_something_is_wrong() -> None:
    done = run("soak.py", "--requests", "10", "--max-growth-mb", "-1000")
    assert done.returncode == 1
    assert "WRONG: memory grew" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("least", "code"), [("0.1", 0), ("1000", 1)])
def test_throughput(least: str, code: int) -> None:
    small = ("--concurrency", "1,4", "--rounds", "1", "--repeats", "1")
    done = run("throughput.py", *small, "--output-len", "8", "--require", f"4:{least}")
    assert done.returncode == code, done.stdout + done.stderr
    assert "output tok/s" in done.stdout
    assert ("too little" in done.stdout) == bool(code)
