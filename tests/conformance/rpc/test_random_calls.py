"""Long lines of random calls: whatever they come to, the fake answers them as the service does.

Little time passes in them, so delays are either none or long.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import types_pb2 as t
from leasekeeper.v1 import worker_service_pb2 as w
from tests.conformance.rpc.subject import Subject, Worker, span
from tests.conformance.rpc.transcript import Transcript
from tests.unit.rpc import builders as b

IDS = ("a", "b", "c")
MOST_LOOKS = 3
POLICIES = (
    t.RetryPolicy(initial_delay=span(900), max_retries=1),
    t.RetryPolicy(max_retries=0),
    t.RetryPolicy(initial_delay=span(900), non_retryable_types=["Bad"]),
)


@dataclass
class Line:
    """One line of calls, drawn from *seed*: the same for both, as long as they answer alike."""

    subject: Subject
    seed: int
    transcript: Transcript = field(default_factory=Transcript)
    claims: dict[str, list[w.Claim]] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    looks: Counter[str] = field(default_factory=Counter)

    async def run(self, calls: int) -> Transcript:
        draw = random.Random(self.seed)
        self.workers = [await self.subject.open() for _ in range(2)]
        moves = [
            (self.submit, 6),
            (self.claim, 6),
            (self.claim_id, 1),
            (self.settle, 4),
            (self.checkpoint, 4),
            (self.beat, 2),
            (self.by_hand, 4),
            (self.read, 3),
            (self.close, 1),
        ]
        for _ in range(calls):
            [move] = draw.choices([one for one, _ in moves], [weight for _, weight in moves])
            self.transcript.lines.append(move.__name__)
            await move(draw)
            await self.subject.pass_time(0.002)  # who is ready later stands behind
        return self.transcript

    def some_claim(self, draw: random.Random) -> w.Claim:
        """A claim of a job's history, or one that never was."""
        job_id = draw.choice(IDS)
        known = self.claims.get(job_id) or [w.Claim(job_id=job_id, fencing_token=(1 << 44) | 1)]
        return known[-1] if draw.random() < 0.8 else draw.choice(known)

    async def submit(self, draw: random.Random) -> None:
        more: dict[str, Any] = {"payload": draw.choice([b"x", b"y"])} if draw.random() < 0.2 else {}
        if draw.random() < 0.4:
            more["unique_key"] = draw.choice("uv")
        if draw.random() < 0.5:
            more["rollback"] = t.RollbackJob(queue="undo", type="undo", payload=b"z")
        if draw.random() < 0.6:
            more["locks"] = [t.JobLock(name="l")]
        more["retry_policy"] = draw.choice(POLICIES)
        more["priority"] = draw.randint(0, 5)
        await self.transcript.note(self.subject.submit(draw.choice(IDS), **more))

    async def claim(self, draw: random.Random) -> None:
        claims = await self.transcript.note(draw.choice(self.workers).claim(max_jobs=1, wait=0.05))
        for claim in claims or ():
            self.claims.setdefault(claim.job_id, []).append(claim)

    async def claim_id(self, draw: random.Random) -> None:
        # The delays of contention run by the clock: each look is another session's, and no job has so many
        # that a second would count.
        job_id = draw.choice(IDS)
        self.looks[job_id] += 1
        if self.looks[job_id] > MOST_LOOKS:
            return
        worker = await self.subject.open()
        self.workers[draw.randrange(2)] = worker
        claim = await self.transcript.note(worker.claim_id(job_id, wait=0.05), delay=False)
        if claim is not None:
            self.claims.setdefault(claim.job_id, []).append(claim)

    async def settle(self, draw: random.Random) -> None:
        claim, worker = self.some_claim(draw), self.workers[0]
        how = draw.choice(["complete", "complete", "fail", "fail", "release"])
        if how == "complete":
            more = {}
            if draw.random() < 0.3:
                more["follow_ups"] = [b.job_spec(job_id=draw.choice(IDS), unique_key=draw.choice(["", "u"]))]
            await self.transcript.note(worker.complete(claim, draw.choice([b"r", b"R" * 1500]), **more))
        elif how == "fail":
            options: list[dict[str, Any]] = [{}, {"no_retry": True}, {"retry_delay": span(0)}]
            kind = draw.choice(["Boom", "Bad"])
            await self.transcript.note(worker.fail(claim, kind, **draw.choice(options)))
        else:
            await self.transcript.note(worker.release(claim, delay=span(draw.choice([0, 900]))))

    async def checkpoint(self, draw: random.Random) -> None:
        progress = t.Progress(ratio=0.5, note=draw.choice("xyz"))
        call = self.workers[0].save(self.some_claim(draw), b"c", draw.randint(0, 3), progress=progress)
        await self.transcript.note(call)

    async def beat(self, draw: random.Random) -> None:
        claims = [self.some_claim(draw) for _ in range(2)]
        progress = t.Progress(ratio=0.25)
        await self.transcript.note(draw.choice(self.workers).beat(*claims, progress=progress))

    async def by_hand(self, draw: random.Random) -> None:
        job_id, jobs = draw.choice(IDS), self.subject.jobs
        calls = {
            "cancel": lambda: jobs.CancelJob(j.CancelJobRequest(job_id=job_id, reason="r"), timeout=5),
            "delete": lambda: jobs.DeleteJob(j.DeleteJobRequest(job_id=job_id), timeout=5),
            "retry": lambda: jobs.RetryJob(
                j.RetryJobRequest(job_id=job_id, request_id=draw.choice("xy")), timeout=5
            ),
            "update": lambda: jobs.UpdateJob(
                j.UpdateJobRequest(job_id=job_id, priority=draw.randint(1, 5)), timeout=5
            ),
            "tagged": lambda: jobs.DeleteJob(j.DeleteJobRequest(job_id=job_id, etag="1"), timeout=5),
        }
        await self.transcript.note(calls[draw.choice(sorted(calls))]())

    async def read(self, draw: random.Random) -> None:
        job_id, jobs = draw.choice(IDS), self.subject.jobs
        if draw.random() < 0.5:
            await self.transcript.note(self.subject.job(job_id))
        elif draw.random() < 0.5:
            await self.transcript.note(jobs.ListAttempts(j.ListAttemptsRequest(job_id=job_id), timeout=5))
        else:
            request = j.ListJobsRequest(states=draw.sample(range(1, 8), 3), queue="mail")  # type: ignore[arg-type]
            await self.transcript.note(jobs.ListJobs(request, timeout=5))

    async def close(self, draw: random.Random) -> None:
        place = draw.randrange(2)
        request = w.CloseSessionRequest(session_id=self.workers[place].session_id)
        await self.transcript.note(self.subject.workers.CloseSession(request, timeout=5))
        if draw.random() < 0.5:
            self.workers[place] = await self.subject.open()


@pytest.mark.parametrize("seed", range(8))
async def test_random_calls_are_answered_alike(both: tuple[Subject, Subject], seed: int) -> None:
    fake, service = [await Line(subject, seed).run(120) for subject in both]

    assert len(fake.lines) > 200
    for place, (ours, theirs) in enumerate(zip(fake.lines, service.lines, strict=False)):
        before = "\n".join(map(str, fake.lines[max(0, place - 12) : place]))
        assert ours == theirs, f"after {place} lines:\n{before}\n  fake    {ours}\n  service {theirs}"
