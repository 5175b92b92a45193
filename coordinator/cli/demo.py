"""`leasekeeper demo`: parse a thousand files with real workers, kill one, freeze one, and lose nothing."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coordinator.cli.demo_input import collect_units, default_input
from coordinator.cli.demo_run import DemoConfig, DemoFailed, run_demo
from coordinator.cli.demo_view import PlainView, summary_lines, view_for
from coordinator.cli.dev_servers import MissingExtra
from coordinator.cli.dev_signals import interrupt_on_sigterm
from coordinator.embedded.child_process import ChildStartError

__all__ = ["demo"]

_NOT_SHOWN = 1
_CANNOT_RUN = 2


def demo(
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 4,
    input_folder: Annotated[
        Path | None, typer.Option("--input", help="Folder of *.py files; default: the standard library.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Run the main job on real input, on an embedded etcd, and check the outcome in etcd and SQLite.

    Every *.py file below the input folder is one job. Half way one worker is killed, and another is stopped
    before its write and continued after others have done its jobs. The exit code is 0 only if every job
    succeeded, at least one was recovered, at least one stale write was refused, no effect is doubled and
    nothing is lost; 1 if not; 2 if the demo cannot be run here.
    """
    source = default_input() if input_folder is None else input_folder
    try:
        units = collect_units(source)
    except OSError as error:
        print(f"leasekeeper demo: {error}", file=sys.stderr)
        raise typer.Exit(_CANNOT_RUN) from error
    console = Console(stderr=as_json)
    view = PlainView(console) if as_json else view_for(console)
    folder = Path(tempfile.mkdtemp(prefix="leasekeeper-demo-"))
    keep = False
    try:
        with interrupt_on_sigterm(), view:
            view.tell(f"{len(units)} jobs from {source}, {workers} workers, session TTL 3 s")
            config = DemoConfig(folder=folder, input_folder=source.resolve(), workers=workers)
            summary, reading = run_demo(config, units, view)
        keep = not summary.good
    except MissingExtra as error:
        print(f"leasekeeper demo: {error}", file=sys.stderr)
        raise typer.Exit(_CANNOT_RUN) from error
    except (DemoFailed, ChildStartError) as error:
        keep = True
        print(f"leasekeeper demo: {error}", file=sys.stderr)
        raise typer.Exit(_NOT_SHOWN) from error
    finally:
        if keep:
            print(f"data and logs stay in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        print(json.dumps(summary.to_dict()))
    else:
        for line in summary_lines(summary, reading.statuses):
            console.print(line, markup=False, highlight=False)
    if not summary.good:
        raise typer.Exit(_NOT_SHOWN)
