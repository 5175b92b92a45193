"""Which function runs which type and where, and what a claim call asks for on their behalf."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

from worker_sdk._payloads import Reader, payload_reader
from worker_sdk._work import QueueTypes
from worker_sdk.context import Context, SyncContext
from worker_sdk.errors import ConfigError
from worker_sdk.process_context import ProcessContext

__all__ = [
    "AsyncFunction",
    "Handler",
    "HandlerTable",
    "PoolName",
    "ProcessFunction",
    "SyncFunction",
    "bind_process",
]

AsyncFunction = Callable[[Context], Awaitable[object]] | Callable[[Context, Any], Awaitable[object]]
SyncFunction = Callable[[SyncContext], object] | Callable[[SyncContext, Any], object]
ProcessFunction = Callable[[ProcessContext], object] | Callable[[ProcessContext, Any], object]
PoolName = Literal["loop", "thread", "process"]

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A function for one type; empty queues: all that the worker serves. One of the last three is set.

    ``in_process`` names the function as a child process imports it: ``module:qualified.name``.
    """

    type: str
    queues: frozenset[str]
    on_loop: Callable[[Context], Awaitable[object]] | None = None
    in_thread: Callable[[SyncContext], object] | None = None
    in_process: str | None = None


def _is_async(function: Callable[..., object]) -> bool:
    """Return whether calling *function*, which may be an object with ``__call__``, gives a coroutine."""
    if inspect.iscoroutinefunction(function):
        return True
    return inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _on_loop(function: Callable[..., Any], read: Reader | None) -> Callable[[Context], Awaitable[object]]:
    if read is None:
        return function

    @wraps(function)
    async def handle(ctx: Context) -> object:
        return await function(ctx, read(ctx.payload))

    return handle


def _in_thread(function: Callable[..., object], read: Reader | None) -> Callable[[Any], object]:
    if read is None:
        return function

    @wraps(function)
    def handle(ctx: Any) -> object:
        return function(ctx, read(ctx.payload))

    return handle


def bind_process(target: str) -> Callable[[ProcessContext], object]:
    """Import the function that ``module:qualified.name`` leads to, in a child process.

    Raises:
        Exception: whatever the import raises.
    """
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return _in_thread(found, payload_reader(found, target))


def _importable(function: Callable[..., object], type: str) -> str:
    """Return how a child process finds *function*, as far as it can be told before its module is complete.

    Raises:
        ConfigError: it cannot.
    """
    if _is_async(function):
        raise ConfigError(
            f"type {type!r}: an async def runs on the event loop, pool='process' is for plain ones"
        )
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not (inspect.isfunction(function) and module and name):
        raise ConfigError(f"type {type!r}: {function!r} is no function that a child process could import")
    if "<" in name:
        raise ConfigError(
            f"type {type!r}: {name} is made inside a function, and a child process cannot import it;"
            " define it at the top of a module"
        )
    if module == "__main__" and not hasattr(sys.modules.get(module), "__file__"):
        raise ConfigError(f"type {type!r}: {name} is typed in by hand, and a child process cannot import it")
    return f"{module}:{name}"


class HandlerTable:
    """Handlers by type, one for each."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._process_functions: dict[str, Callable[..., object]] = {}

    def add(
        self,
        type: str,
        function: Callable[..., Any],
        queues: Iterable[str],
        pool: PoolName | None = None,
    ) -> None:
        """Register a function; *pool*: where it runs, None: what its kind suggests.

        Raises:
            ConfigError: a bad name, the type has a handler already, the function cannot run in that pool, or
                its payload has a type for which there is no rule.
        """
        queues = tuple(queues)
        for name in (type, *queues):
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{name!r} is no name of a type or queue: {_NAME.pattern}")
        if type in self._handlers:
            raise ConfigError(f"type {type!r} has a handler already")
        if pool not in (None, "loop", "thread", "process"):
            raise ConfigError(f"pool is {pool!r}: must be 'loop', 'thread' or 'process'")
        served, is_async = frozenset(queues), _is_async(function)
        read = payload_reader(function, getattr(function, "__name__", type))
        if pool == "process":
            handler = Handler(type=type, queues=served, in_process=_importable(function, type))
            self._process_functions[type] = function
        elif is_async:
            if pool == "thread":
                raise ConfigError(f"type {type!r}: an async def runs on the event loop, not in a thread")
            handler = Handler(type=type, queues=served, on_loop=_on_loop(function, read))
        else:
            if pool == "loop":
                raise ConfigError(
                    f"type {type!r}: a plain function would block the event loop; make it async"
                )
            handler = Handler(type=type, queues=served, in_thread=_in_thread(function, read))
        self._handlers[type] = handler

    def get(self, type: str) -> Handler | None:
        """Return the handler of a type."""
        return self._handlers.get(type)

    def check_importable(self) -> None:
        """Make sure that child processes will find the functions that were registered for them.

        Raises:
            ConfigError: a name leads elsewhere.
        """
        for type, function in self._process_functions.items():
            target = self._handlers[type].in_process or ""
            module, _, path = target.partition(":")
            found: Any = sys.modules.get(module)
            for part in path.split("."):
                found = getattr(found, part, None)
            if not callable(found) or inspect.unwrap(found) is not inspect.unwrap(function):
                raise ConfigError(
                    f"type {type!r}: {target} is not the handler: a child process would not find it"
                )

    def wanted(self, queues: Sequence[str]) -> tuple[QueueTypes, ...]:
        """Return what to ask for in *queues*.

        Raises:
            ConfigError: a queue for which there is no handler.
        """
        wanted = []
        for queue in queues:
            types = tuple(
                sorted(h.type for h in self._handlers.values() if not h.queues or queue in h.queues)
            )
            if not types:
                raise ConfigError(f"no handler for queue {queue!r}")
            wanted.append(QueueTypes(queue, types))
        return tuple(wanted)
