"""Where the store's history stands: the epoch, the highest revision seen, and whether history went back.

A restore sets revisions back, so tokens would repeat. Three things notice it: replies that are older than
what was seen before their request (``EtcdClient`` tells), the high-water file of an earlier run, and tokens
of callers (the services compare them with ``token``). Until the epoch is raised nothing is granted or
settled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator.core.fencing import Position, make_token
from coordinator.errors import (
    ClusterChanged,
    CodecError,
    EtcdUnavailable,
    OutcomeUnknown,
    Reason,
    RequestError,
    StorageError,
)
from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.codec import decode_epoch, encode_epoch
from coordinator.etcd.commit_config import EpochFence
from coordinator.etcd.high_water import HighWaterFile
from coordinator.etcd.keys import KeySpace
from coordinator.etcd.time_left import read_timeout, write_timeout
from coordinator.ports import Clock

__all__ = ["EtcdPresent", "PresentConfig", "regressed_error"]

_log = logging.getLogger(__name__)

_START_ROUNDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentConfig:
    """Times in seconds.

    Attributes:
        state_dir: where the high-water file lies; None: none is kept.
        every: how often the file is written, and how often a store that went back is looked at.
        timeout: deadline of each read of the epoch.
    """

    state_dir: Path | None = None
    every: float = 1.0
    timeout: float = 2.0


def regressed_error() -> RequestError:
    """What a call is told that would grant or settle while the store stands behind what was seen."""
    return RequestError(
        Reason.EPOCH_REGRESSED,
        "etcd's history went back, as after a restore; run `leasekeeper epoch bump`",
        retry_after_ms=1_000,
    )


class EtcdPresent:
    """Implements ``ports.Present`` and fences the committer.

    Args:
        client: whose replies are watched; it calls ``went_back`` (see ``EtcdClient.on_regression``).
        space: the keys.
        config: see ``PresentConfig``.
        clock: time.
        probe: makes a client that has seen nothing yet, to look at a cluster that is not the one pinned.
        on_regression: told once each time that history is found to have gone back.
        on_recovery: told where it stands when all is granted and settled again.
    """

    def __init__(
        self,
        client: EtcdClient,
        space: KeySpace,
        config: PresentConfig,
        clock: Clock,
        *,
        probe: Callable[[], EtcdClient],
        on_regression: Callable[[Position, Position], None] | None = None,
        on_recovery: Callable[[Position], None] | None = None,
    ) -> None:
        self._client = client
        self._space = space
        self._config = config
        self._clock = clock
        self._probe = probe
        self._on_regression = on_regression
        self._on_recovery = on_recovery
        self._file = HighWaterFile(config.state_dir) if config.state_dir is not None else None
        self._written: Position | None = None
        self._epoch = 0
        self._value = b""
        self._guard = b""
        self._fell = False
        self._astray = False

    @property
    def epoch(self) -> int:
        """The epoch as last read; 0 before ``start``."""
        return self._epoch

    @property
    def regressed(self) -> bool:
        """Whether history went back and the epoch was not raised since, or another cluster answers now."""
        return self._fell or self._astray

    def token(self) -> int:
        """Highest position seen, on the token scale."""
        return make_token(self._epoch, max(1, self._client.high_water))

    def guard(self) -> bytes:
        """The top-level compare of every Txn: the epoch is the one that was read."""
        return self._guard

    def fence(self) -> EpochFence:
        """For the committer."""
        return EpochFence(guard=self.guard, refresh=self._refresh_epoch)

    def went_back(self, seen: int, got: int) -> None:
        """A reply showed revision ``got`` though ``seen`` was known before its request."""
        self._regress(Position(self._epoch, seen), Position(self._epoch, got))
        self._fell = True

    async def start(self, *, deadline: float) -> None:
        """Read the epoch, or create it, and compare with the high-water file.

        A store without an epoch is new, or was emptied: it gets 1, or one more than the file remembers, so
        that an emptied store never repeats a token.

        Raises:
            StorageError: etcd cannot be asked.
            CodecError: the epoch is unreadable; nothing can be fenced.
        """
        remembered = await asyncio.to_thread(self._file.read) if self._file is not None else None
        for _ in range(_START_ROUNDS):
            if await self._read(deadline):
                break
            await self._create(remembered.epoch + 1 if remembered is not None else 1, deadline)
        else:
            raise OutcomeUnknown("the epoch could not be created")
        found = Position(self._epoch, self._client.high_water)
        if remembered is not None and remembered > found:
            self._regress(remembered, found)
            self._fell = True

    async def refresh(self, *, deadline: float) -> int:
        """Read the epoch and the revision, then as ``token``."""
        if not await self._read(deadline):
            raise EtcdUnavailable("the store has no epoch: it was emptied")
        return self.token()

    async def run(self) -> None:
        """Look at the epoch and write the high-water file, every now and then, until cancelled."""
        try:
            while True:
                await self._clock.sleep(self._config.every)
                await self._look()
                await self._remember()
        finally:
            await self._remember()

    async def _refresh_epoch(self) -> None:
        await self.refresh(deadline=self._clock.monotonic() + self._config.timeout)

    async def _look(self) -> None:
        deadline = self._clock.monotonic() + self._config.timeout
        try:
            if await self._read(deadline) and self._astray:
                # Our own cluster answers again. It took nothing from us meanwhile, and had it fallen behind
                # what was seen before, the client would have told.
                self._astray = False
                _log.warning("our own cluster answers again")
                self._recover(Position(self._epoch, self._client.high_water))
        except ClusterChanged:
            try:
                await self._look_at_other_cluster(deadline)
            except (StorageError, CodecError):
                _log.warning("the cluster that answers now could not be asked for its epoch", exc_info=True)
        except (StorageError, CodecError):
            _log.debug("the epoch could not be read", exc_info=True)  # the next round tries again

    async def _read(self, deadline: float) -> bool:
        """Read and adopt the epoch; False if there is none."""
        reply = await self._client.range(self._space.epoch, timeout=read_timeout(self._clock, deadline))
        if not reply.kvs:
            return False
        self._adopt(reply.kvs[0].value, reply.header.revision, self._client.cluster_id)
        return True

    async def _create(self, epoch: int, deadline: float) -> None:
        key = self._space.epoch
        request = wire.txn((wire.create_eq(key, 0),), (wire.put(key, encode_epoch(epoch)),), ())
        try:
            await self._client.txn_bytes(request, timeout=write_timeout(self._clock, deadline))
        except OutcomeUnknown:
            pass  # the next read tells

    async def _look_at_other_cluster(self, deadline: float) -> None:
        """A snapshot was restored into a new cluster: go on with it once its epoch is above ours."""
        async with self._probe() as other:
            reply = await other.range(self._space.epoch, timeout=read_timeout(self._clock, deadline))
            cluster_id = other.cluster_id
        value = reply.kvs[0].value if reply.kvs else b""
        epoch = decode_epoch(value) if value else 0
        if epoch > self._epoch:
            self._client.pin.accept(cluster_id, reply.header.revision)
            self._adopt(value, reply.header.revision, cluster_id)
        else:
            seen = Position(self._epoch, self._client.high_water)
            self._regress(seen, Position(epoch, reply.header.revision))
            self._astray = True

    def _adopt(self, value: bytes, revision: int, cluster_id: int) -> None:
        epoch = decode_epoch(value)
        if epoch < self._epoch:
            self._regress(Position(self._epoch, self._client.high_water), Position(epoch, revision))
            self._fell = True
            return
        if epoch > self._epoch and self._epoch:
            _log.warning("the epoch is now %d, was %d", epoch, self._epoch)
            if self.regressed:
                self._client.pin.accept(cluster_id, revision)
                self._fell = self._astray = False
                self._recover(Position(epoch, revision))
        self._epoch = epoch
        if value != self._value:
            self._value = value
            self._guard = wire.value_eq(self._space.epoch, value)

    def _regress(self, seen: Position, got: Position) -> None:
        """Say so, once; the caller then marks why nothing is granted or settled from here on."""
        if self.regressed:
            return
        _log.error(
            "etcd's history went back from epoch %d revision %d to epoch %d revision %d: nothing is granted "
            "or settled until the epoch is raised",
            *seen,
            *got,
        )
        if self._on_regression is not None:
            self._on_regression(seen, got)

    def _recover(self, present: Position) -> None:
        if not self.regressed and self._on_recovery is not None:
            self._on_recovery(present)

    async def _remember(self) -> None:
        position = Position(self._epoch, self._client.high_water)
        if self._file is None or self.regressed or not self._epoch or position == self._written:
            return
        try:
            await asyncio.to_thread(self._file.write, position)
        except OSError:
            _log.error("the high-water file cannot be written", exc_info=True)
        else:
            self._written = position
