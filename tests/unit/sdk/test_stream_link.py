"""The worker's stream against a coordinator that breaks, falls silent, or knows no streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from leasekeeper.v1 import worker_service_pb2 as pb
from tests.support.fake_worker_server import FakeCoordinator
from tests.support.polling import eventually
from tests.unit.sdk.conftest import Working, make
from worker_sdk import Context, WorkerConfig
from worker_sdk._machine import credit_size
from worker_sdk.errors import ConfigError

Script = Callable[["Streaming", Any, Iterator[Any], Any], Iterator[Any]]


class Streaming(FakeCoordinator):
    """A coordinator whose streams follow scripts, one for each stream; then it has none."""

    def __init__(self, *scripts: Script) -> None:
        super().__init__()
        self.scripts = list(scripts)
        self.streams = 0
        self.claim_calls = 0

    def Work(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        self.streams += 1
        if not self.scripts:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no streams here")
        first = next(request_iterator)
        yield from self.scripts.pop(0)(self, first.open, request_iterator, context)

    def ClaimJobs(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.claim_calls += 1
        return super().ClaimJobs(request, context)

    def claims_for(self, opening: Any) -> Any:
        """Claim what waits for the first lane."""
        lane = opening.lanes[0]
        request = pb.ClaimJobsRequest(
            session_id=opening.session_id,
            request_id=opening.request_id,
            queues=lane.queues,
            max_jobs=lane.credit.jobs,
        )
        with self._changed:
            return pb.WorkResponse(claims=pb.WorkClaims(claims=self._take(request)))


OPENED = pb.WorkResponse(opened=pb.WorkOpened(coordinator_id="c1"))


def broken(server: Streaming, opening: Any, requests: Iterator[Any], context: Any) -> Iterator[Any]:
    context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
    yield


def silent(server: Streaming, opening: Any, requests: Iterator[Any], context: Any) -> Iterator[Any]:
    yield OPENED
    for _ in requests:
        pass


def deaf_to_settlements(
    server: Streaming, opening: Any, requests: Iterator[Any], context: Any
) -> Iterator[Any]:
    """Push what waits, and break when it is settled, without an answer but not without an effect."""
    yield OPENED
    yield server.claims_for(opening)
    for request in requests:
        if request.WhichOneof("what") == "settle":
            for item in request.settle.settlements:
                server._settle(item)
            context.abort(grpc.StatusCode.UNAVAILABLE, "cut")


def quiet(server: Streaming, opening: Any, requests: Iterator[Any], context: Any) -> Iterator[Any]:
    yield OPENED
    yield pb.WorkResponse(command=pb.WORKER_COMMAND_QUIET)
    # Sent, and from here on beats say the same, as of a coordinator: else the next one would take it back.
    server.command = pb.WORKER_COMMAND_QUIET
    for _ in requests:
        pass


async def do_one_job(server: Streaming, working: Working, job_id: str = "j") -> list[int]:
    """Let a worker do one job; the attempts that it ran."""
    runs: list[int] = []
    worker = make(server)

    @worker.handler("t")
    async def handle(ctx: Context) -> None:
        runs.append(ctx.attempt)

    server.add(job_id)
    async with working(worker):
        await eventually(lambda: bool(server.how(job_id)), timeout=10)
    return runs


async def test_a_coordinator_that_knows_no_streams_is_polled(working: Working) -> None:
    with Streaming() as server:
        assert [1] == await do_one_job(server, working)
        assert (server.streams, server.claim_calls > 0) == (1, True)


async def test_streams_that_break_at_once_give_way_to_polls(working: Working) -> None:
    with Streaming(broken, broken, broken, broken) as server:
        assert [1] == await do_one_job(server, working)
        assert server.streams == 3


async def test_a_settlement_that_its_stream_did_not_answer_is_sent_again_and_counts_once(
    working: Working,
) -> None:
    with Streaming(deaf_to_settlements) as server:
        assert [1] == await do_one_job(server, working)
        assert ["complete"] == server.how("j")


async def test_a_stream_that_gives_no_sign_of_life_is_left(working: Working) -> None:
    with Streaming(silent) as server:
        assert [1] == await do_one_job(server, working)
        assert server.streams >= 2


async def test_a_command_comes_by_the_stream(working: Working) -> None:
    with Streaming(quiet, silent, silent) as server:
        worker = make(server)

        @worker.handler("t")
        async def handle(ctx: Context) -> None: ...

        async with working(worker):
            await eventually(lambda: worker.health().stopping)
        assert server.claim_calls == 0


async def test_a_worker_told_to_poll_opens_no_stream(working: Working) -> None:
    with Streaming(silent) as server:
        worker = make(server, config=WorkerConfig(transport="poll"))

        @worker.handler("t")
        async def handle(ctx: Context) -> None: ...

        server.add("j")
        async with working(worker):
            await eventually(lambda: bool(server.how("j")))
        assert server.streams == 0


def test_another_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match="transport"):
        WorkerConfig(transport="pigeon")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "outstanding", "free", "expected"),
    [
        (1, 0, 1, 1),
        (4, 3, 1, 1),
        (400, 390, 10, 0),
        (400, 300, 25, 25),
        (400, 200, 10, 10),
        (400, 0, 0, 0),
    ],
)
def test_small_credits_are_gathered_while_most_slots_have_leave(
    limit: int, outstanding: int, free: int, expected: int
) -> None:
    assert expected == credit_size(limit=limit, outstanding=outstanding, free=free)
