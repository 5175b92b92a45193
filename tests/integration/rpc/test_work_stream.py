"""The Work stream on real etcd: credits, settlements and beats up; claims, verdicts and stops down."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from coordinator.app import Coordinator, running_coordinator
from coordinator.config import Settings
from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import types_pb2 as t
from leasekeeper.v1 import worker_service_pb2 as w
from leasekeeper.v1 import worker_service_pb2_grpc
from tests.integration.rpc.conftest import Api, OpenedWorker, open_worker
from tests.support.polling import eventually
from tests.support.work_stream import Stream, lane
from tests.unit.rpc import builders as b
from tests.unit.rpc.fakes import Told, told

Code = grpc.StatusCode


async def submit(api: Api, *job_ids: str, **changes: Any) -> None:
    specs = (b.job_spec(job_id=job_id, **changes) for job_id in job_ids)
    await api.jobs.SubmitJobs(b.submit_batch(*specs), timeout=5)


async def job(api: Api, job_id: str) -> Any:
    return (await api.jobs.GetJob(j.GetJobRequest(job_id=job_id), timeout=5)).job


async def ended(stream: Stream) -> Told:
    error = await stream.end()
    assert error is not None, "the stream ended in order"
    return told(error)


async def test_a_job_is_pushed_as_it_arrives_and_settled_on_the_stream(
    api: Api, worker: OpenedWorker
) -> None:
    async with Stream(api.workers, worker.session_id, lane()) as stream:
        await submit(api, "a")
        claim = await stream.claim()
        [result] = await stream.complete(claim)
        again = await stream.complete(claim)

    assert ("a", b"p", 1) == (claim.job_id, claim.payload, claim.attempt)
    assert (t.JOB_STATE_SUCCEEDED, False) == (result.state, result.HasField("error"))
    assert [result] == again, "the repeat of a settlement answers as the first did"
    assert stream.coordinator_id


async def test_no_more_is_sent_than_credits_allow(api: Api, worker: OpenedWorker) -> None:
    await submit(api, *(f"j{n}" for n in range(20)))
    async with Stream(api.workers, worker.session_id, lane(jobs=3)) as stream:
        first = [await stream.claim() for _ in range(3)]
        await stream.settle()
        assert stream.claims.empty()
        await stream.credit(2)
        more = [await stream.claim() for _ in range(2)]
        await stream.settle()
        await asyncio.sleep(0.1)
        held = len(first) + len(more) + stream.claims.qsize()
        states = [(await job(api, f"j{n}")).state for n in range(20)]

    assert 5 == held
    assert 5 == states.count(t.JOB_STATE_RUNNING)


async def test_bytes_are_credit_too_and_the_first_job_is_sent_whole(api: Api, worker: OpenedWorker) -> None:
    await submit(api, "a", "b", payload=bytes(10_000))
    async with Stream(api.workers, worker.session_id, lane(jobs=5, size=4_000)) as stream:
        await stream.claim()
        await stream.settle()
        assert stream.claims.empty()
        await stream.credit(0, size=20_000)
        await stream.claim()


async def test_lanes_have_credits_of_their_own(api: Api, worker: OpenedWorker) -> None:
    lanes = (lane(jobs=1), lane(jobs=2, types=("bill",)))
    async with Stream(api.workers, worker.session_id, *lanes) as stream:
        await submit(api, "a1", "a2", "a3")
        await submit(api, "b1", "b2", "b3", type="bill")
        claims = [await stream.claim() for _ in range(3)]
        await stream.settle()
        assert stream.claims.empty()
        await stream.credit(1, lane=1)
        last = await stream.claim()

    assert ["bill", "bill", "send"] == sorted(claim.type for claim in claims)
    assert "bill" == last.type


async def test_a_stop_arrives_at_once_whatever_the_ttl(api: Api) -> None:
    worker = await open_worker(api, ttl=Duration(seconds=60))
    async with Stream(api.workers, worker.session_id, lane()) as stream:
        await submit(api, "a")
        claim = await stream.claim()
        begun = time.monotonic()
        await api.jobs.CancelJob(j.CancelJobRequest(job_id="a"), timeout=5)
        async with asyncio.timeout(5):
            stop = await stream.stops.get()
        took = time.monotonic() - begun

    assert ("a", claim.fencing_token) == stop
    assert took < 2, f"the request to stop took {took:.3f} s"


async def test_a_stop_arrives_from_another_coordinator_for_a_claim_by_poll(
    api: Api, settings: Settings, worker: OpenedWorker
) -> None:
    async with (
        running_coordinator(settings) as address,
        grpc.aio.insecure_channel(address) as channel,
        Stream(worker_service_pb2_grpc.WorkerServiceStub(channel), worker.session_id) as stream,
    ):
        await submit(api, "a")
        [claim] = await worker.claim(wait=2)
        await api.jobs.CancelJob(j.CancelJobRequest(job_id="a"), timeout=5)
        async with asyncio.timeout(5):
            stop = await stream.stops.get()

    assert ("a", claim.fencing_token) == stop


async def test_beats_go_up_the_stream_and_are_those_of_heartbeat(api: Api, worker: OpenedWorker) -> None:
    async with Stream(api.workers, worker.session_id, lane()) as stream:
        await submit(api, "a")
        claim = await stream.claim()
        beat = await stream.beat(1, claim)
        foreign = w.HeartbeatRequest(session_id="0123456789abcdef", number=7)
        await stream.call.write(w.WorkRequest(beat=foreign))
        async with asyncio.timeout(5):
            refused = await stream.beats.get()

    assert (1, w.AUTHORITY_CONFIRMED) == (beat.number, beat.response.authority)
    assert [w.VERDICT_HELD] == [verdict.verdict for verdict in beat.response.verdicts]
    assert (7, 3) == (refused.number, refused.error.code), "INVALID_ARGUMENT, and the stream goes on"


async def test_a_batch_of_bad_form_is_refused_by_number_and_the_stream_goes_on(
    api: Api, worker: OpenedWorker
) -> None:
    async with Stream(api.workers, worker.session_id, lane()) as stream:
        answer = await stream.settle(*(w.Settlement(job_id="a", fencing_token=1) for _ in range(101)))
        bad = await stream.settle(w.Settlement(job_id="a"))
        alive = await stream.settle()

    assert (3, 0) == (answer.error.code, len(answer.results))
    assert [3] == [result.error.code for result in bad.results]
    assert not alive.HasField("error")


@pytest.mark.parametrize(
    ("lanes", "field"),
    [
        ((w.WorkLane(),), "lanes[0].queues"),
        ((lane(types=()),), "lanes[0].queues[0].types"),
        ((lane(queue="BAD"),), "lanes[0].queues[0].queue"),
        ((lane(jobs=1_001),), "lanes[0].credit"),
        (tuple(lane() for _ in range(33)), "lanes"),
    ],
)
async def test_an_opening_of_bad_form_is_refused_with_its_field(
    api: Api, worker: OpenedWorker, lanes: tuple[Any, ...], field: str
) -> None:
    async with Stream(api.workers, worker.session_id, *lanes) as stream:
        error = await ended(stream)

    assert (Code.INVALID_ARGUMENT, "VALIDATION_FAILED") == (error.code, error.reason)
    assert [field] == error.fields


async def test_messages_that_no_stream_may_send_end_it(api: Api, worker: OpenedWorker) -> None:
    wrong = {
        "open": w.WorkRequest(open=w.WorkOpen(session_id=worker.session_id, request_id="r")),
        "what": w.WorkRequest(),
        "credit.lane": w.WorkRequest(credit=w.WorkCredit(lane=3)),
        "lanes[0].credit": w.WorkRequest(credit=w.WorkCredit(jobs=2_000)),
    }
    for field, message in wrong.items():
        async with Stream(api.workers, worker.session_id, lane()) as stream:
            await stream.call.write(message)
            error = await ended(stream)
        assert ("VALIDATION_FAILED", [field]) == (error.reason, error.fields)


async def test_a_stream_must_be_opened_first(api: Api) -> None:
    call = api.workers.Work()
    await call.write(w.WorkRequest(settle=w.WorkSettle()))
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call.read()

    assert (Code.INVALID_ARGUMENT, ["open"]) == (told(refusal.value).code, told(refusal.value).fields)


async def test_a_session_that_is_over_gets_no_stream_and_keeps_none(api: Api, worker: OpenedWorker) -> None:
    async with Stream(api.workers, worker.session_id, lane()) as stream:
        await api.workers.CloseSession(w.CloseSessionRequest(session_id=worker.session_id), timeout=5)
        error = await ended(stream)
    async with Stream(api.workers, worker.session_id, lane()) as late:
        never = await ended(late)

    assert (Code.NOT_FOUND, "SESSION_NOT_FOUND") == (error.code, error.reason)
    assert (Code.NOT_FOUND, "SESSION_NOT_FOUND") == (never.code, never.reason)


async def test_a_newer_stream_of_a_session_ends_the_older(api: Api, worker: OpenedWorker) -> None:
    async with (
        Stream(api.workers, worker.session_id, lane()) as older,
        Stream(api.workers, worker.session_id, lane()) as newer,
    ):
        error = await ended(older)
        await submit(api, "a")
        claim = await newer.claim()

    assert "TOO_MANY_REQUESTS" == error.reason
    assert "a" == claim.job_id


async def test_who_half_closes_gets_its_answers_and_no_more_claims(api: Api, worker: OpenedWorker) -> None:
    async with Stream(api.workers, worker.session_id, lane()) as stream:
        await submit(api, "a")
        claim = await stream.claim()
        done = w.Settlement(job_id="a", fencing_token=claim.fencing_token, complete=w.Completion())
        await stream.call.write(w.WorkRequest(settle=w.WorkSettle(number=9, settlements=[done])))
        await stream.call.done_writing()
        error = await stream.end()
        answer = stream.settled.get_nowait()
        await submit(api, "b")
        state = (await job(api, "b")).state

    assert error is None
    assert (9, t.JOB_STATE_SUCCEEDED) == (answer.number, answer.results[0].state)
    assert t.JOB_STATE_PENDING == state


async def test_polls_and_streams_stand_in_one_line(api: Api, worker: OpenedWorker) -> None:
    others = [await open_worker(api) for _ in range(3)]
    async with Stream(api.workers, worker.session_id, lane(jobs=100)) as stream:
        polls = [asyncio.create_task(other.claim(max_jobs=1, wait=5)) for other in others]
        await asyncio.sleep(0.2)
        for n in range(8):
            await submit(api, f"j{n}")
        found = [len(claims) for claims in await asyncio.gather(*polls)]
        rest = [await stream.claim() for _ in range(5)]

    assert [1, 1, 1] == found, "the stream did not take what the polls stood in line for"
    assert 5 == len({claim.job_id for claim in rest})


async def test_a_stop_of_the_coordinator_ends_streams_and_claims_stay(settings: Settings, api: Api) -> None:
    worker = await open_worker(api)
    coordinator = Coordinator(settings)
    running = asyncio.create_task(coordinator.run())
    await coordinator.started.wait()
    async with grpc.aio.insecure_channel(coordinator.address) as channel:
        stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
        async with Stream(stub, worker.session_id, lane()) as stream:
            await submit(api, "a")
            claim = await stream.claim()
            coordinator.stop()
            error = await ended(stream)
    await running
    beat = await worker.beat(1, claim)
    [done] = (await api.workers.SettleJobs(_completed(claim), timeout=5)).results

    assert (Code.UNAVAILABLE, "DRAINING") == (error.code, error.reason)
    assert w.VERDICT_HELD == beat.verdicts[0].verdict
    assert t.JOB_STATE_SUCCEEDED == done.state


def _completed(claim: Any) -> w.SettleJobsRequest:
    done = w.Settlement(job_id=claim.job_id, fencing_token=claim.fencing_token, complete=w.Completion())
    return w.SettleJobsRequest(settlements=[done])


async def test_a_stream_that_is_gone_claims_nothing(api: Api, worker: OpenedWorker) -> None:
    async with Stream(api.workers, worker.session_id, lane()) as stream:
        await stream.settle()
    # The stream is gone, and so is its place in line: nothing is claimed for it any more.
    other = await open_worker(api)
    await submit(api, "a")

    async def claimed() -> bool:
        return bool(await other.claim(wait=1))

    await eventually(claimed, timeout=3)


async def test_135_what_a_reader_did_not_read_goes_back_at_once_when_its_stream_breaks(
    api: Api, worker: OpenedWorker
) -> None:
    other = await open_worker(api)
    await submit(api, "known")
    [known] = await other.claim(wait=2)
    async with grpc.aio.insecure_channel(api.address) as channel:
        call = worker_service_pb2_grpc.WorkerServiceStub(channel).Work()
        opening = w.WorkOpen(session_id=worker.session_id, request_id="slow", lanes=[lane(jobs=300)])
        await call.write(w.WorkRequest(open=opening))
        for start in range(0, 300, 20):
            await submit(api, *(f"j{n:03}" for n in range(start, start + 20)), payload=bytes(100_000))

        async def backed_up() -> bool:
            running = j.ListJobsRequest(states=[t.JOB_STATE_RUNNING], queue="mail", page_size=1000)
            return len((await api.jobs.ListJobs(running, timeout=5)).jobs) > 120

        await eventually(backed_up, timeout=20)
        call.cancel()
        async with Stream(api.workers, other.session_id, lane(jobs=300)) as stream:
            # A claim that was handed to the transport may have arrived: it is left to the beats.
            claims = [await stream.claim(timeout=10) for _ in range(200)]
    attempts = {claim.attempt for claim in claims}

    assert known.job_id not in {claim.job_id for claim in claims}
    assert {0} == {claim.failures for claim in claims}
    assert attempts == {1, 2}, "some were claimed for the reader, and came back uncharged"
