"""A bare worker without an SDK: opens a session, polls once, says what it got, and then does nothing at all.

Run with one JSON argument: {"endpoint", "namespace", "ttl", "wait"}.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tests.fault.support.calls import Calls


async def _main(options: dict[str, Any]) -> None:
    async with Calls(options["endpoint"], options["namespace"]) as calls:
        session = await calls.open(options["ttl"])
        print(f"session {session}", flush=True)
        for claim in await calls.claim(session, wait=options["wait"]):
            print(f"claimed {claim.job_id} {claim.fencing_token}", flush=True)
        # Until the test kills it, or is gone itself and its watcher kills it.
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(json.loads(sys.argv[1])))
