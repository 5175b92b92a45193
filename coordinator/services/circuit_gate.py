"""What dispatch asks of circuits, and the answer where there are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from coordinator.core.circuit import Probe
from coordinator.core.job import Job
from coordinator.errors import Reason, RequestError
from coordinator.services.waiters import Pair

__all__ = ["ALL_CLOSED", "CircuitGate"]


class CircuitGate(Protocol):
    """What dispatch asks. ``barred`` has the pairs whose circuit is not closed."""

    @property
    def barred(self) -> Mapping[Pair, object]:
        """One look-up of it is all that a poll pays."""

    def may_probe(self, pair: Pair) -> bool:
        """Whether a barred pair wants a probe now, as far as is known here."""

    def refusal(self, pair: Pair) -> RequestError:
        """CIRCUIT_OPEN, for a barred pair."""

    async def take_slot(self, pair: Pair, job: Job, deadline: float) -> Probe | None:
        """Reserve the next attempt of a waiting job as the probe. None: not taken, whyever; never raises."""

    def give_back(self, pair: Pair, probe: Probe) -> None:
        """The probe was not claimed. Synchronous."""


class _AllClosed:
    """No circuits: implements ``CircuitGate``."""

    barred: Mapping[Pair, object] = {}

    def may_probe(self, pair: Pair) -> bool:
        return False

    def refusal(self, pair: Pair) -> RequestError:
        return RequestError(Reason.CIRCUIT_OPEN, "the circuit is open")

    async def take_slot(self, pair: Pair, job: Job, deadline: float) -> Probe | None:
        return None

    def give_back(self, pair: Pair, probe: Probe) -> None:
        """Nothing was taken."""


ALL_CLOSED: Final = _AllClosed()
"""Where nothing is held back."""
