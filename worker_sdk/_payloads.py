"""From a handler's annotation to what reads its payload, and from a result to JSON. Pure.

====================================  ====================================================================
annotation                            payload
====================================  ====================================================================
bytes                                 as it is
str                                   UTF-8 text
Any, None, bool, int, float, dict,    JSON of that shape; ``int`` is good for ``float``, nothing else is
list, tuple, set, Literal, Enum,      converted; NaN and infinities are refused
datetime, unions of these
dataclass                             a JSON object; unknown keys are ignored, missing ones need a default
msgspec.Struct, pydantic.BaseModel    JSON, judged by that library, which is not imported here
====================================  ====================================================================
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from functools import partial
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from worker_sdk.errors import ConfigError, NoRetry

__all__ = ["BadPayload", "Reader", "json_bytes", "payload_reader", "reader_of"]

Reader = Callable[[bytes], object]
# Takes a JSON value and where it stands; returns what the annotation asks for.
_Check = Callable[[object, str], object]
_SCALARS: Mapping[object, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (float, int),
    str: (str,),
    type(None): (type(None),),
    None: (type(None),),
}
_SCALAR_NAMES = {bool: "bool", int: "int", float: "float", str: "str"}


class BadPayload(NoRetry):
    """The payload is not what the handler's annotation says. The attempt fails, and no retry can help."""

    def __init__(self, message: str) -> None:
        super().__init__(message, type="BadPayload")


def payload_reader(function: Callable[..., object], name: str) -> Reader | None:
    """Return what reads the payload for a handler's second parameter; None: it has only one.

    Raises:
        ConfigError: the handler takes no context, more than two arguments, or a payload of no known type.
    """
    needed = [
        parameter
        for parameter in _parameters(function, name)
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    odd = [p.name for p in needed if p.kind is p.KEYWORD_ONLY]
    if odd or len(needed) > 2:
        raise ConfigError(
            f"handler {name} must take (ctx) or (ctx, payload), and nothing else without default"
        )
    if len(needed) < 2:
        return None
    annotation = needed[1].annotation
    if annotation is inspect.Parameter.empty:
        raise ConfigError(f"handler {name}: say what type its payload {needed[1].name!r} has")
    return reader_of(_resolved(annotation, function, name), name)


def _parameters(function: Callable[..., object], name: str) -> Sequence[inspect.Parameter]:
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"handler {name} does not tell its parameters: {error}") from error


def _resolved(annotation: object, function: Callable[..., object], name: str) -> object:
    """Return the type that an annotation names; only the payload's own is looked at."""
    inner: Any = function
    while isinstance(inner, partial):
        inner = inner.func
    if not hasattr(inner, "__globals__"):
        inner = getattr(inner, "__func__", None) or getattr(type(inner), "__call__", inner)  # noqa: B004
    inner = inspect.unwrap(inner)
    holder = types.SimpleNamespace(__annotations__={"payload": annotation})
    try:
        return typing.get_type_hints(holder, globalns=getattr(inner, "__globals__", {}))["payload"]
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise ConfigError(f"handler {name}: the type of its payload cannot be read: {error}") from error


def reader_of(annotation: object, name: str = "?") -> Reader:
    """Return what turns a payload's bytes into *annotation*; it raises `BadPayload`.

    Raises:
        ConfigError: there is no rule for this annotation.
    """
    if annotation is bytes:
        return lambda payload: payload
    if annotation is str:
        return _text
    if _is_pydantic(annotation):
        return partial(_foreign, annotation.model_validate_json)  # type: ignore[attr-defined]
    if _is_struct(annotation):
        return partial(_foreign, partial(sys.modules["msgspec"].json.decode, type=annotation))
    check = _Compiler(name).check(annotation)
    return lambda payload: check(_parsed(payload), "payload")


def _text(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise BadPayload(f"payload: no UTF-8 at byte {error.start}") from error


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is no JSON")


def _parsed(payload: bytes) -> object:
    try:
        return json.loads(payload, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise BadPayload("payload: nested too deeply") from error
    except ValueError as error:
        raise BadPayload(f"payload: no JSON: {error}") from error


def _foreign(read: Callable[[bytes], object], payload: bytes) -> object:
    try:
        return read(payload)
    except Exception as error:  # whatever a model's own checks raise, the payload is at fault
        raise BadPayload(f"payload: {_message(error)}") from error


def _message(error: Exception) -> str:
    """Return what is wrong and where, without the values: they may be secrets."""
    core = _library("pydantic_core")
    if core is not None and isinstance(error, core.ValidationError):
        found = error.errors(include_url=False, include_context=False, include_input=False)
        return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found)
    return f"{type(error).__name__}: {error}"


def _library(name: str) -> Any:
    """Return a library that somebody else has imported, or None: a model of it cannot exist then."""
    return sys.modules.get(name)


def _is_pydantic(annotation: object) -> bool:
    library = _library("pydantic")
    return library is not None and isinstance(annotation, type) and issubclass(annotation, library.BaseModel)


def _is_struct(annotation: object) -> bool:
    library = _library("msgspec")
    return library is not None and isinstance(annotation, type) and issubclass(annotation, library.Struct)


def _wrong(path: str, wanted: str, value: object) -> BadPayload:
    return BadPayload(f"{path}: must be {wanted}, is {_shape(value)}")


def _shape(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a bool", type(None): "null"}
    return names.get(type(value), "a number")


class _Compiler:
    """Makes checks from annotations, once each, so that a dataclass may contain itself."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._classes: dict[type, _Check] = {}

    def check(self, annotation: object) -> _Check:
        """Return the check of one annotation."""
        if annotation is Any or annotation is object:
            return lambda value, path: value
        try:
            scalar = _SCALARS.get(annotation)
        except TypeError:
            scalar = None
        if scalar is not None:
            return partial(_scalar, scalar, _SCALAR_NAMES.get(scalar[0], "null"))
        origin = get_origin(annotation)
        if origin is typing.Annotated:
            return self.check(get_args(annotation)[0])
        if origin is Literal:
            return partial(_literal, get_args(annotation))
        if origin in (Union, types.UnionType):
            return partial(_union, [self.check(one) for one in get_args(annotation)])
        if isinstance(annotation, type) and origin is None:
            found = self._class(annotation)
            if found is not None:
                return found
        return self._container(annotation, origin or annotation, get_args(annotation))

    def _class(self, kind: type) -> _Check | None:
        if _is_pydantic(kind):
            return lambda value, path: _part(kind.model_validate, value, path)  # type: ignore[attr-defined]
        if _is_struct(kind):
            return lambda value, path: _part(partial(_library("msgspec").convert, type=kind), value, path)
        if dataclasses.is_dataclass(kind):
            return self._dataclass(kind)
        if issubclass(kind, Enum):
            return partial(_enum, kind)
        return _datetime if kind is datetime else None

    def _container(self, annotation: object, origin: object, arguments: tuple[object, ...]) -> _Check:
        any_item = arguments[0] if arguments else Any
        if origin in (list, set, frozenset) or getattr(origin, "__name__", "") == "Sequence":
            make = origin if origin in (set, frozenset) else list
            return partial(_items, self.check(any_item), make)
        if origin is tuple:
            if not arguments or (len(arguments) == 2 and arguments[1] is Ellipsis):
                return partial(_items, self.check(any_item), tuple)
            return partial(_tuple, [self.check(one) for one in arguments])
        if origin is dict or getattr(origin, "__name__", "") == "Mapping":
            if arguments and arguments[0] is not str:
                raise ConfigError(f"handler {self._name}: {annotation}: the keys of a JSON object are texts")
            return partial(_object, self.check(arguments[1] if arguments else Any))
        raise ConfigError(f"handler {self._name}: there is no rule how to read a payload as {annotation!r}")

    def _dataclass(self, kind: type) -> _Check:
        if kind in self._classes:
            return lambda value, path: self._classes[kind](value, path)
        self._classes[kind] = lambda value, path: value  # until it is made: only compiling may meet it
        try:
            hints = typing.get_type_hints(kind)
        except (NameError, TypeError) as error:
            raise ConfigError(f"handler {self._name}: {kind.__name__} cannot be read: {error}") from error
        fields = [one for one in dataclasses.fields(kind) if one.init]
        checks = {one.name: self.check(hints[one.name]) for one in fields}
        needed = {
            one.name
            for one in fields
            if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        }
        self._classes[kind] = partial(_dataclass, kind, checks, needed)
        return self._classes[kind]


def _scalar(types: tuple[type, ...], name: str, value: object, path: str) -> object:
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise _wrong(path, name, value)
    if name != "float" or isinstance(value, float):
        return value
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError as error:
        raise BadPayload(f"{path}: too large for a float") from error


def _literal(choices: tuple[object, ...], value: object, path: str) -> object:
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    raise _wrong(path, f"one of {', '.join(map(repr, choices))}", value)


def _union(checks: Sequence[_Check], value: object, path: str) -> object:
    refusals = []
    for check in checks:
        try:
            return check(value, path)
        except BadPayload as error:
            refusals.append(str(error))
    raise BadPayload(" or ".join(dict.fromkeys(refusals)))


def _enum(kind: type[Enum], value: object, path: str) -> object:
    for member in kind:
        if type(member.value) is type(value) and member.value == value:
            return member
    raise _wrong(path, f"a {kind.__name__}", value)


def _datetime(value: object, path: str) -> object:
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value)
        except ValueError:
            pass
    raise _wrong(path, "a date and time in ISO 8601", value)


def _items(check: _Check, make: Callable[[list[object]], object], value: object, path: str) -> object:
    if not isinstance(value, list):
        raise _wrong(path, "a list", value)
    try:
        return make([check(item, f"{path}[{index}]") for index, item in enumerate(value)])
    except TypeError as error:
        raise BadPayload(f"{path}: {error}") from error  # an item of a set that has no hash


def _tuple(checks: Sequence[_Check], value: object, path: str) -> object:
    if not isinstance(value, list) or len(value) != len(checks):
        raise _wrong(path, f"a list of {len(checks)}", value)
    pairs = zip(checks, value, strict=True)
    return tuple(check(item, f"{path}[{index}]") for index, (check, item) in enumerate(pairs))


def _object(check: _Check, value: object, path: str) -> object:
    if not isinstance(value, dict):
        raise _wrong(path, "an object", value)
    return {key: check(item, f"{path}.{key}") for key, item in value.items()}


def _dataclass(
    kind: Callable[..., object], checks: Mapping[str, _Check], needed: set[str], value: object, path: str
) -> object:
    if not isinstance(value, dict):
        raise _wrong(path, "an object", value)
    missing = sorted(needed - value.keys())
    if missing:
        raise BadPayload(f"{path}: lacks {', '.join(missing)}")
    given = {key: check(value[key], f"{path}.{key}") for key, check in checks.items() if key in value}
    return _part(lambda arguments: kind(**arguments), given, path)


A = TypeVar("A")


def _part(make: Callable[[A], object], value: A, path: str) -> object:
    """Make one part by code of the user's, whose every refusal is the payload's fault."""
    try:
        return make(value)
    except BadPayload:
        raise
    except Exception as error:  # as in `_foreign`
        raise BadPayload(f"{path}: {_message(error)}") from error


def json_bytes(value: object) -> bytes:
    """Return JSON of a value, in which dataclasses, enums, times and models may stand.

    Raises:
        TypeError, ValueError, RecursionError: it has none.
    """
    return json.dumps(value, default=_plain).encode()


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, set | frozenset):
        return list(value)
    if _is_pydantic(type(value)):
        return value.model_dump(mode="json")  # type: ignore[attr-defined]
    if _is_struct(type(value)):
        return _library("msgspec").to_builtins(value)
    raise TypeError(f"{type(value).__name__} has no JSON")
