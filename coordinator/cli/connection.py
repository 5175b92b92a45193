"""How commands reach a running coordinator: options, variables, and one call that says why it was refused.

The variables are those of the SDK: LEASEKEEPER_ENDPOINTS, _NAMESPACE, _TOKEN, _TLS_CA, _TLS_CERT, _TLS_KEY.
A token comes by variable or file, never by flag: command lines can be read by everybody on the machine.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import grpc
import typer
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from worker_sdk import ConfigError, ConnectionConfig, TlsConfig

__all__ = [
    "AddressFlag",
    "CallRefused",
    "ConnectionFlags",
    "NamespaceFlag",
    "PlaintextTokenFlag",
    "TlsCaFlag",
    "TlsCertFlag",
    "TlsFlag",
    "TlsKeyFlag",
    "TlsNameFlag",
    "TokenFileFlag",
    "ask",
    "connection_config",
]

_T = TypeVar("_T")
_Metadata = tuple[tuple[str, str], ...]

_TOKEN_VARIABLE: Final = "LEASEKEEPER_TOKEN"
_DETAILS_KEY: Final = "grpc-status-details-bin"
_LOCAL: Final = ("127.", "localhost:", "[::1]:")
_CONNECT_MS: Final = 5_000
"""What one address gets to be reached; the next one is tried then. gRPC's own default is 20 s."""

AddressFlag = Annotated[
    str,
    typer.Option("--address", envvar="LEASEKEEPER_ENDPOINTS", help="Coordinators, host:port[,host:port]."),
]
NamespaceFlag = Annotated[
    str, typer.Option("--namespace", "-n", envvar="LEASEKEEPER_NAMESPACE", help="Namespace.")
]
TlsFlag = Annotated[bool, typer.Option("--tls", help="TLS with the system's authorities.")]
TlsCaFlag = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        envvar="LEASEKEEPER_TLS_CA",
        help="TLS with the authorities of this PEM file.",
        show_default=False,
    ),
]
TlsCertFlag = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert", envvar="LEASEKEEPER_TLS_CERT", help="PEM certificate chain to show.", show_default=False
    ),
]
TlsKeyFlag = Annotated[
    Path | None,
    typer.Option(
        "--tls-key", envvar="LEASEKEEPER_TLS_KEY", help="PEM key of that certificate.", show_default=False
    ),
]
TlsNameFlag = Annotated[
    str,
    typer.Option(
        "--tls-server-name",
        help="Name in the coordinator's certificate, if not the host.",
        show_default=False,
    ),
]
TokenFileFlag = Annotated[
    Path | None,
    typer.Option(
        "--token-file", help=f"File that holds the bearer token; else {_TOKEN_VARIABLE}.", show_default=False
    ),
]
PlaintextTokenFlag = Annotated[
    bool,
    typer.Option(
        "--allow-plaintext-token", help="Send the token without TLS to an address that is not local, too."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFlags:
    """What the flags say; see the options of the same names."""

    address: str
    namespace: str = "default"
    tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_server_name: str = ""
    token_file: Path | None = None
    allow_plaintext_token: bool = False


class CallRefused(Exception):
    """A call that was not answered, or answered with an error.

    Args:
        reason: of the contract, or the name of the gRPC code where nobody gave one.
        message: for people.
        fields: which fields are wrong.
    """

    def __init__(self, reason: str, message: str, fields: tuple[str, ...] = ()) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.fields = fields


def connection_config(flags: ConnectionFlags) -> ConnectionConfig:
    """Check the flags, and read the token.

    Raises:
        ConfigError: what is wrong with them (of ``worker_sdk``).
    """
    with_tls = flags.tls or flags.tls_server_name or any((flags.tls_ca, flags.tls_cert, flags.tls_key))
    tls = None
    if with_tls:
        tls = TlsConfig(
            root_certificates=flags.tls_ca,
            certificate=flags.tls_cert,
            private_key=flags.tls_key,
            server_name=flags.tls_server_name,
        )
    token = os.environ.get(_TOKEN_VARIABLE, "")
    if flags.token_file is not None:
        token = _read(flags.token_file).decode(errors="replace").strip()
        if not token:
            raise ConfigError(f"{flags.token_file} holds no token")
    local = all(part.strip().startswith(_LOCAL) for part in flags.address.split(","))
    return ConnectionConfig(
        endpoints=flags.address,
        namespace=flags.namespace,
        tls=tls,
        token=token,
        allow_plaintext_token=flags.allow_plaintext_token or local,
    )


def ask(
    config: ConnectionConfig, call: Callable[[grpc.Channel, _Metadata, float], _T], *, timeout: float
) -> _T:
    """One call that may be repeated: to the first coordinator that can be reached and takes it.

    Args:
        config: where they are, see ``connection_config``.
        call: makes it, given a channel, the metadata and the seconds that are left.
        timeout: seconds for all of it.

    Raises:
        CallRefused: none could be reached, or one refused it.
        ConfigError: a file of ``config`` cannot be read.
    """
    ends = time.monotonic() + timeout
    metadata: _Metadata = (("authorization", f"Bearer {config.token}"),) if config.token else ()
    refusals: list[CallRefused] = []
    for address in config.addresses():
        left = ends - time.monotonic()
        if left <= 0:
            break
        with _channel(config, address) as channel:
            try:
                return call(channel, metadata, left)
            except grpc.RpcError as error:
                refusals.append(_refused(address, error))
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    break
    raise refusals[-1] if refusals else CallRefused("DEADLINE_EXCEEDED", "no time was left for a call")


@contextlib.contextmanager
def _channel(config: ConnectionConfig, address: str) -> Iterator[grpc.Channel]:
    tls = config.tls
    options: list[tuple[str, int | str]] = [("grpc.min_reconnect_backoff_ms", _CONNECT_MS)]
    if tls is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_read(tls.root_certificates) if tls.root_certificates else None,
            private_key=_read(tls.private_key) if tls.private_key else None,
            certificate_chain=_read(tls.certificate) if tls.certificate else None,
        )
        if tls.server_name:
            options.append(("grpc.ssl_target_name_override", tls.server_name))
        channel = grpc.secure_channel(address, credentials, options=options)
    try:
        yield channel
    finally:
        channel.close()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _refused(address: str, error: Any) -> CallRefused:
    reason, message, fields = error.code().name, f"{address}: {error.details() or 'no answer'}", ()
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY:
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except DecodeError:
            continue
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        for detail in status.details:
            if detail.Unpack(info):
                reason, message = info.reason, status.message
            elif detail.Unpack(bad):
                fields = tuple(violation.field for violation in bad.field_violations)
    return CallRefused(reason, message, fields)
