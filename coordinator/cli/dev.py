"""`leasekeeper dev`: etcd, Valkey and a coordinator on this machine, in one folder, for development."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.dev_folder import DevFolder, FolderBusy, FolderUnusable
from coordinator.cli.dev_servers import CoordinatorProcess, MissingExtra, dev_etcd, dev_valkey
from coordinator.cli.dev_signals import stop_signals
from coordinator.cli.dev_tour import grpcurl_path_line, tour_lines
from coordinator.embedded.child_process import ChildStartError

__all__ = ["dev"]

USUAL_PORT = 7420
"""That of `leasekeeper serve`, and of the examples."""

_CANNOT_START = 2
_CHILD_ENDED = 1
_WATCH_SECONDS = 0.5

_WARNING = (
    "For development only: one etcd member, no TLS, no login, and nothing listens outside 127.0.0.1.\n"
    "The etcd that comes from PyPI is 3.5.1, which has known defects; `leasekeeper serve` refuses it."
)


def dev(
    folder: Annotated[
        Path, typer.Option("--dir", help="Folder for data and logs; a second start finds the data again.")
    ] = Path(".leasekeeper-dev"),
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port of the coordinator; 0: a free one.",
            show_default=f"{USUAL_PORT} if it is free, else a free one",
        ),
    ] = None,
) -> None:
    """Run everything that is needed to try Leasekeeper, until Ctrl-C or SIGTERM.

    Exit code 0 after a stop, 1 if a server ended by itself, 2 if it cannot start: the folder or the port is
    in use, or a program is missing.
    """
    try:
        with stop_signals() as stop:
            clean = _run(DevFolder(folder), port, stop)
    except (FolderBusy, FolderUnusable, MissingExtra, ChildStartError) as error:
        print(f"leasekeeper dev: {error}", file=sys.stderr)
        raise typer.Exit(_CANNOT_START) from error
    if not clean:
        raise typer.Exit(_CHILD_ENDED)


def _run(folder: DevFolder, port: int | None, stop: threading.Event) -> bool:
    """Start, print, wait, stop. False if a server ended by itself."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.locked())
        etcd = stack.enter_context(dev_etcd(folder.etcd))
        valkey = stack.enter_context(dev_valkey(folder.valkey))
        coordinator = stack.enter_context(
            CoordinatorProcess(
                etcd.endpoint, folder.root, port=port or 0, wish=USUAL_PORT if port is None else 0
            )
        )
        version = ".".join(map(str, etcd.version()))
        endpoints = {
            "coordinator": coordinator.endpoint,
            "etcd": etcd.endpoint,
            "valkey": valkey.url,
        }
        stack.enter_context(folder.announced(endpoints))
        print(_WARNING)
        print()
        print(f"coordinator  {coordinator.endpoint}")
        print(f"etcd {version:<7} {etcd.endpoint}")
        print(f"valkey       {valkey.url}")
        print(f"data, logs   {folder.root}")
        print()
        print("A worker's whole life by hand (https://github.com/fullstorydev/grpcurl):")
        print()
        for line in [*grpcurl_path_line(), *tour_lines(coordinator.endpoint)]:
            print(line)
        print()
        print("Ctrl-C stops everything; the next start finds the data again.", flush=True)
        while not stop.wait(_WATCH_SECONDS):
            running = {"etcd": etcd.running, "valkey": valkey.running, "coordinator": coordinator.running}
            ended = [name for name, runs in running.items() if not runs]
            if ended:
                print(f"leasekeeper dev: {ended[0]} has ended; see its log in {folder.root}", file=sys.stderr)
                return False
    return True
