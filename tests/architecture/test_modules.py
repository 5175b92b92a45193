"""Size, names and texts of the modules."""

from __future__ import annotations

import ast
import re

import pytest

from tests.architecture.source_tree import ROOT, SHIPPED, Module, found, modules, place

LONGEST_MODULE = 500
LONGEST_SLEEP_SECONDS = 0.3
FORBIDDEN_WORDS = {"utils", "util", "common", "manager", "helper", "helpers", "misc"}
KEY_ROOT = "/leasekeeper/"
KEY_MODULE = "coordinator.etcd.keys"
OURS = (*SHIPPED, "tests", "scripts")


def words(identifier: str) -> set[str]:
    """Return the lower-case words of a snake_case or CamelCase name."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier).lower().split("_"))


@pytest.mark.parametrize("folder", OURS)
def test_no_module_is_longer_than_500_lines(folder: str) -> None:
    assert {} == {place(m): m.lines for m in modules(folder) if m.lines > LONGEST_MODULE}


@pytest.mark.parametrize("folder", OURS)
def test_no_module_or_class_has_a_name_that_says_nothing(folder: str) -> None:
    def empty_names(module: Module) -> list[str]:
        names = [module.name.rpartition(".")[2]]
        names += [node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
        return [name for name in names if words(name) & FORBIDDEN_WORDS]

    assert {} == {place(m): empty_names(m) for m in modules(folder) if empty_names(m)}


@pytest.mark.parametrize("folder", SHIPPED)
def test_every_module_says_its_one_job(folder: str) -> None:
    assert [] == [place(m) for m in modules(folder) if not ast.get_docstring(m.tree)]


def test_no_key_literal_outside_the_module_that_builds_keys() -> None:
    literals = [
        f"{place(module)}: {text!r}"
        for module in modules(*SHIPPED)
        if module.name != KEY_MODULE
        for text in module.strings()
        if KEY_ROOT in text
    ]

    assert [] == literals


def test_no_test_sleeps_longer_than_a_blink() -> None:
    def is_sleep(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in {"time.sleep", "asyncio.sleep", "sleep"}
            and len(node.args) == 1
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, int | float)
            and node.args[0].value > LONGEST_SLEEP_SECONDS
        )

    sleeps = [
        place(module, getattr(node, "lineno", None))
        for module in modules("tests")
        for node in ast.walk(module.tree)
        if is_sleep(node)
    ]

    assert [] == sleeps


def test_every_ignore_names_its_code() -> None:
    bare = re.compile(r"#\s*(type: ignore(?!\[)|noqa(?!: [A-Z]))")
    places = [
        place(module, number)
        for module in modules(*SHIPPED, "scripts")
        for number, line in enumerate(module.source.splitlines(), start=1)
        if bare.search(line)
    ]

    assert [] == places


def test_every_folder_of_shipped_code_is_a_package() -> None:
    folders = {path.parent for name in SHIPPED for path in found((ROOT / name).rglob("*.py"), name)}

    assert [] == sorted(str(folder) for folder in folders if not (folder / "__init__.py").exists())
