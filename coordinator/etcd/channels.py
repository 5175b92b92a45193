"""gRPC channels to one member of an etcd cluster: a connection for each purpose, and how they behave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import grpc

from coordinator.errors import ConfigError

__all__ = ["ChannelConfig", "EtcdTls", "Member", "Purpose"]

_Parse: TypeAlias = Callable[[bytes], object]
_Method: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, object]"

_CONNECT_POLL_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
_REPLACE_INTERVAL_SECONDS = 2.0


class Purpose(Enum):
    """What a channel carries. Each has a connection of its own, so that none blocks another."""

    KV = "kv"
    WATCH = "watch"
    KEEPALIVE = "keepalive"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdTls:
    """TLS towards etcd; contents of PEM files.

    Args:
        ca: certificate authorities to trust; None for the system's.
        certificate: our certificate chain, if etcd asks for one.
        key: its private key.
        server_name: name to check the server's certificate against instead of the endpoint's host.
    """

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    server_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelConfig:
    """How connections behave. The server refuses pings more often than every 5 s (GRPCKeepAliveMinTime).

    Args:
        keepalive_ms: silence on a connection with a call under way before it is pinged.
        keepalive_timeout_ms: time for the answer to that ping; then the connection counts as dead.
        reconnect_ms: first pause between connection attempts.
        reconnect_max_ms: longest such pause, and the time one attempt may take.
        tls: None for plain text.
    """

    keepalive_ms: int = 10_000
    keepalive_timeout_ms: int = 3_000
    reconnect_ms: int = 200
    reconnect_max_ms: int = 2_000
    tls: EtcdTls | None = None

    def arguments(self) -> list[tuple[str, str | int]]:
        """The gRPC channel arguments."""
        arguments: list[tuple[str, str | int]] = [
            ("grpc.keepalive_time_ms", self.keepalive_ms),
            ("grpc.keepalive_timeout_ms", self.keepalive_timeout_ms),
            # Newer gRPC bounds the wait for a ping's answer by this one (default 60 s) as well.
            ("grpc.http2.ping_timeout_ms", self.keepalive_timeout_ms),
            # etcd answers pings on a connection without calls with GOAWAY "too many pings".
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", self.reconnect_ms),
            ("grpc.min_reconnect_backoff_ms", self.reconnect_max_ms),
            ("grpc.max_reconnect_backoff_ms", self.reconnect_max_ms),
            # A reply that we refuse for its size comes after the commit: never refuse one.
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            # A write is sent once; who may repeat it knows its nonce.
            ("grpc.enable_retries", 0),
            ("grpc.service_config_disable_resolution", 1),
            ("grpc.enable_http_proxy", 0),
            # Without this, channels to one address share a connection.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if self.tls is not None and self.tls.server_name:
            arguments.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return arguments


def _target(endpoint: str, config: ChannelConfig) -> str:
    scheme, separator, rest = endpoint.partition("://")
    if not separator:
        scheme, rest = "", endpoint
    if scheme not in ("", "http", "https"):
        raise ConfigError(f"etcd endpoint {endpoint!r}: the scheme must be http or https")
    if (scheme == "https") != (config.tls is not None) and scheme:
        raise ConfigError(f"etcd endpoint {endpoint!r} and the TLS settings contradict each other")
    target = rest.rstrip("/")
    host, _, port = target.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"etcd endpoint {endpoint!r} is not host:port")
    return target


class Member:
    """One endpoint: a lazily opened channel per purpose, and its unary methods.

    Args:
        endpoint: ``host:port``, optionally with ``http://`` or ``https://``.
        config: see `ChannelConfig`.
    """

    def __init__(self, endpoint: str, config: ChannelConfig) -> None:
        self.endpoint = endpoint
        self._target = _target(endpoint, config)
        self._config = config
        self._channels: dict[Purpose, grpc.aio.Channel] = {}
        self._unary: dict[tuple[str, _Parse], _Method] = {}
        self._replaced_at: dict[Purpose, float] = {}

    def channel(self, purpose: Purpose) -> grpc.aio.Channel:
        """The open channel for *purpose*."""
        channel = self._channels.get(purpose)
        if channel is None:
            arguments = self._config.arguments()
            tls = self._config.tls
            if tls is None:
                channel = grpc.aio.insecure_channel(self._target, options=arguments)
            else:
                credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
                channel = grpc.aio.secure_channel(self._target, credentials, options=arguments)
            self._channels[purpose] = channel
        return channel

    def unary(self, path: str, parse: _Parse) -> _Method:
        """The method *path* on the KV channel; it takes encoded requests."""
        key = (path, parse)
        method = self._unary.get(key)
        if method is None:
            method = self.channel(Purpose.KV).unary_unary(
                path, request_serializer=None, response_deserializer=parse
            )
            self._unary[key] = method
        return method

    def ready(self, purpose: Purpose) -> bool:
        """Whether the channel is connected, as far as gRPC knows; asks it to connect."""
        return self.channel(purpose).get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY

    async def connect(self, purpose: Purpose, *, timeout: float, patient: bool) -> bool:
        """Wait up to *timeout* seconds for a connection.

        Args:
            purpose: which channel.
            timeout: seconds.
            patient: keep waiting after a refused attempt, rather than return False at once.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        channel = self.channel(purpose)
        step = 0
        while True:
            state = channel.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.READY:
                return True
            if state is grpc.ChannelConnectivity.SHUTDOWN:
                return False
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and not patient:
                return False
            remaining = deadline - loop.time()
            if remaining <= 0:
                return False
            await asyncio.sleep(min(remaining, _CONNECT_POLL_SECONDS[step]))
            step = min(step + 1, len(_CONNECT_POLL_SECONDS) - 1)

    def replace(self, purpose: Purpose) -> grpc.aio.Channel | None:
        """Forget the channel, so that the next call opens a new connection; return it for closing.

        A connection into nowhere stays READY until TCP or a ping gives up on it. None if it was replaced less
        than 2 s ago: a server that is merely slow must not be answered with a storm of connections.
        """
        now = asyncio.get_running_loop().time()
        if now - self._replaced_at.get(purpose, -_REPLACE_INTERVAL_SECONDS) < _REPLACE_INTERVAL_SECONDS:
            return None
        self._replaced_at[purpose] = now
        if purpose is Purpose.KV:
            self._unary.clear()
        return self._channels.pop(purpose, None)

    def take_channels(self) -> list[grpc.aio.Channel]:
        """Forget all channels, and return them for closing."""
        self._unary.clear()
        channels = list(self._channels.values())
        self._channels.clear()
        return channels
