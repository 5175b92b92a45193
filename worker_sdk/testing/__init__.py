"""What tests of workers and producers need: a coordinator in memory, and a handler's run without any."""

from __future__ import annotations

from worker_sdk.testing.fake import FakeCoordinator, HasJobId

__all__ = ["FakeCoordinator", "HasJobId"]
