"""``leasekeeper sessions``: list and show the sessions of workers, and ask a worker to drain."""

from __future__ import annotations

import sys
import uuid
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator.cli.operating import (
    JsonFlag,
    Target,
    call,
    connect,
    print_json,
    seconds_of,
    span_of,
    time_of,
)
from leasekeeper.v1 import admin_service_pb2 as pb
from leasekeeper.v1 import types_pb2 as types
from leasekeeper.v1 import worker_service_pb2 as workers
from leasekeeper.v1.admin_service_pb2_grpc import AdminServiceStub

__all__ = ["sessions"]

_WRONG_USAGE: Final = 2
_PAGE: Final = 1_000
_MOST_PAGES: Final = 1_000

sessions: Final = typer.Typer(
    help="Show the sessions of workers, and drain them.", no_args_is_help=True, pretty_exceptions_enable=False
)
sessions.callback()(connect)

SessionId = Annotated[str, typer.Argument(metavar="SESSION", help="Id of the session.", show_default=False)]


@sessions.command("list")
def list_command(
    context: typer.Context,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Only sessions with this label; may be given several times."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the sessions that are open, as one coordinator knows them."""
    target: Target = context.obj
    labels = dict(map(_label, label or ()))
    found: list[pb.Session] = []
    token = ""
    for _ in range(_MOST_PAGES):
        request = pb.ListSessionsRequest(
            namespace=target.namespace, page_size=_PAGE, page_token=token, labels=labels
        )
        answer = _page(context, request)
        found += answer.sessions
        token = answer.next_page_token
        if not token:
            break
    if as_json:
        print_json({"namespace": target.namespace, "sessions": [_plain(one) for one in found]})
        return
    table = Table("session", "who", "claims", "locks", "last beat", "asked to", box=None)
    for one in found:
        cells = (
            one.session_id,
            one.identity or "-",
            str(one.claim_count),
            str(one.lock_count),
            time_of(one, "last_beat_time") or "-",
            _command(one) or "-",
        )
        table.add_row(*map(Text, cells))
    Console(highlight=False).print(table)


@sessions.command("get")
def get_command(context: typer.Context, session: SessionId, as_json: JsonFlag = False) -> None:
    """Show one session, with the claims and locks that lie on its lease."""
    request = pb.GetSessionRequest(namespace=context.obj.namespace, session_id=session)
    answer = call(
        context,
        lambda channel, metadata, left: AdminServiceStub(channel).GetSession(
            request, metadata=metadata, timeout=left
        ),
    )
    plain = _plain(answer.session) | {
        "claims": [
            {
                "job_id": one.job_id,
                "fencing_token": one.fencing_token,
                "queue": one.queue,
                "type": one.type,
                "attempt": one.attempt,
                "claim_time": time_of(one, "claim_time"),
            }
            for one in answer.claims
        ],
        "locks": [
            {
                "name": one.name,
                "fencing_token": one.fencing_token,
                "mode": _name(types.LockMode, one.mode, "LOCK_MODE_"),
                "job_id": one.job_id,
            }
            for one in answer.locks
        ],
    }
    if as_json:
        print_json(plain)
        return
    console = Console(highlight=False)
    _show(console, answer.session)
    for kind, columns in (
        ("claims", ("job_id", "queue", "type", "attempt", "fencing_token", "claim_time")),
        ("locks", ("name", "mode", "job_id", "fencing_token")),
    ):
        if plain[kind]:
            table = Table(*columns, box=None)
            for row in plain[kind]:
                table.add_row(*(Text(str(row[column] or "-")) for column in columns))
            console.print(table)


@sessions.command("drain")
def drain_command(
    context: typer.Context,
    session: SessionId,
    terminate_after: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds until it is to finish and exit; 0: at once.", show_default="never"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Take the request back.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Ask a worker to claim nothing more; it hears of it with its next beat, and nothing is taken away."""
    request = pb.DrainSessionRequest(
        namespace=context.obj.namespace, request_id=uuid.uuid4().hex, session_id=session, resume=resume
    )
    if terminate_after is not None:
        request.terminate_after.CopyFrom(span_of(terminate_after))
    answer = call(
        context,
        lambda channel, metadata, left: AdminServiceStub(channel).DrainSession(
            request, metadata=metadata, timeout=left
        ),
    )
    if as_json:
        print_json(_plain(answer.session))
    else:
        _show(Console(highlight=False), answer.session)


def _page(context: typer.Context, request: pb.ListSessionsRequest) -> pb.ListSessionsResponse:
    return call(
        context,
        lambda channel, metadata, left: AdminServiceStub(channel).ListSessions(
            request, metadata=metadata, timeout=left
        ),
    )


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        print(f"--label {text!r}: KEY=VALUE is wanted", file=sys.stderr)
        raise typer.Exit(_WRONG_USAGE)
    return key, value


def _name(enum: Any, value: int, prefix: str) -> str:
    """Its name, empty for none; a newer coordinator may know values that we do not."""
    if not value:
        return ""
    try:
        return str(enum.Name(value)).removeprefix(prefix)
    except ValueError:
        return str(value)


def _command(session: pb.Session) -> str:
    return _name(workers.WorkerCommand, session.command, "WORKER_COMMAND_")


def _plain(session: pb.Session) -> dict[str, Any]:
    return {
        "session_id": session.session_id,
        "identity": session.identity,
        "sdk": session.sdk,
        "labels": dict(session.labels),
        "open_time": time_of(session, "open_time"),
        "ttl_seconds": seconds_of(session, "ttl"),
        "last_beat_time": time_of(session, "last_beat_time"),
        "command": _command(session),
        "terminate_time": time_of(session, "terminate_time"),
        "claim_count": session.claim_count,
        "lock_count": session.lock_count,
    }


def _show(console: Console, session: pb.Session) -> None:
    for name, value in _plain(session).items():
        shown = ", ".join(f"{key}={text}" for key, text in value.items()) if name == "labels" else value
        console.print(Text(f"{name}: {'-' if shown in (None, '') else shown}"))
