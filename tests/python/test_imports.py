"""Checks that code for machines with GPUs imports existing names, and that the client has no circle of imports."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
HERE, THERE = TESTS / "python", [TESTS / "spec", TESTS / "multi_gpu"]


def names_of(path):
    """Returns the names that a module defines or imports."""
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
def test_imported_names_exist(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            for module in [path.parent / f"{node.module}.py", HERE / f"{node.module}.py"]:
                if module.is_file():
                    assert {alias.name for alias in node.names} <= names_of(module), f"line {node.lineno}"


CLIENT = TESTS.parent / "python" / "gradcodec"


def imports_of(path):
    """Yields the modules of the client that a file imports anywhere, also under TYPE_CHECKING and in functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield from [node.module] if node.module else [alias.name for alias in node.names]


def test_no_two_modules_of_the_client_import_each_other():
    modules = {path.stem: set(imports_of(path)) for path in CLIENT.glob("*.py") if not path.stem.startswith("__")}
    assert {"_lib", "_library", "_codecs", "_torch_groups", "jax"} <= modules.keys()
    assert all(used <= modules.keys() for used in modules.values()), modules
    rest = dict(modules)
    while free := [name for name, used in rest.items() if not used & rest.keys()]:
        for name in free:
            del rest[name]
    assert not rest, f"circles among {sorted(rest)}"


def test_modules_of_owners_do_not_import_modules_of_objects():
    below = set(imports_of(CLIENT / "_lib.py"))
    assert below == {"_abi", "_errors"}, below
