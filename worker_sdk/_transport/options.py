"""How a channel is made: arguments, credentials, metadata."""

from __future__ import annotations

from pathlib import Path

import grpc

from worker_sdk.config import ConnectionConfig, TlsConfig
from worker_sdk.errors import ConfigError

__all__ = ["channel_arguments", "credentials", "metadata"]

_MAX_MESSAGE = 8 * 1024 * 1024


def channel_arguments(config: ConnectionConfig) -> list[tuple[str, int | str]]:
    """Return the channel arguments.

    ``ping_timeout`` stands beside the keepalive timeout, because since gRPC 1.65 it is the one that counts
    for keepalive pings; reconnecting is tried at least every 2 s, so that a restarted coordinator is found
    again soon. Each channel has a connection of its own: beats must not queue behind payloads.
    """
    keepalive = config.keepalive
    arguments: list[tuple[str, int | str]] = [
        ("grpc.keepalive_time_ms", round(keepalive.time * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive.timeout * 1000)),
        ("grpc.http2.ping_timeout_ms", round(keepalive.timeout * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.max_receive_message_length", _MAX_MESSAGE),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
    ]
    if config.tls is not None and config.tls.server_name:
        arguments.append(("grpc.ssl_target_name_override", config.tls.server_name))
    return arguments


def credentials(config: ConnectionConfig) -> grpc.ChannelCredentials | None:
    """Return TLS credentials; None for plaintext.

    Raises:
        ConfigError: a file cannot be read.
    """
    tls = config.tls
    if tls is None:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_read(tls.root_certificates),
        private_key=_read(tls.private_key),
        certificate_chain=_read(tls.certificate),
    )


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{TlsConfig.__name__}: cannot read {path}: {error.strerror}") from error


def metadata(config: ConnectionConfig) -> tuple[tuple[str, str], ...]:
    """Return what goes along with each call."""
    return (("authorization", f"Bearer {config.token}"),) if config.token else ()
