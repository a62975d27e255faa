"""What README.md tells people to type, typed: only the address differs, as 8000 may be taken."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from served_model import WAIT_SECONDS, ServedModel

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str, holding: str) -> list[str]:
    """The README's code blocks of a language that contain a text."""
    found = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [block for block in found if holding in block]


def run(command: list[str], stdin: str) -> str:
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(server: ServedModel) -> None:
    examples = blocks("bash", "curl ")
    assert examples
    for example in examples:
        assert ADDRESS in example
        answer = json.loads(run(["bash", "-eu"], example.replace(ADDRESS, server.url)))
        assert answer["choices"][0]["message"]["content"].strip()
        assert answer["usage"]["completion_tokens"] <= 64


def test_openai_client(server: ServedModel) -> None:
    examples = blocks("python", "from openai import")
    assert examples
    for example in examples:
        assert ADDRESS in example
        assert len(run([sys.executable, "-"], example.replace(ADDRESS, server.url)).strip()) > 10


@pytest.mark.slow
def test_python_interface() -> None:
    examples = blocks("python", "from hotbatch import")
    assert examples
    for example in examples:
        assert run([sys.executable, "-"], example).strip()
