"""The harness runs what it says: jobs through a real coordinator and worker end, and the judge sees them."""

from __future__ import annotations

from pathlib import Path

from tests.fault.support.calls import Calls
from tests.fault.support.court import Court
from tests.fault.support.processes import Coordinator, WorkerProcess


async def test_jobs_of_a_real_worker_pass_the_judge(
    shared: Coordinator, calls: Calls, court: Court, tmp_path: Path
) -> None:
    ids = [f"j{number}" for number in range(50)]
    async with WorkerProcess(shared.endpoint, calls.namespace, tmp_path, name="w1", sink=court.sink.path):
        await calls.submit_many([calls.spec(job_id) for job_id in ids])
        await court.ended(ids, timeout=15)

    judgement = await court.judge(submitted=ids)

    assert judgement.states == {"SUCCEEDED": 50}
    assert judgement.claims == 50
