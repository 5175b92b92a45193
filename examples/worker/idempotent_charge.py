"""A charge that happens once, however often its job runs: the table checks job and fencing token.

    LEASEKEEPER_ENDPOINTS=127.0.0.1:7420 python examples/worker/idempotent_charge.py

A job runs at least once: here the first attempt fails right after its charge. And a holder may have lost its
job without knowing. One transaction answers both: the charge is kept by job id, and the row of the account
remembers the largest token for each job, so that an older holder changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from worker_sdk import ConnectionConfig, JobClient, JobSpec, NoRetry, RetryPolicy, SyncContext, Worker

SCHEMA = """
CREATE TABLE accounts (name TEXT PRIMARY KEY, cents INTEGER NOT NULL);
CREATE TABLE holders (job TEXT PRIMARY KEY, token INTEGER NOT NULL);
CREATE TABLE charges (job TEXT PRIMARY KEY, account TEXT NOT NULL, cents INTEGER NOT NULL);
"""
# BIGINT for the token on other databases; the statements read as well on PostgreSQL.
FENCE = """
INSERT INTO holders (job, token) VALUES (:job, :token)
ON CONFLICT (job) DO UPDATE SET token = excluded.token WHERE holders.token <= excluded.token
"""
CHARGE = "INSERT INTO charges VALUES (:job, :account, :cents) ON CONFLICT (job) DO NOTHING"
PAY = "UPDATE accounts SET cents = cents - :cents WHERE name = :account"

DATABASE = Path(tempfile.gettempdir()) / "leasekeeper-charges.sqlite"
worker = Worker(ConnectionConfig.from_env(), queues={"payments": 2})


@dataclass
class Charge:
    account: str
    cents: int


class StaleToken(Exception):
    """Somebody else holds the job."""


def apply(database: sqlite3.Connection, job: str, token: int, charge: Charge) -> bool:
    """Charge, unless it was done before; whether it was done now.

    Raises:
        StaleToken: a later holder was here; nothing was changed.
    """
    with database:
        if database.execute(FENCE, {"job": job, "token": token}).rowcount == 0:
            raise StaleToken(f"token {token} is not the newest for {job}")
        values = {"job": job, **asdict(charge)}
        if database.execute(CHARGE, values).rowcount == 0:
            return False
        database.execute(PAY, values)
        return True


@worker.handler("charge")
def charge(ctx: SyncContext, order: Charge) -> dict[str, bool]:
    with closing(sqlite3.connect(DATABASE, timeout=10)) as database:
        try:
            charged = apply(database, ctx.job_id, ctx.fencing_token, order)
        except StaleToken as error:
            raise NoRetry(str(error)) from error
    print(f"attempt {ctx.attempt}: {'charged' if charged else 'was charged before'}")
    if ctx.attempt == 1:
        raise ConnectionError("the receipt cannot be sent")  # after the charge: the job runs again
    return {"charged_now": charged}


async def main() -> None:
    DATABASE.unlink(missing_ok=True)
    with closing(sqlite3.connect(DATABASE)) as database:
        database.executescript(SCHEMA)
        with database:
            database.execute("INSERT INTO accounts VALUES ('ada', 1000)")
    running = asyncio.create_task(worker.run())
    async with JobClient(ConnectionConfig.from_env()) as client:
        order = Charge("ada", 250)
        submitted = await client.submit(
            JobSpec(
                queue="payments",
                type="charge",
                payload=json.dumps(asdict(order)).encode(),
                retry=RetryPolicy(initial_delay=0.1),
            )
        )
        job = await client.wait(submitted.job_id, timeout=60)
        attempts = await client.attempts(submitted.job_id)
    worker.stop()
    await running
    first = min(attempt.fencing_token for attempt in attempts.attempts)
    with closing(sqlite3.connect(DATABASE)) as database:
        try:
            apply(database, submitted.job_id, first, order)
        except StaleToken:
            print("the first attempt's token is refused now")
        [(cents,)] = database.execute("SELECT cents FROM accounts WHERE name = 'ada'")
    print(f"{job.state.name} at attempt {job.attempt}, {cents} cents left of 1000")
    DATABASE.unlink()


if __name__ == "__main__":
    asyncio.run(main())
