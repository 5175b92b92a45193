"""``make soak MINUTES=n``: a random mix of faults under load, judged at the end. SEED= replays a run.

Prints its seed first, then each fault as it begins. Exit code 0: every promise held; 1: not, and logs and
data stay where it says.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from coordinator.embedded.etcd_cluster import EtcdCluster
from coordinator.embedded.etcd_process import EtcdOptions, EtcdProcess
from tests.fault.support.court import Court
from tests.fault.support.storm import Storm


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long faults come")
    parser.add_argument("--seed", type=int, default=None, help="of an earlier run")
    parser.add_argument(
        "--members", type=int, choices=(1, 3), default=1, help="of etcd; 3 needs `make tools`"
    )
    return parser.parse_args()


async def _soak(members: list[EtcdProcess], folder: Path, seed: int, minutes: float) -> None:
    begin = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - begin:7.1f} s  {line}", flush=True)

    court = Court([member.endpoint for member in members], "soak", folder / "sink.sqlite")
    storm = Storm(members, court, folder, seed, tell=tell)
    await storm.rage(minutes * 60, heal_timeout=120 + minutes * 10)
    judgement = await court.judge(submitted=storm.ids)
    assert set(judgement.states) <= {"SUCCEEDED", "CANCELLED"}, judgement.states
    print(
        f"{len(storm.story)} faults, {len(storm.ids)} jobs, {judgement.claims} claims,"
        f" attempts {dict(judgement.outcomes)}, states {dict(judgement.states)}: every promise held"
    )


def main() -> int:
    """Run it."""
    told = _arguments()
    seed = told.seed if told.seed is not None else random.SystemRandom().randrange(1_000_000)
    folder = Path(tempfile.mkdtemp(prefix="leasekeeper-soak-"))
    again = f"make soak MINUTES={told.minutes:g} SEED={seed} MEMBERS={told.members}"
    print(f"seed {seed}; replay: {again}", flush=True)
    try:
        with ExitStack() as stack:
            if told.members == 3:
                members = stack.enter_context(EtcdCluster(folder, EtcdOptions(version="3.6"))).members
            else:
                members = [stack.enter_context(EtcdProcess(folder / "etcd"))]
            asyncio.run(_soak(members, folder, seed, told.minutes))
    except (AssertionError, TimeoutError) as error:
        print(f"FAILED, logs in {folder}\n{error}\nreplay: {again}", file=sys.stderr)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
