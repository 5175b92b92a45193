"""What the commands that operate a running coordinator share: their connection, their refusals, JSON.

Exit codes: 0 done; 1 no coordinator could be asked, or it refused; 2 the command line is wrong, or the
coordinator found a value in it wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TypeVar

import grpc
import typer
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.cli.connection import (
    AddressFlag,
    CallRefused,
    ConnectionFlags,
    NamespaceFlag,
    PlaintextTokenFlag,
    TlsCaFlag,
    TlsCertFlag,
    TlsFlag,
    TlsKeyFlag,
    TlsNameFlag,
    TokenFileFlag,
    ask,
    connection_config,
)
from worker_sdk import ConfigError, ConnectionConfig

__all__ = ["JsonFlag", "Target", "call", "connect", "print_json", "seconds_of", "span_of", "time_of"]

_T = TypeVar("_T")
_Metadata = tuple[tuple[str, str], ...]

_FAILED: Final = 1
_WRONG_USAGE: Final = 2

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a command goes: the coordinators, the namespace, and the seconds it may take."""

    config: ConnectionConfig
    namespace: str
    timeout: float


def connect(
    context: typer.Context,
    address: AddressFlag = "127.0.0.1:7420",
    namespace: NamespaceFlag = "default",
    timeout: Annotated[float, typer.Option(min=1, max=3_600, help="Seconds for all of it.")] = 10.0,
    tls: TlsFlag = False,
    tls_ca: TlsCaFlag = None,
    tls_cert: TlsCertFlag = None,
    tls_key: TlsKeyFlag = None,
    tls_server_name: TlsNameFlag = "",
    token_file: TokenFileFlag = None,
    allow_plaintext_token: PlaintextTokenFlag = False,
) -> None:
    """Callback of a group of commands: they find what the flags say as ``context.obj``, a ``Target``."""
    flags = ConnectionFlags(
        address=address,
        namespace=namespace,
        tls=tls,
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_server_name=tls_server_name,
        token_file=token_file,
        allow_plaintext_token=allow_plaintext_token,
    )
    try:
        context.obj = Target(connection_config(flags), namespace, timeout)
    except ConfigError as error:
        print(f"{context.command_path}: {error}", file=sys.stderr)
        raise typer.Exit(_WRONG_USAGE) from error


def call(context: typer.Context, make: Callable[[grpc.Channel, _Metadata, float], _T]) -> _T:
    """One call that may be repeated; ends the command with a message if it is refused."""
    target: Target = context.obj
    try:
        return ask(target.config, make, timeout=target.timeout)
    except ConfigError as error:
        print(f"{context.command_path}: {error}", file=sys.stderr)
        raise typer.Exit(_WRONG_USAGE) from error
    except CallRefused as error:
        print(f"{context.command_path}: {error}", file=sys.stderr)
        raise typer.Exit(_WRONG_USAGE if error.reason == "VALIDATION_FAILED" else _FAILED) from error


def print_json(value: dict[str, Any]) -> None:
    """One object, on one line."""
    print(json.dumps(value, ensure_ascii=False))


def seconds_of(message: Any, field: str) -> float | None:
    """Seconds of a Duration field; None if it is absent."""
    return getattr(message, field).ToMilliseconds() / 1000 if message.HasField(field) else None


def time_of(message: Any, field: str) -> str | None:
    """A Timestamp field as ISO 8601 in UTC; None if it is absent."""
    if not message.HasField(field):
        return None
    value: Timestamp = getattr(message, field)
    return datetime.fromtimestamp(value.ToMilliseconds() / 1000, UTC).isoformat(timespec="milliseconds")


def span_of(seconds: float) -> Duration:
    """Seconds as a Duration, to the millisecond, upwards: a positive span does not become 0."""
    ms = -int(-seconds * 1000 // 1)
    return Duration(seconds=ms // 1000, nanos=ms % 1000 * 1_000_000)
