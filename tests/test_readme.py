"""The README's examples, run as they stand there against a real server of the embedded model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ADDRESS = "http://127.0.0.1:8000"

pytestmark = pytest.mark.slow


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def example(language: str, containing: str) -> str:
    [found] = [text for text in examples(language) if containing in text]
    return found


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    command = [sys.executable, "-m", "hotbatch.cli", "serve", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "HOTBATCH_API_KEY"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stderr is not None
            ready = next((line for line in server.stderr if line.startswith("Serving on ")), None)
            assert ready is not None, f"the server ended with {server.wait()}"
            yield ready.split()[2]
        finally:
            server.terminate()
            server.communicate(timeout=60)


def test_curl(address: str) -> None:
    command = example("bash", "curl").replace(ADDRESS, address)
    assert address in command
    answer = run(["bash", "-c", command])
    assert '"role":"assistant"' in answer.replace(" ", "")


def test_openai(address: str) -> None:
    script = example("python", "import OpenAI").replace(ADDRESS, address)
    assert address in script
    assert run([sys.executable, "-c", script]).strip()


def test_llm() -> None:
    assert run([sys.executable, "-c", example("python", "LLM(")]).strip()


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name in ("README.md", "CONTRIBUTING.md", "docs/architecture.md"):
        for target in re.findall(r"`?make ([a-z]+)", (ROOT / name).read_text()):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{name}: make {target}"


def test_every_file_that_the_documents_name_exists() -> None:
    package = ROOT / "src" / "hotbatch"
    names = {path.name for path in package.rglob("*.py")}
    for document in ("README.md", "CONTRIBUTING.md", "docs/architecture.md"):
        text = (ROOT / document).read_text()
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / document).parent.joinpath(link).exists(), f"{document}: {link}"
        for path in re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", text):
            known = (package / path).exists() or (ROOT / path).exists()
            assert known or ("/" not in path and path in names), f"{document}: {path}"
