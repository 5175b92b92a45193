"""The process of ``leasekeeper serve`` and ``leasekeeper reconciler``: event loop, signals, exit code.

Exit codes: 0 stopped in order; 2 settings, the address or the etcd version cannot be used; 1 anything else.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable

from coordinator.app.composition import COORDINATOR
from coordinator.app.coordinator import Coordinator
from coordinator.app.parts import Role
from coordinator.config import Settings

__all__ = ["new_event_loop", "serve"]

_LOG = logging.getLogger(__name__)
_GC_THRESHOLDS = (50_000, 20, 50)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop where it is installed: the hot path spends its time in the loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def serve(
    settings: Settings, *, role: Role = COORDINATOR, ready: Callable[[str], None] | None = None
) -> None:
    """Run a process of the service until SIGTERM or SIGINT; a second signal ends it at once. SIGHUP reads the
    tokens file again.

    Args:
        settings: checked settings.
        role: what kind of process.
        ready: called with the address once the coordinator serves.

    Raises:
        ConfigError: as of ``Coordinator.run``.
    """
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(settings, role, ready))


async def _serve(settings: Settings, role: Role, ready: Callable[[str], None] | None) -> None:
    loop = asyncio.get_running_loop()
    coordinator = Coordinator(settings, role=role)

    def stop(name: str) -> None:
        _LOG.info("signal %s", name)
        coordinator.stop()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number.name)
    loop.add_signal_handler(signal.SIGHUP, coordinator.reload)
    announcing = asyncio.create_task(_announce(coordinator, ready), name="announcement")
    try:
        await coordinator.run()
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)
        for number in (*_SIGNALS, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _announce(coordinator: Coordinator, ready: Callable[[str], None] | None) -> None:
    await coordinator.started.wait()
    # What is loaded stays: the collector need not walk it again and again. And the index keeps thousands of
    # jobs alive: with the default thresholds a fifth of the time went into looking at them (measured on the
    # batch lifecycle).
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    if ready is not None:
        ready(coordinator.address)
