"""A bare worker without an SDK: opens a session, polls once, says what it got, and then does nothing at all.

Run with one JSON argument: {"endpoint", "namespace", "ttl", "wait", "many"}. With ``many``, so many polls and
so many streams of changes at once.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from leasekeeper.v1 import job_service_pb2 as jobs
from tests.fault.support.calls import Calls


async def _main(options: dict[str, Any]) -> None:
    async with Calls(options["endpoint"], options["namespace"]) as calls:
        session = await calls.open(options["ttl"])
        print(f"session {session}", flush=True)
        if options["many"]:
            polls = [
                asyncio.create_task(calls.claim(session, wait=options["wait"]))
                for _ in range(options["many"])
            ]
            request = jobs.WatchJobsRequest(namespace=calls.namespace)
            streams = [calls.jobs.WatchJobs(request, timeout=600) for _ in range(options["many"])]
            await asyncio.gather(*(stream.read() for stream in streams))
            print("all under way", flush=True)
            await asyncio.gather(*polls)
        for claim in await calls.claim(session, wait=options["wait"]):
            print(f"claimed {claim.job_id} {claim.fencing_token}", flush=True)
        # Until the test kills it, or is gone itself and its watcher kills it.
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(json.loads(sys.argv[1])))
