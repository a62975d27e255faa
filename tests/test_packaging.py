"""What the package promises as a whole: its rooms are fenced, and torch stays unloaded."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hotbatch

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "hotbatch"
HEAVY = ("torch", "transformers", "triton", "matplotlib")
COMPOSITION = {"assembly", "draft_model", "chat", "cli", "llm", "options", "profiled", "tune"}


def rooms() -> set[str]:
    return {module.name for module in pkgutil.iter_modules(hotbatch.__path__) if module.ispkg}


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def loaded_after(statement: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter holds after a statement."""
    script = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


def test_every_room_has_a_contract() -> None:
    contracts = project()["tool"]["importlinter"]["contracts"]  # type: ignore[index]
    fenced = {name for contract in contracts for name in contract["source_modules"]}
    assert fenced == {f"hotbatch.{room}" for room in rooms()}


def test_every_contract_knows_every_room() -> None:
    """Each room is either forbidden to another or named as allowed in the contract's title."""
    for contract in project()["tool"]["importlinter"]["contracts"]:  # type: ignore[index]
        [source] = contract["source_modules"]
        named = {name.removeprefix("hotbatch.") for name in contract["forbidden_modules"]}
        allowed = rooms() - named - {source.removeprefix("hotbatch.")}
        assert all(room in contract["name"] for room in allowed), (contract["name"], allowed)
        assert named >= COMPOSITION


def test_nothing_stands_outside_the_rooms_but_the_composition() -> None:
    modules = {module.name for module in pkgutil.iter_modules(hotbatch.__path__)}
    assert modules - rooms() <= COMPOSITION


def test_core_uses_the_standard_library_only() -> None:
    for path in sorted((PACKAGE / "core").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top == "hotbatch" or top in sys.stdlib_module_names, f"{path}: {name}"


def test_importing_core_loads_neither_torch_nor_numpy() -> None:
    loaded = loaded_after(
        "import hotbatch.core, pkgutil, importlib\n"
        "for m in pkgutil.walk_packages(hotbatch.core.__path__, 'hotbatch.core.'):\n"
        "    importlib.import_module(m.name)"
    )
    assert "hotbatch" in loaded
    assert not loaded & {*HEAVY, "numpy"}


@pytest.mark.parametrize(
    "module",
    [
        "hotbatch.assembly",
        "hotbatch.engine.async_engine",
        "hotbatch.executor.cpu_executor",
        "hotbatch.server",
        "hotbatch.text.tokenizer",
    ],
)
def test_serving_on_cpu_never_loads_torch(module: str) -> None:
    assert not loaded_after(f"import {module}") & set(HEAVY)


def test_the_command_line_loads_nothing_heavy() -> None:
    loaded = loaded_after("import hotbatch.cli")
    assert not loaded & {*HEAVY, "numpy", "fastapi", "uvicorn", "tokenizers"}


def test_every_module_opens_with_prose() -> None:
    bare = [
        str(path.relative_to(ROOT))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert not bare


def test_constraints_pin_every_dependency() -> None:
    """A dependency that constraints.txt does not pin makes set-up differ from day to day."""
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    facts = project()["project"]
    assert isinstance(facts, dict)
    wanted = [*facts["dependencies"]]
    for extra in facts["optional-dependencies"].values():
        wanted += extra
    for requirement in wanted:
        name = requirement.split(">")[0].split("[")[0].strip().lower().replace("_", "-")
        assert name in pinned | {"hotbatch"}, f"{name} is not in constraints.txt"
