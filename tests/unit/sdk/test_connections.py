"""TLS, tokens, event loops: the ways to reach a coordinator, for the loop and for the beat thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import trustme
import uvloop

from tests.support.fake_worker_server import Fail, FakeCoordinator, status_of
from tests.support.polling import eventually
from tests.unit.sdk.conftest import Working, make
from worker_sdk import (
    ConfigError,
    ConnectionConfig,
    JobClient,
    JobSpec,
    TlsConfig,
    Unavailable,
    ValidationFailed,
    Worker,
)


async def test_client_claims_and_beats_all_use_mutual_tls_and_the_token(
    working: Working, tmp_path: Path
) -> None:
    authority = trustme.CA()
    server_cert = authority.issue_cert("coordinator.test")
    client_cert = authority.issue_cert("worker.test")
    ca, cert, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(str(ca))
    client_cert.private_key_pem.write_to_path(str(key))
    client_cert.cert_chain_pems[0].write_to_path(str(cert))
    credentials = grpc.ssl_server_credentials(
        [(server_cert.private_key_pem.bytes(), server_cert.cert_chain_pems[0].bytes())],
        root_certificates=authority.cert_pem.bytes(),
        require_client_auth=True,
    )
    with FakeCoordinator(interval=0.05, credentials=credentials) as server:
        config = ConnectionConfig(
            endpoints=server.endpoint,
            token="secret",
            tls=TlsConfig(
                root_certificates=ca, certificate=cert, private_key=key, server_name="coordinator.test"
            ),
        )
        worker = Worker(config, queues=["q"])
        worker.handler("t")(lambda ctx: b"x")
        async with working(worker), JobClient(config) as client:
            submitted = await client.submit(JobSpec(queue="q", type="t"))
            await client.wait(submitted.job_id, timeout=5)
            await eventually(lambda: server.calls["Heartbeat"])
        assert server.tokens == {"Bearer secret"}

        without = ConnectionConfig(
            endpoints=server.endpoint, tls=TlsConfig(root_certificates=ca, server_name="coordinator.test")
        )
        async with JobClient(without) as client:
            with pytest.raises(Unavailable):
                await client.get("j", timeout=0.5)


async def test_a_missing_certificate_is_named() -> None:
    config = ConnectionConfig(endpoints="127.0.0.1:1", tls=TlsConfig(root_certificates=Path("/no/such.pem")))
    async with JobClient(config) as client:
        with pytest.raises(ConfigError, match=r"/no/such\.pem"):
            await client.get("j")


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_138_a_worker_and_a_client_run_on_any_loop_and_twice(
    server: FakeCoordinator, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    worker = make(server)
    worker.handler("t")(lambda ctx: b"x")
    client = JobClient(server.endpoint)

    async def use() -> None:
        run = asyncio.create_task(worker.run())
        submitted = await client.submit(JobSpec(queue="q", type="t"))
        await client.wait(submitted.job_id, timeout=5)
        worker.stop()
        await run

    for _ in range(2):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(use())


async def test_a_session_that_the_coordinator_refuses_ends_the_worker(server: FakeCoordinator) -> None:
    refused = status_of(
        grpc.StatusCode.INVALID_ARGUMENT, "VALIDATION_FAILED", fields=[("identity", "too long")]
    )
    server.always("OpenSession", Fail(refused))
    worker = make(server)
    worker.handler("t")(lambda ctx: None)
    async with asyncio.timeout(10):
        with pytest.raises(ValidationFailed, match="VALIDATION_FAILED"):
            await worker.run()
