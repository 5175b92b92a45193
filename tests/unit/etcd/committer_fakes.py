"""A scripted etcd for the committer's tests, and a committer over it whose time the test steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from coordinator.etcd import wire
from coordinator.etcd.commit_config import CommitHooks, CommitterConfig, EpochFence
from coordinator.etcd.committer import Committer
from coordinator.etcd.guarded_op import GuardedOp, OpResult
from leasekeeper.internal.etcd.v1 import kv_pb2 as pb
from tests.support.clock import SteppingClock

EPOCH_KEY = b"/epoch"


async def settle() -> None:
    """Let everything run that can run without time passing or etcd answering."""
    for _ in range(30):
        await asyncio.sleep(0)


@dataclass
class Call:
    """One Txn that the committer sent."""

    request: pb.TxnRequest
    timeout: float
    reply: asyncio.Future[pb.TxnResponse]

    @property
    def keys(self) -> list[bytes]:
        """The first key that each nested operation writes."""
        return [op.request_txn.success[0].request_put.key for op in self.request.success]

    @property
    def epoch(self) -> bytes:
        return self.request.compare[0].value


@dataclass
class ScriptedEtcd:
    """Holds every Txn until the test answers it, or answers by ``script``."""

    script: Callable[[Call], pb.TxnResponse | BaseException | None] | None = None
    calls: list[Call] = field(default_factory=list)
    revision: int = 100
    most_in_flight: int = 0
    _in_flight: int = 0

    async def txn_bytes(self, request: bytes, *, timeout: float) -> pb.TxnResponse:
        reply: asyncio.Future[pb.TxnResponse] = asyncio.get_running_loop().create_future()
        call = Call(pb.TxnRequest.FromString(request), timeout, reply)
        self.calls.append(call)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            if self.script is not None:
                outcome = self.script(call)
                if isinstance(outcome, BaseException):
                    raise outcome
                if outcome is not None:
                    return outcome
            return await reply
        finally:
            self._in_flight -= 1

    @property
    def open_calls(self) -> list[Call]:
        return [call for call in self.calls if not call.reply.done()]

    def won(self, call: Call, losers: frozenset[bytes] = frozenset()) -> pb.TxnResponse:
        """All nested operations win, except those that write a key of ``losers`` first."""
        response = pb.TxnResponse(succeeded=True)
        for op in call.request.success:
            inner = op.request_txn
            lost = inner.success[0].request_put.key in losers
            branch = inner.failure if lost else inner.success
            response.responses.append(
                pb.ResponseOp(
                    response_txn=pb.TxnResponse(
                        succeeded=not lost, responses=[_answer(one) for one in branch]
                    )
                )
            )
        if any(one.response_txn.succeeded for one in response.responses):
            self.revision += 1
        response.header.revision = self.revision
        return response

    async def answer(self, call: Call, losers: frozenset[bytes] = frozenset()) -> None:
        call.reply.set_result(self.won(call, losers))
        await settle()

    async def fail(self, call: Call, error: Exception) -> None:
        call.reply.set_exception(error)
        await settle()


def _answer(op: pb.RequestOp) -> pb.ResponseOp:
    match op.WhichOneof("request"):
        case "request_put":
            return pb.ResponseOp(response_put=pb.PutResponse())
        case "request_delete_range":
            return pb.ResponseOp(response_delete_range=pb.DeleteRangeResponse(deleted=1))
        case _:
            key = op.request_range.key
            return pb.ResponseOp(response_range=pb.RangeResponse(kvs=[pb.KeyValue(key=key, value=b"holder")]))


class Epoch:
    """An epoch that can change in "etcd" and is read again on request."""

    def __init__(self) -> None:
        self.known = b"1"
        self.stored = b"1"
        self.reads = 0
        self.error: Exception | None = None

    def guard(self) -> bytes:
        return wire.value_eq(EPOCH_KEY, self.known)

    async def refresh(self) -> None:
        self.reads += 1
        if self.error is not None:
            raise self.error
        self.known = self.stored

    @property
    def fence(self) -> EpochFence:
        return EpochFence(guard=self.guard, refresh=self.refresh)


@dataclass
class Bench:
    """A running committer over a scripted etcd."""

    etcd: ScriptedEtcd
    clock: SteppingClock
    epoch: Epoch
    committer: Committer
    own_revisions: list[int]
    running: asyncio.Task[None] | None = None
    taken: dict[str, asyncio.Future[OpResult]] = field(default_factory=dict)

    def take(self, name: str, **options: object) -> None:
        """Enqueue an operation whose future the test looks up in ``taken`` if it cares."""
        self.taken[name] = self.committer.enqueue(self.op(name, **options))  # type: ignore[arg-type]

    def op(
        self,
        name: str,
        *,
        lanes: tuple[str, ...] | None = None,
        adds: tuple[str, ...] = (),
        lasts: float = 10.0,
        size: int = 1,
        thens: int = 1,
        **rest: object,
    ) -> GuardedOp:
        key = name.encode()
        more = tuple(wire.put(b"%s/%d" % (key, number), b"v") for number in range(1, thens))
        return GuardedOp(
            lanes=(key,) if lanes is None else tuple(lane.encode() for lane in lanes),
            adds=tuple(add.encode() for add in adds),
            compares=(wire.create_eq(key, 0),),
            thens=(wire.put(key, b"v" * size), *more),
            elses=(wire.get(key),),
            deadline=self.clock.monotonic() + lasts,
            **rest,  # type: ignore[arg-type]
        )


def make_bench(config: CommitterConfig | None = None) -> Bench:
    """A committer that is not running yet."""
    etcd, clock, epoch = ScriptedEtcd(), SteppingClock(), Epoch()
    own: list[int] = []
    committer = Committer(
        etcd,
        epoch.fence,
        config or CommitterConfig(jitter=lambda: 0.5),
        hooks=CommitHooks(own_revision=own.append),
        clock=clock,
    )
    return Bench(etcd, clock, epoch, committer, own)


@asynccontextmanager
async def running(config: CommitterConfig | None = None) -> AsyncIterator[Bench]:
    """A committer that runs; at the end all is answered and it is closed."""
    bench = make_bench(config)
    async with asyncio.TaskGroup() as tasks:
        bench.running = tasks.create_task(bench.committer.run())
        await settle()
        yield bench
        bench.etcd.script = bench.etcd.won
        for call in bench.etcd.open_calls:
            await bench.etcd.answer(call)
        closing = tasks.create_task(bench.committer.close())
        await bench.clock.advance(20.0)  # groups that wait before their next try
        await closing
