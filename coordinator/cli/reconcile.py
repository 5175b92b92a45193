"""``leasekeeper reconcile``: run the passes of the reconciler now, on a coordinator, and show what each did.

Exit codes: 0 nothing had to be done, or all of it was done; 3 a dry run found work; 1 the coordinator could
not be asked, or a pass could not finish or tried in vain; 2 the command line is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

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
from leasekeeper.v1 import admin_service_pb2 as pb
from leasekeeper.v1 import admin_service_pb2_grpc, types_pb2
from worker_sdk import ConfigError

__all__ = ["reconcile"]

_FAILED: Final = 1
_WRONG_USAGE: Final = 2
_WORK_FOUND: Final = 3
_MOST_ACTIONS: Final = 1_000


def reconcile(
    address: AddressFlag = "127.0.0.1:7420",
    namespace: NamespaceFlag = "default",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; say what would be done.")
    ] = False,
    passes: Annotated[
        list[str] | None,
        typer.Option(
            "--pass", metavar="NAME", help="Only this pass; may be given several times. All by default."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    actions: Annotated[
        int, typer.Option(min=1, max=_MOST_ACTIONS, help="Most repairs that are listed; counts are complete.")
    ] = 100,
    timeout: Annotated[float, typer.Option(min=1, max=3_600, help="Seconds for all of it.")] = 60.0,
    tls: TlsFlag = False,
    tls_ca: TlsCaFlag = None,
    tls_cert: TlsCertFlag = None,
    tls_key: TlsKeyFlag = None,
    tls_server_name: TlsNameFlag = "",
    token_file: TokenFileFlag = None,
    allow_plaintext_token: PlaintextTokenFlag = False,
) -> None:
    """Run the passes of the reconciler over one namespace, once, and show what each did.

    It may run beside the reconcilers of all coordinators. Exit code 0: nothing had to be done, or all of it
    was done; 3: a dry run found work; 1: something could not be done, or nobody could be asked; 2: the
    command line is wrong.
    """
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
    request = pb.RunReconcileRequest(
        namespace=namespace, dry_run=dry_run, passes=passes or (), max_actions=actions
    )
    try:
        answer = ask(
            connection_config(flags),
            lambda channel, metadata, left: admin_service_pb2_grpc.AdminServiceStub(channel).RunReconcile(
                request, metadata=metadata, timeout=left
            ),
            timeout=timeout,
        )
    except ConfigError as error:
        print(f"leasekeeper reconcile: {error}", file=sys.stderr)
        raise typer.Exit(_WRONG_USAGE) from error
    except CallRefused as error:
        print(f"leasekeeper reconcile: {error}", file=sys.stderr)
        raise typer.Exit(_WRONG_USAGE if error.reason == "VALIDATION_FAILED" else _FAILED) from error
    reports = [_plain(report) for report in answer.passes]
    if as_json:
        print(json.dumps({"namespace": namespace, "dry_run": dry_run, "passes": reports}, ensure_ascii=False))
    else:
        _show(Console(highlight=False), reports, dry_run=dry_run)
    raise typer.Exit(_exit_code(reports, dry_run=dry_run))


def _exit_code(reports: Iterable[dict[str, Any]], *, dry_run: bool) -> int:
    if any(report["error"] or report["failed"] for report in reports):
        return _FAILED
    return _WORK_FOUND if dry_run and any(report["counts"] for report in reports) else 0


def _plain(report: pb.PassReport) -> dict[str, Any]:
    return {
        "pass": getattr(report, "pass"),
        "examined": report.examined,
        "counts": dict(sorted(report.counts.items())),
        "failed": report.failed,
        "waiting": report.waiting,
        "seconds": report.duration.ToMilliseconds() / 1000,
        "error": report.error,
        "actions": [
            {
                "kind": action.kind,
                "job_id": action.job_id,
                "state_before": _state(action.state_before),
                "state_after": _state(action.state_after),
                "reason": action.reason,
            }
            for action in report.actions
        ],
    }


def _state(state: types_pb2.JobState.ValueType) -> str:
    """Its name, empty where there is none; a newer coordinator may know states that we do not."""
    if not state:
        return ""
    try:
        return types_pb2.JobState.Name(state).removeprefix("JOB_STATE_")
    except ValueError:
        return str(state)


def _show(console: Console, reports: list[dict[str, Any]], *, dry_run: bool) -> None:
    """A table of passes, and one of repairs. Texts of jobs are data and never markup."""
    table = Table(
        "pass", "examined", "would be done" if dry_run else "done", "failed", "waiting", "seconds", box=None
    )
    for column in (1, 3, 4, 5):
        table.columns[column].justify = "right"
    for report in reports:
        done = ", ".join(f"{kind} {count}" for kind, count in report["counts"].items()) or "-"
        table.add_row(
            Text(report["pass"]),
            str(report["examined"]),
            Text(done),
            str(report["failed"]),
            str(report["waiting"]),
            f"{report['seconds']:.2f}",
        )
    console.print(table)
    for report in reports:
        if report["error"]:
            console.print(Text(f"{report['pass']}: {report['error']}", style="bold red"))
    rows = [(report["pass"], action) for report in reports for action in report["actions"]]
    if rows:
        console.print()
        listed = Table("pass", "repair", "job", "state", "reason", box=None)
        for name, action in rows:
            states = " -> ".join(filter(None, (action["state_before"], action["state_after"])))
            cells = (name, action["kind"], action["job_id"], states or "-", action["reason"])
            listed.add_row(*(Text(cell) for cell in cells))
        console.print(listed)
        left_out = sum(sum(report["counts"].values()) for report in reports) - len(rows)
        if left_out > 0:
            console.print(f"and {left_out} more; --actions lists up to {_MOST_ACTIONS}")
