"""Frozen slotted values made and copied at a third of the price that ``dataclasses`` asks.

The ``__init__`` of a frozen dataclass goes through ``object.__setattr__``, which looks up each field by name;
``dataclasses.replace`` goes through that with every field as a keyword. A job is made or copied with each
transition, at thousands a second, so here both are generated: straight code that writes the slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["changed", "quick"]

T = TypeVar("T")

_UNSET = object()
"""Stands for a field that gets its default from a factory."""


def quick(kind: type[T]) -> type[T]:
    """Class decorator above ``@dataclass(frozen=True, slots=True)``: an ``__init__`` that writes the slots.

    Signature, defaults and errors for wrong arguments stay those of the dataclass.

    Raises:
        TypeError: the class has no slots of its own for its fields, or a ``__post_init__``.
    """
    if hasattr(kind, "__post_init__"):
        raise TypeError(f"{kind.__name__}: quick() would not run __post_init__")
    names: dict[str, Any] = {"_unset": _UNSET}
    parameters: list[str] = []
    body: list[str] = []
    keywords = False
    members: tuple[Field[Any], ...] = fields(kind)  # type: ignore[arg-type]  # it is a dataclass
    for field in sorted(members, key=lambda member: bool(member.kw_only)):
        name = field.name
        names[f"_set_{name}"] = _writer(kind, name)
        if field.kw_only and not keywords:
            keywords = True
            parameters.append("*")
        value = name
        if field.default_factory is not MISSING:
            names[f"_make_{name}"] = field.default_factory
            parameters.append(f"{name}=_unset")
            value = f"_make_{name}() if {name} is _unset else {name}"
        elif field.default is not MISSING:
            names[f"_default_{name}"] = field.default
            parameters.append(f"{name}=_default_{name}")
        else:
            parameters.append(name)
        body.append(f" _set_{name}(self, {value})")
    made = _generated("__init__", f"(self, {', '.join(parameters)})", body or [" pass"], names)
    made.__qualname__ = f"{kind.__qualname__}.__init__"
    kind.__init__ = made  # type: ignore[method-assign]  # replaced before any instance exists
    return kind


def _writer(kind: type, name: str) -> Callable[[Any, Any], None]:
    member = kind.__dict__.get(name)
    if not hasattr(member, "__set__"):
        raise TypeError(f"{kind.__name__}.{name} is no slot of its own")
    write: Callable[[Any, Any], None] = member.__set__  # type: ignore[union-attr]  # checked above
    return write


def _generated(name: str, signature: str, body: list[str], names: dict[str, Any]) -> Callable[..., Any]:
    source = "\n".join([f"def {name}{signature}:", *body])
    exec(source, names)  # noqa: S102 - made of field names alone, as dataclasses does it
    function: Callable[..., Any] = names[name]
    return function


if TYPE_CHECKING:
    from dataclasses import replace as changed  # checkers know its rules: the fields and their types
else:

    @cache
    def _unfrozen(kind):
        # Of the same layout, so that an instance may become one of ``kind``; and its fields are set by plain
        # assignment, which the interpreter specialises: a third of the price of calling each slot's setter.
        names = [field.name for field in fields(kind)]
        for name in names:
            _writer(kind, name)
        return type(f"{kind.__name__}InTheMaking", (), {"__slots__": tuple(names)})

    @cache
    def _copier(kind, given):
        known = [field.name for field in fields(kind)]
        for name in given:
            if name not in known:
                raise TypeError(f"{kind.__name__} has no field {name!r}")
        body = [" copy = _new(_unfrozen)"]
        for name in known:
            source = f"changes[{name!r}]" if name in given else f"value.{name}"
            body.append(f" copy.{name} = {source}")
        body += [" copy.__class__ = _kind", " return copy"]
        names = {"_new": object.__new__, "_unfrozen": _unfrozen(kind), "_kind": kind}
        return _generated("copy_of", "(value, changes)", body, names)

    def changed(value, /, **changes):
        """A copy of ``value`` with the fields named in ``changes`` replaced. It runs no ``__post_init__``.

        One function is kept for each class and each set of fields that some caller changes.

        Raises:
            TypeError: there is no such field.
        """
        return _copier(value.__class__, tuple(changes))(value, changes)
