"""The composition root: settings in, a running coordinator out. Only this package knows all others."""

from __future__ import annotations

from coordinator.app.coordinator import Coordinator, running_coordinator
from coordinator.app.process import new_event_loop, serve

__all__ = ["Coordinator", "new_event_loop", "running_coordinator", "serve"]
