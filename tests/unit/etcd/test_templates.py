"""A templated operation is, byte by byte, what the general way makes of it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core import commands as c
from coordinator.core.fencing import make_token
from coordinator.core.job import Claim, Job, Terms
from coordinator.core.machine import Decision, Guard, decide
from coordinator.etcd import templates, wire
from coordinator.etcd.codec import JobCodec
from coordinator.etcd.keys import KeySpace
from coordinator.etcd.set_aside import SetAside
from coordinator.etcd.txn import Compiled, TxnCodec
from coordinator.ports import Operation, Spec, Stored

NOW = 1_700_000_000_000
EPOCH = 3

NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=60)
REVISIONS = st.one_of(st.integers(1, 300), st.integers(1, 2**44 - 1))
LEASES = st.integers(1, 2**63 - 1)


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[Operation, int]]:
    """Submission, claims and end of one job, each with the retention lease that it is built for."""
    terms = Terms(
        queue=draw(NAMES),
        type=draw(NAMES),
        submit_ms=NOW,
        counter=draw(st.integers(0, 2**40)),
        labels=draw(st.dictionaries(NAMES, TEXTS, max_size=2)),
        digest=draw(st.binary(max_size=16)),
        run_timeout_ms=draw(st.integers(0, 10**9)),
    )
    spec = Spec(payload=draw(st.binary(max_size=300)), content_type=draw(st.sampled_from(["", "text/plain"])))
    submit = c.Submit(namespace=draw(NAMES), job_id=draw(TEXTS), terms=terms)
    waiting = _decided(None, None, submit)
    ready_at, claimed_at, changed_at = draw(REVISIONS), draw(REVISIONS), draw(REVISIONS)
    session = f"{draw(LEASES):016x}"
    held = Claim(
        session=session,
        attempt=1,
        nonce=draw(st.binary(max_size=16)),
        start_ms=NOW,
        queue=terms.queue,
        type=terms.type,
        run_timeout_ms=terms.run_timeout_ms,
    )
    running = _decided(waiting, None, c.ClaimIt(claim=held))
    token = make_token(EPOCH, claimed_at)
    result = draw(st.binary(max_size=1024))
    done = _decided(running, replace(held, token=token), c.Complete(token=token, digest=b"c", result=result))
    return [
        (_operation(Guard.ABSENT, None, waiting, spec=spec), 0),
        (_operation(Guard.READY, Stored(waiting, ready_at), running, claim=held), 0),
        (_operation(Guard.READY, Stored(waiting, ready_at), running, claim=held, want_spec=True), 0),
        (_operation(Guard.HELD, Stored(running, changed_at), done, token=token), draw(LEASES)),
    ]


def _decided(job: Job | None, claim: Claim | None, command: c.Command) -> Job:
    outcome = decide(job, claim, command, NOW)
    assert isinstance(outcome, Decision)
    assert outcome.job is not None
    return outcome.job


def _operation(guard: Guard, before: Stored | None, after: Job, **more: object) -> Operation:
    return Operation(guard=guard, before=before, after=after, deadline=1.0, **more)  # type: ignore[arg-type]


def _codec() -> TxnCodec:
    return TxnCodec(KeySpace("/r"), JobCodec(), epoch=lambda: EPOCH, set_aside=SetAside(), now_ms=lambda: NOW)


def _in_general(operation: Operation, lease: int) -> Compiled:
    guarded, reads_at = _codec().describe(operation, lease)
    pieces = (guarded.compares, guarded.thens, guarded.elses)
    return Compiled(guarded.lanes, wire.nested(*pieces), max(map(len, pieces)), guarded.reply_bytes, reads_at)


@given(lives())
def test_every_template_makes_the_bytes_of_the_general_way(life: list[tuple[Operation, int]]) -> None:
    for operation, lease in life:
        assert operation.after is not None
        keys = KeySpace("/r").namespace(operation.after.namespace)
        state = keys.state(operation.after.job_id)
        value = JobCodec().encode(operation.after)
        made = templates.by_template(operation, operation.after, keys, state, value, lease)
        in_general = _in_general(operation, lease)
        assert made == in_general.nested
        compiled = _codec().compile(operation, lease)
        assert (compiled.lanes, compiled.nested, compiled.reply_bytes) == (
            in_general.lanes,
            in_general.nested,
            in_general.reply_bytes,
        )
        assert compiled.width >= in_general.width
        if operation.want_spec:
            assert compiled.reads_at == in_general.reads_at


@given(lives())
def test_what_no_template_fits_goes_the_general_way(life: list[tuple[Operation, int]]) -> None:
    submission, claim, _, end = (operation for operation, _ in life)
    unlike = [
        (_like(submission, spec=None), 0),
        (_like(claim, want_checkpoint=True), 0),
        (_like(claim, claim=None), 0),
        (_like(claim, guard=Guard.STATE), 0),
        (_like(end, guard=Guard.UNHELD), 5),
        (_like(end, want_spec=True), 5),
        (end, 0),
    ]
    for operation, lease in unlike:
        assert operation.after is not None
        keys = KeySpace("/r").namespace(operation.after.namespace)
        assert templates.by_template(operation, operation.after, keys, b"k", b"v", lease) is None


def _like(operation: Operation, **changes: object) -> Operation:
    names = ("guard", "before", "after", "token", "claim", "spec", "want_spec", "want_checkpoint")
    fields = {name: getattr(operation, name) for name in names} | changes
    return Operation(deadline=1.0, **fields)
