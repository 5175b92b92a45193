"""What the demo's handlers do: count the lines, functions and classes of a Python file, or of a part of it.

A file that cannot be parsed is a result as good as any other: it would not parse the next time either.
"""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

__all__ = ["Counts", "ParseStatus", "count_file", "count_lines", "count_source"]


class ParseStatus(StrEnum):
    """How the parsing of a file went."""

    PARSED = "parsed"
    # Not Python: a syntax error, null bytes, an encoding that is not what the file says.
    SYNTAX_ERROR = "syntax_error"
    # The parser gave up: nested too deeply, or too large.
    TOO_COMPLEX = "too_complex"
    # The file is gone, or may not be read.
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What was found. ``functions`` and ``classes`` are 0 where the file did not parse."""

    status: ParseStatus
    lines: int
    functions: int = 0
    classes: int = 0


def count_lines(source: bytes) -> int:
    """Lines as Python counts them: ended by LF, CR or CRLF, the last one perhaps by nothing."""
    return len(source.splitlines())


def count_source(source: bytes, first: int, last: int) -> Counts:
    """Count what begins in lines ``first`` to ``last`` (from 1, both included) of a file's bytes.

    The whole file is parsed, as a part of one is hardly ever Python; its declared encoding counts.
    """
    lines = max(0, min(last, count_lines(source)) - first + 1)
    try:
        with warnings.catch_warnings():
            # The parser warns of odd escapes; whose they are is not our business.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # ValueError: null bytes
        return Counts(status=ParseStatus.SYNTAX_ERROR, lines=lines)
    except (RecursionError, MemoryError):
        return Counts(status=ParseStatus.TOO_COMPLEX, lines=lines)
    functions = classes = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions += first <= node.lineno <= last
        elif isinstance(node, ast.ClassDef):
            classes += first <= node.lineno <= last
    return Counts(status=ParseStatus.PARSED, lines=lines, functions=functions, classes=classes)


def count_file(path: Path, first: int, last: int) -> Counts:
    """`count_source` of a file; one that cannot be read is a result too."""
    try:
        source = path.read_bytes()
    except OSError:
        return Counts(status=ParseStatus.UNREADABLE, lines=0)
    return count_source(source, first, last)
