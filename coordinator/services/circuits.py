"""When circuits open, who may probe them, and what operators are told.

The shared record decides, by compare-and-swap (``services.shared_circuits``). A circuit holds jobs, it guards
nothing: a claim that was under way when it opened goes through.

A probe's slot lies in the record. It is given back when the probe's attempt ends, by whoever commits that
end, or when it was not claimed after all. What a coordinator that died left behind the others find: a slot
older than ``probe_grace_s`` is judged by the record of its job.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from coordinator.core.circuit import (
    CLOSED,
    Circuit,
    CircuitPolicy,
    CircuitState,
    Counts,
    Probe,
    end_probe,
    open_circuit,
    start_probe,
    verdict_of,
)
from coordinator.core.job import Job
from coordinator.core.notice import Notice, NoticeKind
from coordinator.errors import CodecError, LeasekeeperError, Reason, RequestError, StorageError
from coordinator.ports import CircuitStore, Clock, Entropy, JobStore, Notices, StoredCircuit
from coordinator.services.outcomes import Outcomes
from coordinator.services.shared_circuits import SharedCircuits
from coordinator.services.storage_errors import refused
from coordinator.services.waiters import Pair
from coordinator.services.waiting import wait_event

__all__ = ["CircuitConfig", "Circuits"]

_log = logging.getLogger(__name__)

_HALF_OPEN_RETRY_MS: Final = 1_000

_ANYBODY: Final = Probe(job_id="", attempt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitConfig:
    """Spans are seconds.

    Attributes:
        enabled: False: nothing is counted, opened or held here, whatever others do.
        policy: thresholds.
        call_timeout: of one swap in the background.
        tick: pause between two looks in the background; what is due earlier is done earlier.
        probe_grace_s: longer than a claim may be under way (``DispatchConfig.commit_timeout``).
    """

    enabled: bool = True
    policy: CircuitPolicy = field(default_factory=CircuitPolicy)
    call_timeout: float = 2.0
    tick: float = 1.0
    probe_grace_s: float = 6.0


class Circuits:
    """Implements ``CircuitGate``. ``shared`` is to hear of the watch, ``outcomes`` of own commits.

    Args:
        store: the shared records.
        jobs: read to judge a probe that somebody left behind.
        notices: told of each change that was made here.
        clock: pauses go by its wall time, which coordinators share as well as their clocks agree.
        entropy: jitter of pauses.
        config: see ``CircuitConfig``.
        own_id: this coordinator.

    ``freed`` is called with a pair when one of its jobs may be claimed again, or probed.
    """

    def __init__(
        self,
        store: CircuitStore,
        jobs: JobStore,
        notices: Notices,
        clock: Clock,
        entropy: Entropy,
        config: CircuitConfig,
        *,
        own_id: str,
    ) -> None:
        self._jobs = jobs
        self._notices = notices
        self._clock = clock
        self._entropy = entropy
        self._config = config
        self._own_id = own_id
        self.shared = SharedCircuits(store, clock, heeded=config.enabled, call_timeout=config.call_timeout)
        self.shared.learned = self._learned
        self.barred = self.shared.barred
        self.outcomes = Outcomes(
            clock, config.policy, barred=self.barred, tripped=self._tripped, ended_barred=self._ended_barred
        )
        self.freed: Callable[[Pair], object] = lambda pair: None
        self._taking: set[Pair] = set()  # one swap a pair at a time, however many poll
        self._slots: dict[Pair, tuple[Probe, float]] = {}  # since when the slot is seen taken
        self._opened: dict[Pair, float] = {}  # since when it is seen open, as it is now
        self._to_open: dict[Pair, tuple[str, Counts]] = {}
        self._to_judge: dict[tuple[Pair, Probe], Job | None] = {}
        self._wake = asyncio.Event()
        self._complained = False

    # -- asked by dispatch and operators

    def may_probe(self, pair: Pair) -> bool:
        """See ``CircuitGate``."""
        stored = self.barred.get(pair)
        if stored is None:
            return False
        return start_probe(stored.circuit, _ANYBODY, self._now_ms(pair, stored.circuit)) is not None

    def refusal(self, pair: Pair) -> RequestError:
        """See ``CircuitGate``."""
        circuit = self.shared.circuit(pair)
        _, queue, type_ = pair
        retry_ms = _HALF_OPEN_RETRY_MS
        if circuit.state is CircuitState.OPEN:
            retry_ms = max(1, circuit.probe_ms - self._now_ms(pair, circuit))
        return RequestError(
            Reason.CIRCUIT_OPEN,
            f"jobs of type {type_} in queue {queue} are held: {circuit.reason}",
            metadata={"queue": queue, "type": type_, "circuit": circuit.state.name},
            retry_after_ms=retry_ms,
        )

    async def take_slot(self, pair: Pair, job: Job, deadline: float) -> Probe | None:
        """See ``CircuitGate``."""
        if pair in self._taking:
            return None
        probe = Probe(job_id=job.job_id, attempt=job.attempt + 1, who=self._own_id)
        self._taking.add(pair)
        try:
            done = await self.shared.change(
                pair,
                lambda stands: start_probe(stands.circuit, probe, self._now_ms(pair, stands.circuit)),
                deadline,
            )
        except LeasekeeperError as error:
            # Taken or not: the watch tells, and what nobody claims goes back after the grace.
            _log.debug("the slot of a probe was not taken: %s", error, extra={"job": job.job_id})
            return None
        except asyncio.CancelledError:
            self.give_back(pair, probe)
            raise
        finally:
            self._taking.discard(pair)
        if done is None:
            return None
        if done[0].state is CircuitState.OPEN:
            self._tell(pair, *done, f"its pause is over, job {probe.job_id} probes it")
        return probe

    def give_back(self, pair: Pair, probe: Probe) -> None:
        """See ``CircuitGate``."""
        self._to_judge[pair, probe] = None
        self._wake.set()

    async def reset(self, pair: Pair, deadline: float) -> Circuit:
        """Close it, and forget what was counted here; answers the circuit as it is then.

        Raises:
            RequestError: ETCD_UNAVAILABLE, OUTCOME_UNKNOWN; TOO_MANY_REQUESTS: others change it too fast.
        """
        try:
            await self.shared.refresh(pair, deadline)
            done = await self.shared.change(
                pair, lambda stands: CLOSED if stands.revision else None, deadline
            )
        except StorageError as error:
            raise refused(error, {"queue": pair[1], "type": pair[2]}) from error
        circuit = self.shared.circuit(pair)
        if circuit != CLOSED:
            raise RequestError(
                Reason.TOO_MANY_REQUESTS, "others change this circuit too fast", retry_after_ms=200
            )
        self.outcomes.forget(pair)
        self._to_open.pop(pair, None)
        if done is not None:
            self._tell(pair, *done, "reset by hand")
        return circuit

    # -- told by commits, by the watch, and by own swaps

    def _tripped(self, pair: Pair, reason: str, counts: Counts) -> None:
        if self._config.enabled:
            self._to_open[pair] = (reason, counts)
            self._wake.set()

    def _ended_barred(self, pair: Pair, job: Job) -> None:
        probe = self.barred[pair].circuit.probe
        if probe is not None and (probe.job_id, probe.attempt) == (job.job_id, job.attempt):
            self._to_judge[pair, probe] = job
            self._wake.set()

    def _learned(self, pair: Pair, before: Circuit, now: Circuit) -> None:
        if before.state is not now.state:
            self.outcomes.forget(pair)
            self._to_open.pop(pair, None)
        if now.state is not CircuitState.OPEN:
            self._opened.pop(pair, None)
        elif (now.since_ms, now.probe_ms) != (before.since_ms, before.probe_ms):
            self._opened[pair] = self._clock.monotonic()
        if now.probe is None:
            self._slots.pop(pair, None)
        elif now.probe != before.probe:
            self._slots[pair] = (now.probe, self._clock.monotonic())
        self._wake.set()
        if now.probe is None and now.state is not CircuitState.OPEN:
            self.freed(pair)

    # -- background

    async def run(self) -> None:
        """Open, judge and wake, until cancelled."""
        while True:
            await wait_event(self._clock, self._wake, self._pause())
            self._wake.clear()
            if not await self.tend_once():
                await self._clock.sleep(self._config.tick)

    async def tend_once(self) -> bool:
        """Do what is to be done now; False: the store did not answer, and some of it is left."""
        well = True
        for pair, (reason, counts) in list(self._to_open.items()):
            well = await self._tried(self._open(pair, reason, counts)) and well
        now = self._clock.monotonic()
        for pair, (probe, since) in list(self._slots.items()):
            if now - since >= self._config.probe_grace_s and pair in self.barred:
                self._to_judge.setdefault((pair, probe))
        for (pair, probe), job in list(self._to_judge.items()):
            well = await self._tried(self._judge(pair, probe, job)) and well
        for pair in list(self.barred):
            if self.may_probe(pair):
                self.freed(pair)
        return well

    async def _tried(self, work: Coroutine[Any, Any, None]) -> bool:
        try:
            await work
        except LeasekeeperError as error:
            if not self._complained:
                _log.warning("a circuit could not be changed, it is tried again: %s", error)
            self._complained = True
            return False
        self._complained = False
        return True

    async def _open(self, pair: Pair, reason: str, counts: Counts) -> None:
        def opened(stands: StoredCircuit) -> Circuit | None:
            if stands.circuit.state is not CircuitState.CLOSED:
                return None  # another was first
            return open_circuit(
                stands.circuit,
                self._config.policy,
                self._clock.now_ms(),
                jitter_number=self._entropy.fraction(),
                reason=reason,
                who=self._own_id,
            )

        done = await self.shared.change(pair, opened, self._deadline())
        self._to_open.pop(pair, None)
        if done is not None:
            self._tell(pair, *done, reason, counts)

    async def _judge(self, pair: Pair, probe: Probe, job: Job | None) -> None:
        """End a probe by what the record of its job says; one that still runs is left alone."""
        verdict = verdict_of(job if job is not None else await self._job_of(pair, probe), probe)
        if verdict is None:
            if pair in self._slots:
                self._slots[pair] = (probe, self._clock.monotonic())  # look again after another grace
            del self._to_judge[pair, probe]
            return

        def ended(stands: StoredCircuit) -> Circuit | None:
            return end_probe(
                stands.circuit,
                self._config.policy,
                probe,
                verdict,
                self._clock.now_ms(),
                jitter_number=self._entropy.fraction(),
                who=self._own_id,
            )

        done = await self.shared.change(pair, ended, self._deadline())
        self._to_judge.pop((pair, probe), None)
        if done is not None and done[0].state is not done[1].state:
            passed = f"{self._config.policy.probes_to_close} probes in a row succeeded"
            self._tell(pair, *done, done[1].reason or passed)

    async def _job_of(self, pair: Pair, probe: Probe) -> Job | None:
        try:
            found = await self._jobs.read(pair[0], probe.job_id, deadline=self._deadline())
        except CodecError:
            return None  # nobody can claim it
        return found.stored.job if found.stored is not None else None

    def _pause(self) -> float:
        """Seconds until there is something to do."""
        now_ms, pause = self._clock.now_ms(), self._config.tick
        for stored in self.barred.values():
            if stored.circuit.state is CircuitState.OPEN and stored.circuit.probe_ms > now_ms:
                pause = min(pause, (stored.circuit.probe_ms - now_ms) / 1000)
        return pause

    def _now_ms(self, pair: Pair, circuit: Circuit) -> int:
        """Wall time; but a pause that was seen to pass is over, though a clock was set back."""
        now_ms, seen = self._clock.now_ms(), self._opened.get(pair)
        pause_s = (circuit.probe_ms - circuit.since_ms) / 1000
        if seen is not None and self._clock.monotonic() - seen >= pause_s:
            return max(now_ms, circuit.probe_ms)
        return now_ms

    def _deadline(self) -> float:
        return self._clock.monotonic() + self._config.call_timeout

    def _tell(
        self, pair: Pair, before: Circuit, after: Circuit, reason: str, counts: Counts | None = None
    ) -> None:
        namespace, queue, type_ = pair
        facts = {"circuit_before": before.state.name, "circuit": after.state.name}
        if counts is not None:
            facts |= {
                "attempts": str(counts.attempts),
                "failures": str(counts.failures),
                "lease_losses": str(counts.lease_losses),
            }
        if after.state is CircuitState.OPEN:
            facts |= {"openings": str(after.openings), "pause_ms": str(after.probe_ms - after.since_ms)}
        self._notices.publish(
            Notice(
                kind=NoticeKind.CIRCUIT,
                reason=reason,
                namespace=namespace,
                queue=queue,
                type=type_,
                job_id=after.probe.job_id if after.probe is not None else "",
                facts=facts,
            )
        )
