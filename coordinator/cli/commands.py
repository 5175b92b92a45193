"""All commands, registered in one application."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Final

import typer

from coordinator.cli.bench import bench
from coordinator.cli.demo import demo
from coordinator.cli.dev import dev
from coordinator.cli.epoch import epoch
from coordinator.cli.queues import queues
from coordinator.cli.reconcile import reconcile
from coordinator.cli.reconciler import reconciler
from coordinator.cli.serve import serve
from coordinator.cli.sessions import sessions

__all__ = ["commands_entry"]

commands_entry: Final = typer.Typer(
    name="leasekeeper",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"leasekeeper {version('leasekeeper')}")
        raise typer.Exit


@commands_entry.callback()
def _options(
    show: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hands jobs to worker processes, one live holder each, with fencing tokens."""


commands_entry.command("serve")(serve)
commands_entry.command("reconciler")(reconciler)
commands_entry.command("reconcile")(reconcile)
commands_entry.command("dev")(dev)
commands_entry.command("demo")(demo)
commands_entry.add_typer(bench, name="bench")
commands_entry.add_typer(epoch, name="epoch")
commands_entry.add_typer(queues, name="queues")
commands_entry.add_typer(sessions, name="sessions")
