"""WatchNotices: its request's form, and notices whole on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from coordinator.core.job import JobState
from coordinator.core.notice import Notice, NoticeKind
from coordinator.errors import Reason, RequestError
from coordinator.reconciler.by_hand import PassRun
from coordinator.rpc.admin_servicer import AdminServicer, AdminUseCases
from coordinator.services.notices import NoticeHub
from leasekeeper.v1 import admin_service_pb2 as pb
from leasekeeper.v1 import types_pb2 as types
from tests.support.clock import SteppingClock
from tests.support.fake_ports import SteadyEntropy

NOTICE = Notice(
    kind=NoticeKind.DUPLICATE_RUN,
    reason="a settlement came late",
    namespace="default",
    queue="mail",
    type="send",
    job_id="j1",
    session_id="s1",
    attempt=2,
    token=77,
    state_before=JobState.RUNNING,
    state_after=JobState.RUNNING,
    overlap_ms=1_500,
    facts={"call": "settlement"},
)


class NoReconcile:
    """The other half of AdminService, which nobody calls here."""

    async def run(
        self, namespace: str, names: Sequence[str], *, dry_run: bool, deadline: float
    ) -> list[PassRun]:
        raise AssertionError("nobody asked for it")


def a_hub() -> NoticeHub:
    return NoticeHub(SteppingClock(now_ms=5_000), SteadyEntropy(), coordinator_id="c1")


async def first(hub: NoticeHub, request: pb.WatchNoticesRequest) -> pb.WatchNoticesResponse:
    async with asyncio.timeout(5):
        return await anext(
            AdminServicer(
                AdminUseCases(reconcile=NoReconcile(), notices=hub, sessions=None)  # type: ignore[arg-type]
            ).watch_notices(request)
        )


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.WatchNoticesRequest(namespace="A b"), "namespace"),
        (pb.WatchNoticesRequest(kinds=[pb.NOTICE_KIND_LOST, 99]), "kinds[1]"),  # type: ignore[list-item]
        (pb.WatchNoticesRequest(kinds=[pb.NOTICE_KIND_UNSPECIFIED]), "kinds[0]"),
        (pb.WatchNoticesRequest(kinds=[pb.NOTICE_KIND_LOST] * 100), "kinds"),
    ],
)
async def test_a_bad_request_is_refused_with_its_field(request_: pb.WatchNoticesRequest, field: str) -> None:
    hub = a_hub()

    with pytest.raises(RequestError) as refused:
        await first(hub, request_)

    assert refused.value.reason is Reason.VALIDATION_FAILED
    assert [one.field for one in refused.value.fields] == [field]
    assert hub.streams == 0


async def test_a_notice_is_whole_on_the_wire() -> None:
    hub = a_hub()
    hub.publish(NOTICE)

    answer = await first(hub, pb.WatchNoticesRequest(include_recent=True))

    notice = answer.notice
    assert (notice.notice_id, notice.coordinator_id) == (f"{1:032x}", "c1")
    assert (notice.kind, notice.time.ToMilliseconds()) == (pb.NOTICE_KIND_DUPLICATE_RUN, 5_000)
    assert (notice.namespace, notice.queue, notice.type) == ("default", "mail", "send")
    assert (notice.job_id, notice.session_id) == ("j1", "s1")
    assert (notice.attempt, notice.fencing_token) == (2, 77)
    assert notice.state_before == notice.state_after == types.JOB_STATE_RUNNING
    assert (notice.reason, dict(notice.facts)) == ("a settlement came late", {"call": "settlement"})
    assert notice.overlap.ToMilliseconds() == 1_500
    assert answer.missed == 0


def test_every_kind_has_its_published_number() -> None:
    assert {f"NOTICE_KIND_{kind.name}": kind.value for kind in NoticeKind} == {
        name: number for name, number in pb.NoticeKind.items() if number
    }


async def test_kinds_and_namespace_choose_what_is_streamed() -> None:
    hub = a_hub()
    hub.publish(NOTICE)
    hub.publish(Notice(kind=NoticeKind.LOST, reason="elsewhere", namespace="other"))
    hub.publish(Notice(kind=NoticeKind.LOST, reason="here", namespace="default"))

    answer = await first(hub, pb.WatchNoticesRequest(kinds=[pb.NOTICE_KIND_LOST], include_recent=True))

    assert answer.notice.reason == "here"
