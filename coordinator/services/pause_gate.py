"""Paused queues hold jobs back as open circuits do, so dispatch asks one gate about both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from coordinator.core.circuit import Probe
from coordinator.core.job import Job
from coordinator.core.queue_settings import QueueState
from coordinator.errors import Reason, RequestError
from coordinator.services.circuit_gate import CircuitGate
from coordinator.services.shared_queues import QueueName
from coordinator.services.waiters import Pair

__all__ = ["PauseGate"]


class PauseGate:
    """Implements ``CircuitGate``: that of the circuits, and besides every pair of a paused queue is barred.

    Args:
        circuits: the gate of the circuits.
        paused: the queues that are paused, by (namespace, queue).
    """

    def __init__(self, circuits: CircuitGate, paused: Mapping[QueueName, QueueState]) -> None:
        self._circuits = circuits
        self._paused = paused
        self._barred = _Barred(circuits, paused)

    @property
    def barred(self) -> Mapping[Pair, object]:
        """See ``CircuitGate``. While nothing is paused it is the circuits' own."""
        return self._barred if self._paused else self._circuits.barred

    def may_probe(self, pair: Pair) -> bool:
        """See ``CircuitGate``. A paused queue is not probed."""
        return pair[:2] not in self._paused and self._circuits.may_probe(pair)

    def refusal(self, pair: Pair) -> RequestError:
        """QUEUE_PAUSED, or CIRCUIT_OPEN."""
        state = self._paused.get(pair[:2])
        if state is None:
            return self._circuits.refusal(pair)
        metadata = {"queue": pair[1], "reason": state.pause_reason}
        return RequestError(Reason.QUEUE_PAUSED, f"queue {pair[1]} is paused", metadata=metadata)

    async def take_slot(self, pair: Pair, job: Job, deadline: float) -> Probe | None:
        """See ``CircuitGate``."""
        if pair[:2] in self._paused:
            return None
        return await self._circuits.take_slot(pair, job, deadline)

    def give_back(self, pair: Pair, probe: Probe) -> None:
        """See ``CircuitGate``."""
        self._circuits.give_back(pair, probe)


class _Barred(Mapping[Pair, object]):
    """Pairs of paused queues, and pairs whose circuit is not closed.

    It is asked about single pairs. How many types a paused queue has nobody needs to know here, so those are
    neither counted nor listed.
    """

    def __init__(self, circuits: CircuitGate, paused: Mapping[QueueName, QueueState]) -> None:
        self._circuits = circuits
        self._paused = paused

    def __contains__(self, pair: object) -> bool:
        return isinstance(pair, tuple) and (pair[:2] in self._paused or pair in self._circuits.barred)

    def __getitem__(self, pair: Pair) -> object:
        state = self._paused.get(pair[:2])
        return state if state is not None else self._circuits.barred[pair]

    def __bool__(self) -> bool:
        return bool(self._paused) or bool(self._circuits.barred)

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._circuits.barred)

    def __len__(self) -> int:
        return len(self._circuits.barred)
