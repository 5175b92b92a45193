"""What tests of workers and producers need: a coordinator in memory, and a handler's run without any.

docs/testing.md shows how. It stands on the rules of the coordinator (`coordinator.core`), which come in the
same distribution and need nothing more than the SDK does.
"""

from __future__ import annotations

try:
    import coordinator.core.machine  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "worker_sdk.testing runs the coordinator's own rules, and the package coordinator.core is not there:"
        " install the whole distribution, pip install leasekeeper",
        name=error.name,
    ) from error

from worker_sdk.testing.fake import FakeCoordinator, HasJobId
from worker_sdk.testing.once import Facts, Outcome, run_once, run_once_async
from worker_sdk.testing.running import running

__all__ = [
    "Facts",
    "FakeCoordinator",
    "HasJobId",
    "Outcome",
    "run_once",
    "run_once_async",
    "running",
]
