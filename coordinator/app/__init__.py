"""The composition root: settings in, a running coordinator out. Only this package knows all others."""

from __future__ import annotations

from coordinator.app.composition import COORDINATOR
from coordinator.app.coordinator import Coordinator, running_coordinator
from coordinator.app.parts import Role
from coordinator.app.process import new_event_loop, serve
from coordinator.app.repairs_only import RECONCILER

__all__ = [
    "COORDINATOR",
    "RECONCILER",
    "Coordinator",
    "Role",
    "new_event_loop",
    "running_coordinator",
    "serve",
]
