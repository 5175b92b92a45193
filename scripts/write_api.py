#!/usr/bin/env python3
"""Write docs/api.md: every public name of the SDK, with its signature and docstring.

scripts/write_api.py            # write docs/api.md
scripts/write_api.py --check    # exit 1 if the file differs, or a public name has no docstring
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "proto" / "gen")]

from worker_sdk._blocking import Blocking, Iterating  # noqa: E402 - the repository is not always installed

OUTPUT = ROOT / "docs" / "api.md"
PACKAGES = ("worker_sdk", "worker_sdk.testing")
WIDTH = 100
DUNDERS = ("__call__", "__await__")

GIVEN = {"Context", "JobWatch", "Lock", "SyncContext", "SyncJobWatch"}
"""Classes that their users are given and do not make."""

_shown: dict[int, str] = {}
"""Where a member was described that several classes inherit."""

HEAD = """\
# The Python SDK, name by name

<!-- Written by scripts/write_api.py from the docstrings; `make check` compares. Do not edit. -->

What stands here is all that is public. [Workers](worker.md) and [locks](locks.md) say how the parts go
together.
"""


class Undocumented(Exception):
    """A public name has no docstring."""


def text() -> str:
    """The whole document."""
    parts = [HEAD]
    for name in PACKAGES:
        parts += _package(importlib.import_module(name))
    return "\n".join(parts)


def _package(package: ModuleType) -> Iterator[str]:
    yield f"## `{package.__name__}`\n"
    yield _block(_doc(package.__name__, package))
    names = sorted(package.__all__)
    errors = [name for name in names if _is_error(getattr(package, name))]
    for name in names:
        if name not in errors:
            yield from _public(name, getattr(package, name))
    if errors:
        module = importlib.import_module("worker_sdk.errors")
        yield "### Errors\n"
        yield _block(_doc(module.__name__, module))
        for name in errors:
            yield from _error(name, getattr(package, name))
        yield ""


def _is_error(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, BaseException)


def is_protocol(found: Any) -> bool:
    """Whether users write such classes, and make none of this one."""
    return bool(getattr(found, "_is_protocol", False))


def _doc(name: str, found: object) -> str:
    own = found.__dict__.get("__doc__") if isinstance(found, type) else getattr(found, "__doc__", None)
    if not own:
        raise Undocumented(f"{name} has no docstring")
    return inspect.cleandoc(own)


def _block(doc: str) -> str:
    return f"```text\n{doc}\n```\n"


def _signature(found: object, name: str) -> str:
    """``name(...)`` as its author wrote it, in lines of its own parameters if one line does not hold it."""
    try:
        signature = inspect.signature(found)  # type: ignore[arg-type]  # what has none raises
    except (TypeError, ValueError):
        return name
    shown: list[str] = []
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    for place, parameter in enumerate(signature.parameters.values()):
        if place == 0 and parameter.name in ("self", "cls") and parameter.annotation is parameter.empty:
            continue
        if (
            parameter.kind is parameter.KEYWORD_ONLY
            and parameter.VAR_POSITIONAL not in kinds
            and "*" not in shown
        ):
            shown.append("*")
        shown.append(_parameter(parameter))
    returns = signature.return_annotation
    end = "" if returns in (signature.empty, "None") or isinstance(found, type) else f" -> {returns}"
    line = f"{name}({', '.join(shown)}){end}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {one},\n" for one in shown) + f"){end}"


def _parameter(parameter: inspect.Parameter) -> str:
    kind = parameter.kind
    stars = "*" if kind is parameter.VAR_POSITIONAL else "**" if kind is parameter.VAR_KEYWORD else ""
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {str(parameter.annotation).strip(chr(34))}"
    default = parameter.default
    if default is parameter.empty:
        return text
    if isinstance(default, enum.Enum):
        return (
            f"{text} = {default}"
            if not isinstance(default, int)
            else f"{text} = {type(default).__name__}.{default.name}"
        )
    plain = isinstance(default, str | bytes | int | float | tuple) or default is None
    return f"{text} = {default!r}" if plain else f"{text} = ..."


def _code(line: str) -> str:
    return f"```python\n{line}\n```\n"


def _public(name: str, found: object) -> Iterator[str]:
    if not isinstance(found, type):
        if callable(found):
            yield f"### {name}\n"
            yield _code(_signature(found, name))
            yield _block(_doc(name, found))
        return
    yield f"### {name}\n"
    if not issubclass(found, enum.Enum) and not is_protocol(found) and name not in GIVEN:
        yield _code(_signature(found, name))
    yield _block(_doc(name, found))
    if issubclass(found, enum.Enum):
        yield "Members: " + ", ".join(f"`{member}`" for member in found.__members__) + ".\n"
    shared: dict[str, list[str]] = {}
    for method, member in sorted(_members(found).items()):
        first = _shown.setdefault(id(member), name)
        if isinstance(member, Blocking | Iterating):
            waits = inspect.unwrap(member.__get__(None, found)).__qualname__
            shared.setdefault(waits.partition(".")[0], []).append(method)
        elif first != name:
            shared.setdefault(first, []).append(method)
        else:
            yield from _member(f"{name}.{method}", member)
    for first, methods in shared.items():
        yield f"As of `{first}`: " + ", ".join(f"`{method}`" for method in methods) + ".\n"


def _members(found: type) -> dict[str, object]:
    """What a class, and its bases of the SDK, say themselves; fields and constants are in its docstring."""
    members: dict[str, object] = {}
    for base in reversed(found.__mro__):
        if base.__module__.partition(".")[0] != "worker_sdk":
            continue
        for name, member in vars(base).items():
            if name.startswith("_") and name not in DUNDERS:
                continue
            if isinstance(member, property | staticmethod | classmethod) or (
                callable(getattr(base, name)) and not isinstance(getattr(base, name), type)
            ):
                members[name] = member
    return members


def _member(name: str, member: object) -> Iterator[str]:
    if isinstance(member, property):
        yield f"#### {name}\n"
        yield _block(_doc(name, member))
        return
    function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
    if not inspect.isfunction(function):  # a descriptor: what it gives at its class
        function = member.__get__(None, object)  # type: ignore[attr-defined]
    yield f"#### {name}\n"
    prefix = "await " if inspect.iscoroutinefunction(function) else ""
    yield _code(_signature(function, prefix + name))
    yield _block(_doc(name, function))


def _error(name: str, found: type) -> Iterator[str]:
    own = [f"`.{member}`" for member, value in sorted(vars(found).items()) if isinstance(value, property)]
    facts = f" Has {', '.join(own)}." if own else ""
    first = " ".join(_doc(name, found).split("\n\n")[0].split())
    base = found.__mro__[1].__name__
    yield f"- `{name}` ({base}): {first}{facts}"


def main() -> int:
    """Write the document, or compare it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    wanted = parser.parse_args()
    try:
        document = text()
    except Undocumented as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if wanted.check:
        if OUTPUT.is_file() and OUTPUT.read_text() == document:
            return 0
        sys.stderr.write(
            f"{OUTPUT.relative_to(ROOT)} is not what the docstrings say: run scripts/write_api.py\n"
        )
        return 1
    OUTPUT.write_text(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
