"""TLS, client certificates and bearer tokens, over real sockets."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import grpc
import grpc.aio
import pytest
import trustme

from coordinator.app import running_coordinator
from coordinator.config import AuthSettings, ServerSettings, Settings
from leasekeeper.v1 import job_service_pb2 as j
from leasekeeper.v1 import job_service_pb2_grpc
from tests.unit.rpc import builders as b
from tests.unit.rpc.fakes import refusal


@dataclasses.dataclass(frozen=True)
class Pki:
    """An authority, and PEM files of the server."""

    authority: trustme.CA
    ca: bytes
    cert: Path
    key: Path
    ca_file: Path


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    cert, key, ca_file = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    for index, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(str(cert), append=index > 0)
    issued.private_key_pem.write_to_path(str(key))
    authority.cert_pem.write_to_path(str(ca_file))
    return Pki(authority, authority.cert_pem.bytes(), cert, key, ca_file)


def with_tls(settings: Settings, pki: Pki, **more: object) -> Settings:
    server = ServerSettings(listen="127.0.0.1:0", tls_cert=pki.cert, tls_key=pki.key, **more)  # type: ignore[arg-type]
    return dataclasses.replace(settings, server=server)


async def submit(channel: grpc.aio.Channel, **metadata: str) -> bool:
    stub = job_service_pb2_grpc.JobServiceStub(channel)
    answer = await stub.SubmitJob(b.submit(), timeout=3, metadata=tuple(metadata.items()))
    return bool(answer.job_id)


async def test_tls_serves_who_trusts_it_and_nobody_in_the_clear(settings: Settings, pki: Pki) -> None:
    async with running_coordinator(with_tls(settings, pki)) as address:
        credentials = grpc.ssl_channel_credentials(pki.ca)
        async with grpc.aio.secure_channel(address, credentials) as channel:
            assert await submit(channel)
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await submit(channel)


async def test_client_certificates_are_demanded(settings: Settings, pki: Pki) -> None:
    issued = pki.authority.issue_cert("client@example.org")
    chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    mutual = grpc.ssl_channel_credentials(pki.ca, issued.private_key_pem.bytes(), chain)
    async with running_coordinator(with_tls(settings, pki, tls_client_ca=pki.ca_file)) as address:
        async with grpc.aio.secure_channel(address, mutual) as channel:
            assert await submit(channel)
        async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(pki.ca)) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await submit(channel)


async def test_bearer_tokens_bound_namespaces_and_scopes(settings: Settings, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(
        "[[token]]\n"
        f'name = "producer"\nsha256 = "{hashlib.sha256(b"s3cret").hexdigest()}"\n'
        'namespaces = ["default"]\nscopes = ["jobs:read", "jobs:write"]\n'
    )
    guarded = dataclasses.replace(settings, auth=AuthSettings(tokens_file=tokens))
    async with running_coordinator(guarded) as address, grpc.aio.insecure_channel(address) as channel:
        assert await submit(channel, authorization="Bearer s3cret")
        nobody = await refusal(submit(channel))
        stub = job_service_pb2_grpc.JobServiceStub(channel)
        elsewhere = await refusal(
            stub.GetJob(
                j.GetJobRequest(namespace="other", job_id="j1"),
                timeout=3,
                metadata=(("authorization", "Bearer s3cret"),),
            )
        )

        assert (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED") == (nobody.code, nobody.reason)
        assert (grpc.StatusCode.PERMISSION_DENIED, "other") == (
            elsewhere.code,
            elsewhere.metadata["namespace"],
        )
