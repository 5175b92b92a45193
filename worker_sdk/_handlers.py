"""Which function runs which type, and what a claim call asks for on their behalf."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from worker_sdk._work import QueueTypes
from worker_sdk.context import Context, SyncContext
from worker_sdk.errors import ConfigError

__all__ = ["AsyncFunction", "Handler", "HandlerTable", "SyncFunction"]

AsyncFunction = Callable[[Context], Awaitable[object]]
SyncFunction = Callable[[SyncContext], object]

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class Handler:
    """A function for one type; empty queues: all that the worker serves. One of the two functions is set."""

    type: str
    queues: frozenset[str]
    on_loop: AsyncFunction | None
    in_thread: SyncFunction | None


def _is_async(function: Callable[..., object]) -> bool:
    """Return whether calling *function*, which may be an object with ``__call__``, gives a coroutine."""
    if inspect.iscoroutinefunction(function):
        return True
    return inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class HandlerTable:
    """Handlers by type, one for each."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def add(self, type: str, function: Callable[..., object], queues: Iterable[str]) -> None:
        """Register a function.

        Raises:
            ConfigError: a bad name, or the type has a handler already.
        """
        for name in (type, *queues):
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{name!r} is no name of a type or queue: {_NAME.pattern}")
        if type in self._handlers:
            raise ConfigError(f"type {type!r} has a handler already")
        if _is_async(function):
            self._handlers[type] = Handler(type, frozenset(queues), function, None)  # type: ignore[arg-type]
        else:
            self._handlers[type] = Handler(type, frozenset(queues), None, function)

    def get(self, type: str) -> Handler | None:
        """Return the handler of a type."""
        return self._handlers.get(type)

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
