"""Who sweeps: one at a time, as etcd says, whatever the candidates themselves believe."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.keys import KeySpace
from tests.fault.support.calls import Calls
from tests.fault.support.court import Court
from tests.fault.support.processes import SWEEP_OFTEN, Coordinator
from tests.support.polling import eventually

KEY = KeySpace().leader("sweep")
SHORT, LONG = 5, 60


async def leading(etcd: EtcdClient) -> int:
    """Create revision of the leader's key; 0: nobody leads."""
    found = await etcd.range(KEY, timeout=5)
    return found.kvs[0].create_revision if found.kvs else 0


@pytest.mark.slow
async def test_leadership_ends_with_the_holders_own_lease_and_is_given_up_in_order(
    own_etcd: EtcdProcess, own_court: Court, namespace: str, tmp_path: Path
) -> None:
    """Fault case 030: two candidates with different TTLs; the leader is frozen, wakes, and is told to stop.

    The one with the long TTL takes over when the short one's has ended; the one with the short TTL does not
    take over from the long one before that one gives up, and then does so at once.
    """
    async with (
        Coordinator(
            own_etcd.endpoints, tmp_path, name="short", plan={**SWEEP_OFTEN, "member_ttl_s": SHORT}
        ) as short,
        own_court.etcd() as etcd,
    ):
        first = await eventually(lambda: leading(etcd), timeout=15, interval=0.1, what="a leader")
        async with Coordinator(
            own_etcd.endpoints, tmp_path, name="long", plan={**SWEEP_OFTEN, "member_ttl_s": LONG}
        ) as long:
            async with Calls(long.endpoint, namespace) as calls:
                await calls.submit("j1")
                short.pause()
                frozen = time.monotonic()

                async def another() -> bool:
                    return await leading(etcd) not in (0, first)

                await eventually(another, timeout=40, interval=0.1, what="another leader")
                waited = time.monotonic() - frozen
                second = await leading(etcd)
                short.resume()
                await eventually(lambda: "lost the role sweep" in short.log, timeout=15, what="it knows")
                # Longer than its own TTL: that is nothing to judge the other one by.
                await asyncio.sleep(SHORT + 3)
                assert await leading(etcd) == second
                session = await calls.open(ttl=60)
                claim = await calls.claim_one(session, "j1")
                assert await calls.complete(claim) == "SUCCEEDED"
            stopped = time.monotonic()
            assert await long.terminate(timeout=20) == 0

            async def back() -> bool:
                return await leading(etcd) not in (0, second)

            await eventually(back, timeout=20, interval=0.1, what="the first leads again")
            given_up = time.monotonic() - stopped
            said = [line for line in long.log.splitlines() if "stopping" in line or "stopped" in line]
    assert waited < LONG / 2, "it went by its own TTL and not by the holder's"
    assert given_up < LONG / 2
    assert len(said) == 2, said
    await own_court.judge(submitted=["j1"])
