"""Settings that cannot work are refused when they are made, with the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker_sdk import (
    ConfigError,
    ConnectionConfig,
    Keepalive,
    RetryConfig,
    Timeouts,
    TlsConfig,
    Worker,
    WorkerConfig,
)


@pytest.mark.parametrize(
    "endpoints", ["", ",", "host", "host:", ":7", "host:port", "host:0", "host:65536", "a:1,b"]
)
def test_endpoints_are_host_and_port(endpoints: str) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        ConnectionConfig(endpoints=endpoints)


def test_several_endpoints_are_separated_by_commas() -> None:
    config = ConnectionConfig(endpoints="a:1, [::1]:2,")
    assert config.addresses() == ("a:1", "[::1]:2")


def test_a_token_in_the_clear_must_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="in the clear"):
        ConnectionConfig(endpoints="a:1", token="t")
    assert "secret" not in repr(ConnectionConfig(endpoints="a:1", token="secret", tls=TlsConfig()))
    ConnectionConfig(endpoints="a:1", token="t", allow_plaintext_token=True)


def test_a_certificate_needs_its_key() -> None:
    with pytest.raises(ConfigError, match="both or neither"):
        TlsConfig(certificate=Path("cert.pem"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Timeouts(call=0),
        lambda: Timeouts(attempt=float("nan")),
        lambda: Keepalive(time=1),
        lambda: RetryConfig(initial=3, maximum=2),
        lambda: RetryConfig(multiplier=0.5),
        lambda: RetryConfig(jitter=2),
        lambda: WorkerConfig(session_ttl=1),
        lambda: WorkerConfig(session_ttl=3601),
        lambda: WorkerConfig(poll_wait=31),
        lambda: WorkerConfig(claim_batch=101),
        lambda: WorkerConfig(drain_timeout=-1),
        lambda: WorkerConfig(drain_timeout=float("inf")),
        lambda: ConnectionConfig(endpoints="a:1", namespace=""),
        lambda: Worker("a:1", queues=[]),
        lambda: Worker("a:1", queues={}),
        lambda: Worker("a:1", queues={"q": 0}),
        lambda: Worker("a:1", queues={"q": 481}),
        lambda: Worker("a:1", queues="email"),
        lambda: Worker(ConnectionConfig(endpoints="a:1"), queues=["q"], namespace="other"),
    ],
)
def test_values_out_of_range_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ConfigError):
        make()


def test_the_environment_gives_a_connection() -> None:
    config = ConnectionConfig.from_env(
        {"LEASEKEEPER_ENDPOINTS": "a:1", "LEASEKEEPER_NAMESPACE": "n", "LEASEKEEPER_TLS_CA": "/ca.pem"}
    )
    assert (config.endpoints, config.namespace) == ("a:1", "n")
    assert config.tls == TlsConfig(root_certificates=Path("/ca.pem"))
    with pytest.raises(ConfigError, match="LEASEKEEPER_ENDPOINTS"):
        ConnectionConfig.from_env({})


def test_a_type_has_one_handler_and_a_proper_name() -> None:
    worker = Worker("a:1", queues=["q"])
    worker.handler("t")(lambda ctx: None)
    with pytest.raises(ConfigError, match="already"):
        worker.handler("t")(lambda ctx: None)
    with pytest.raises(ConfigError, match="no name"):
        worker.handler("Bad Name")(lambda ctx: None)


async def test_a_queue_without_handlers_is_refused_before_anything_runs() -> None:
    worker = Worker("a:1", queues=["q", "r"])
    worker.handler("t", queues=["q"])(lambda ctx: None)
    with pytest.raises(ConfigError, match="'r'"):
        await worker.run()
