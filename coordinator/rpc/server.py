"""The gRPC server: options, listeners, TLS, and every method behind the guard.

Handlers are made from the descriptors, so a method of the contract without an implementation fails at start
and not at its first call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor

from coordinator.errors import ConfigError
from coordinator.rpc.call_guard import CallGuard
from coordinator.rpc.health import HEALTH_SERVICE, Health
from coordinator.rpc.methods import METHODS, SERVICES
from coordinator.rpc.reflection import register_reflection

__all__ = ["ListenConfig", "RpcServer", "TlsConfig"]

_RECEIVE_BYTES: Final = 16 << 20
"""Larger messages are refused by gRPC itself (RESOURCE_EXHAUSTED).

Up to here we say which limit of ours is meant.
"""

_PENDING_CALLS: Final = 200_000
"""Calls that wait until the event loop takes them.

gRPC's own default sheds from 1,000 on, with a bare CANCELLED that says neither why nor what to do. Ours is
far above what one turn of the loop lets gather; what is too much is refused by ``GuardConfig.max_calls``.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """PEM files of the server. ``client_ca``: callers must present a certificate that it signed."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Where and how to listen.

    Args:
        address: ``host:port``; port 0 takes a free one.
        tls: None for plain text.
        reuse_port: several processes may share the port.
        reflection: whether the API describes itself.
        ping_interval_ms: how often the server pings idle callers.
        ping_timeout_ms: how long it waits for the answer before it drops them.
    """

    address: str = "127.0.0.1:7420"
    tls: TlsConfig | None = None
    reuse_port: bool = False
    reflection: bool = True
    ping_interval_ms: int = 20_000
    ping_timeout_ms: int = 5_000


def _options(config: ListenConfig) -> list[tuple[str, int]]:
    # ping_timeout stands beside keepalive_timeout, because newer gRPC cores look at the former alone.
    return [
        ("grpc.max_receive_message_length", _RECEIVE_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.server.max_pending_requests", _PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _PENDING_CALLS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", config.ping_interval_ms),
        ("grpc.keepalive_timeout_ms", config.ping_timeout_ms),
        ("grpc.http2.ping_timeout_ms", config.ping_timeout_ms),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.so_reuseport", int(config.reuse_port)),
    ]


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _handlers(service: ServiceDescriptor, servicer: object, guard: CallGuard) -> dict[str, Any]:
    handlers: dict[str, Any] = {}
    for method in service.methods:
        behaviour = getattr(servicer, _snake(method.name))
        settings = METHODS[method.name]
        parse = message_factory.GetMessageClass(method.input_type).FromString
        write = message_factory.GetMessageClass(method.output_type).SerializeToString
        read = guard.reader(parse, settings)
        path = f"/{service.full_name}/{method.name}"
        if method.client_streaming:
            served = guard.duplex(settings, behaviour)
            handlers[path] = grpc.stream_stream_rpc_method_handler(served, read, write)
        elif method.server_streaming:
            served = guard.stream(settings, behaviour)
            handlers[path] = grpc.unary_stream_rpc_method_handler(served, read, write)
        else:
            served = guard.unary(settings, behaviour)
            handlers[path] = grpc.unary_unary_rpc_method_handler(served, read, write)
    return handlers


class _Methods(grpc.GenericRpcHandler):
    """All methods in one table: gRPC asks its generic handlers one after the other, for every call."""

    def __init__(self, handlers: Mapping[str, Any]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method, None if it is not ours."""
        return self._handlers.get(handler_call_details.method)


def _credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    try:
        key, cert = tls.key.read_bytes(), tls.cert.read_bytes()
        client_ca = tls.client_ca.read_bytes() if tls.client_ca is not None else None
    except OSError as error:
        raise ConfigError(f"server.tls: {error}") from error
    return grpc.ssl_server_credentials([(key, cert)], client_ca, client_ca is not None)


class RpcServer:
    """All services, health and reflection on one listener. Made and run in one event loop.

    Order: ``bind``, ``register``, ``start``, ``stop``; so the address is known before anything is made
    that names it.

    Args:
        config: see ``ListenConfig``.
    """

    def __init__(self, config: ListenConfig) -> None:
        self._config = config
        self._server = grpc.aio.server(options=_options(config))
        self._port = 0

    @property
    def address(self) -> str:
        """``host:port`` with the port that was taken."""
        return f"{self._config.address.rpartition(':')[0]}:{self._port}"

    def bind(self) -> str:
        """Take the address; calls are answered from ``start`` on.

        Raises:
            ConfigError: the address cannot be bound, or a certificate cannot be used.
        """
        address, tls = self._config.address, self._config.tls
        try:
            if tls is not None:
                self._port = self._server.add_secure_port(address, _credentials(tls))
            else:
                self._port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"server.listen: cannot listen at {address}: {error}") from error
        if self._port == 0:
            raise ConfigError(f"server.listen: cannot listen at {address}")
        return self.address

    def register(self, guard: CallGuard, health: Health, servicers: Mapping[str, object]) -> None:
        """Add all services.

        Args:
            guard: what every call passes through.
            health: the health service; its owner sets readiness.
            servicers: who serves which of ``SERVICES``.
        """
        handlers: dict[str, Any] = {}
        for name, servicer in servicers.items():
            handlers |= _handlers(SERVICES[name], servicer, guard)
        self._server.add_generic_rpc_handlers((_Methods(handlers),))
        health.register(self._server)
        if self._config.reflection:
            register_reflection(self._server, [*servicers, HEALTH_SERVICE], guard.tokens)

    async def start(self) -> None:
        """Answer calls."""
        await self._server.start()

    async def stop(self, grace: float) -> None:
        """Close the listener at once, let calls under way finish for ``grace`` seconds, then cancel them."""
        await self._server.stop(grace)
