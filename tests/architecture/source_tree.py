"""The files that the architecture tests look at.

Every listing fails when it finds nothing: a rule that matches no file proves nothing.
"""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("coordinator", "worker_sdk")
GENERATED = ROOT / "proto" / "gen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One Python source file, parsed."""

    path: Path
    name: str
    source: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        """Number of lines."""
        return self.source.count("\n") + 1

    def imports(self) -> Iterator[str]:
        """Yield the absolute dotted name of everything imported anywhere in the file."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def strings(self) -> Iterator[str]:
        """Yield the text of every string and bytes literal that is not a docstring."""
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant) and id(node) not in docstrings:
                if isinstance(node.value, str):
                    yield node.value
                elif isinstance(node.value, bytes):
                    yield node.value.decode("latin-1")


def found(paths: Iterator[Path], what: str) -> list[Path]:
    """Return *paths* sorted.

    Raises:
        AssertionError: there are none.
    """
    listed = sorted(path for path in paths if "__pycache__" not in path.parts)
    assert listed, f"found no {what}"
    return listed


@functools.cache
def modules(*folders: str) -> tuple[Module, ...]:
    """Return every Python module below the given folders of the repository."""
    listed = []
    for folder in folders:
        for path in found((ROOT / folder).rglob("*.py"), f"Python module below {folder}"):
            source = path.read_text()
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            listed.append(Module(path=path, name=name, source=source, tree=ast.parse(source, str(path))))
    return tuple(listed)


@functools.cache
def pyproject() -> dict[str, Any]:
    """Return pyproject.toml, parsed."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def place(module: Module, line: int | None = None) -> str:
    """Return a clickable place for a failure message."""
    path = str(module.path.relative_to(ROOT))
    return path if line is None else f"{path}:{line}"
