"""That what only machines with GPUs run imports what there is."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
HERE, THERE = TESTS / "python", [TESTS / "spec", TESTS / "multi_gpu"]


def names_of(path):
    """Whatever a module defines or imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


@pytest.mark.parametrize("path", [path for folder in THERE for path in sorted(folder.glob("*.py"))], ids=lambda path: path.name)
def test_names_that_are_imported_are_there(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            for module in [path.parent / f"{node.module}.py", HERE / f"{node.module}.py"]:
                if module.is_file():
                    assert {alias.name for alias in node.names} <= names_of(module), f"line {node.lineno}"
