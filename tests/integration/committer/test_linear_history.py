"""Random operations over few keys, with tries lost on the way, against what etcd's history says they did.

The oracle reads the state of the keys at every revision of the run and replays the answers against it, one
operation at a time. It shares nothing with the committer but the operations themselves.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.errors import EtcdUnavailable, NotApplied, OutcomeUnknown, StorageError, TooManyRequests
from coordinator.etcd import wire
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.committer import CommitterConfig, GroupLimits, GuardedOp, OpResult
from leasekeeper.internal.etcd.v1 import kv_pb2 as pb
from tests.integration.committer.conftest import TIMEOUT, Site, open_site

State = dict[bytes, tuple[bytes, int]]
"""Value and mod revision by key."""

FATES = ("answered", "lost reply", "lost request", "refused", "unreachable")


@dataclass
class LossyClient:
    """Passes Txns on, or loses the request or the reply, as its script says; remembers what was answered."""

    client: EtcdClient
    script: list[str]
    answered: dict[bytes, tuple[int, bool]] = field(default_factory=dict)
    """By nonce: header revision of the Txn that was answered, and whether that Txn wrote."""

    async def txn_bytes(self, request: bytes, *, timeout: float) -> pb.TxnResponse:
        fate = self.script.pop() if self.script else "answered"
        match fate:
            case "refused":
                raise TooManyRequests("scripted")
            case "unreachable":
                raise EtcdUnavailable("scripted")
            case "lost request":
                raise OutcomeUnknown("scripted")
        response = await self.client.txn_bytes(request, timeout=timeout)
        if fate == "lost reply":
            raise OutcomeUnknown("scripted")
        wrote = any(
            one.HasField("response_put") or one.response_delete_range.deleted
            for op in response.responses
            for one in op.response_txn.responses
        )
        for op in pb.TxnRequest.FromString(request).success:
            self.answered[nonce_of(op.request_txn)] = (response.header.revision, wrote)
        return response


def nonce_of(txn: pb.TxnRequest) -> bytes:
    return next(one.request_put.value for one in txn.success if one.HasField("request_put"))


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: the keys it guards by their last seen revision (or as absent), and what it does to them.

    Every operation also puts a journal key of its own, so that its win leaves a trace.
    """

    keys: tuple[int, ...]
    delete: bool
    blind: bool  # guards by "absent" instead of the revision last seen
    pause: bool  # lets the loop run before the next one


STEPS = st.lists(
    st.builds(
        Step,
        st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True).map(tuple),
        st.booleans(),
        st.booleans(),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=60,
)


@dataclass(slots=True)
class Run:
    """One operation as it was sent, and what came back."""

    step: Step
    nonce: bytes
    guards: dict[bytes, int]
    outcome: OpResult | StorageError | None = None


@given(
    steps=STEPS,
    script=st.lists(st.sampled_from([*FATES, *["answered"] * 5]), max_size=30),
    group=st.integers(1, 20),
    in_flight=st.integers(1, 4),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_agree_with_the_history_that_etcd_keeps(
    etcd_server: EtcdProcess, steps: list[Step], script: list[str], group: int, in_flight: int
) -> None:
    asyncio.run(_check(etcd_server, steps, script, group, in_flight))


async def _check(
    server: EtcdProcess, steps: Sequence[Step], script: list[str], group: int, in_flight: int
) -> None:
    prefix = b"/history/" + uuid.uuid4().hex.encode() + b"/"
    config = CommitterConfig(
        limits=GroupLimits(max_ops=group), max_in_flight=in_flight, backoff_first=0.001, backoff_max=0.002
    )
    lossy: list[LossyClient] = []

    def wrap(client: EtcdClient) -> LossyClient:
        lossy.append(LossyClient(client, list(script)))
        return lossy[0]

    async with open_site(server, prefix, config=config, wrap=wrap) as site:
        before = (await site.direct.range(prefix + b"epoch", timeout=TIMEOUT)).header.revision
        runs = await _send(site, steps)
        history = await _history(site, before)
        _replay(site, runs, history, lossy[0], before)


async def _send(site: Site, steps: Sequence[Step]) -> list[Run]:
    seen: dict[bytes, int] = {}
    runs: list[Run] = []
    futures: list[asyncio.Future[OpResult]] = []

    def learn(run: Run, done: asyncio.Future[OpResult]) -> None:
        if done.exception() is None and done.result().won:
            for key in run.guards:
                seen[key] = 0 if run.step.delete else done.result().revision

    for number, step in enumerate(steps):
        nonce = b"nonce-%d" % number
        keys = [site.key(f"key{n}") for n in step.keys]
        guards = {key: 0 if step.blind else seen.get(key, 0) for key in keys}
        run = Run(step, nonce, guards)
        op = GuardedOp(
            lanes=tuple(keys),
            compares=(
                *(wire.mod_eq(key, revision) for key, revision in guards.items()),
                wire.create_eq(site.key(f"journal/{number}"), 0),
            ),
            thens=(
                *(wire.delete(key) if step.delete else wire.put(key, nonce) for key in keys),
                wire.put(site.key(f"journal/{number}"), nonce),
            ),
            elses=(wire.get(site.key(f"journal/{number}")),),
            deadline=time.monotonic() + 10.0,
        )
        future = site.committer.enqueue(op)
        future.add_done_callback(partial(learn, run))
        runs.append(run)
        futures.append(future)
        if step.pause:
            await asyncio.wait([future])
    for run, future in zip(runs, futures, strict=True):
        try:
            run.outcome = await future
        except StorageError as error:
            run.outcome = error
    return runs


async def _history(site: Site, before: int) -> dict[int, State]:
    """State of all keys at every revision from ``before`` to now."""
    end = site.prefix[:-1] + bytes((site.prefix[-1] + 1,))
    now = (await site.direct.range(site.key("epoch"), timeout=TIMEOUT)).header.revision
    history: dict[int, State] = {}
    for revision in range(before, now + 1):
        reply = await site.direct.range(site.prefix, end, revision=revision, timeout=TIMEOUT)
        history[revision] = {kv.key: (kv.value, kv.mod_revision) for kv in reply.kvs}
    return history


def _replay(
    site: Site, runs: Sequence[Run], history: dict[int, State], lossy: LossyClient, before: int
) -> None:
    def guard_held(run: Run, state: State) -> bool:
        return all(state.get(key, (b"", 0))[1] == revision for key, revision in run.guards.items())

    last = max(history)
    applied: dict[bytes, int] = {}
    for number, run in enumerate(runs):
        entry = history[last].get(site.key(f"journal/{number}"))
        if entry is not None:
            assert entry[0] == run.nonce
            applied[run.nonce] = entry[1]
    order: dict[bytes, int] = {}
    for run in runs:
        outcome = run.outcome
        at = applied.get(run.nonce)
        if at is not None:
            # Applied: its guard held in the state before the whole Txn, and all its effects are in one
            # revision.
            assert guard_held(run, history[at - 1])
            for key in run.guards:
                assert history[at].get(key) == (None if run.step.delete else (run.nonce, at))
                # Operations on one lane were applied in the order in which they came.
                assert order.get(key, before) < at
                order[key] = at
        match outcome:
            case OpResult(won=True):
                assert at == outcome.revision
                assert at in site.own_revisions
            case OpResult(won=False, resent=resent):
                journal = [kv.value for kv in outcome.responses[0].response_range.kvs]
                if at is not None:  # only a repeat may lose against itself, and it is told
                    assert resent
                    assert journal == [run.nonce]
                else:
                    assert journal == []
                    revision, wrote = lossy.answered[run.nonce]
                    assert not guard_held(run, history[revision - 1 if wrote else revision])
            case NotApplied() | EtcdUnavailable():
                assert at is None
            case OutcomeUnknown():
                raise AssertionError("the script ends long before the deadline")
    # A revision is called own when its answer came, once, and never when its outcome was unknown.
    won = {run.outcome.revision for run in runs if isinstance(run.outcome, OpResult) and run.outcome.won}
    assert sorted(site.own_revisions) == sorted(won)
    # Nothing else was written.
    changed = {at for at in history if at > before and history[at] != history[at - 1]}
    assert changed == set(applied.values())
