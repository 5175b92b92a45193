"""What a process of the service consists of, as its start and stop see it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.config import Settings
from coordinator.etcd.store import EtcdStore
from coordinator.observability.metrics import Metrics
from coordinator.ports import Clock, Entropy
from coordinator.services.notices import NoticeHub

__all__ = ["Compose", "Parts", "Role"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What runs, and what is drained.

    Args:
        store: storage; started first and closed last.
        notices: where notices go.
        metrics: counters.
        servicers: by full name of the service.
        background: what runs beside the store until the stop; none of it ends by itself.
        listed: whether all that must be listed and watched is.
        trouble: why this process cannot do its work although etcd answers, empty if it can.
        drains: called at the stop, before the listener closes: no new waits, and those under way answered.
        closes: awaited at the stop, after the background has been told to end.
    """

    store: EtcdStore
    notices: NoticeHub
    metrics: Metrics
    servicers: Mapping[str, object]
    background: Mapping[str, Callable[[], Coroutine[Any, Any, None]]]
    listed: Callable[[], bool]
    trouble: Callable[[], str] = lambda: ""
    drains: Sequence[Callable[[], None]] = ()
    closes: Sequence[Callable[[], Awaitable[None]]] = ()


class Compose(Protocol):
    """Makes all parts, inside the event loop that will run them."""

    def __call__(
        self, settings: Settings, clock: Clock, entropy: Entropy, *, endpoint: str, version: str
    ) -> Parts:
        """Make them.

        Raises:
            ConfigError: a file cannot be read, or settings do not fit the store.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What kind of process it is: ``services`` are those that it serves, and whose health it tells."""

    name: str
    services: Sequence[str]
    compose: Compose
