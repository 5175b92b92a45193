"""``leasekeeper epoch``: show the epoch of fencing tokens, and raise it after a restore of etcd.

Exit codes: 0 done; 2 the settings cannot be used; 1 etcd did not do it, run it again.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from coordinator.app.epochs import bump, show
from coordinator.cli.settings_flags import ConfigFile, EtcdEndpoints, SetFlags, read_settings
from coordinator.config import Settings
from coordinator.errors import CodecError, ConfigError, StorageError

__all__ = ["epoch"]

_FAILED = 1
_CANNOT_RUN = 2
_T = TypeVar("_T")

epoch: Final = typer.Typer(
    help="Show or raise the epoch of fencing tokens.", no_args_is_help=True, pretty_exceptions_enable=False
)

Timeout = Annotated[float, typer.Option(min=1, max=3_600, help="Seconds for all of it.")]


def _run(
    command: str,
    config: Path | None,
    etcd: str | None,
    extra: list[str] | None,
    work: Callable[[Settings], Awaitable[_T]],
) -> _T:
    async def working(settings: Settings) -> _T:
        return await work(settings)

    try:
        settings = read_settings(config, {"etcd.endpoints": etcd}, extra)
        return asyncio.run(working(settings))
    except ConfigError as error:
        print(f"leasekeeper epoch {command}: {error}", file=sys.stderr)
        raise typer.Exit(_CANNOT_RUN) from error
    except (StorageError, CodecError) as error:
        print(f"leasekeeper epoch {command}: {error}", file=sys.stderr)
        raise typer.Exit(_FAILED) from error


@epoch.command("show")
def show_command(
    config: ConfigFile = None, etcd: EtcdEndpoints = None, set_: SetFlags = None, timeout: Timeout = 10.0
) -> None:
    """Print the epoch, 0 if there is none yet."""
    print(_run("show", config, etcd, set_, lambda settings: show(settings, timeout=timeout)))


@epoch.command("bump")
def bump_command(
    config: ConfigFile = None,
    etcd: EtcdEndpoints = None,
    at_least: Annotated[
        int,
        typer.Option(min=0, help="Lowest epoch to end at, if a higher one was in use before."),
    ] = 0,
    set_: SetFlags = None,
    timeout: Timeout = 60.0,
) -> None:
    """Raise the epoch, then end every session of an older one. A step of every restore of etcd; repeatable.

    All tokens given before are stale from then on, and all claims held before are lost.
    """
    done = _run(
        "bump", config, etcd, set_, lambda settings: bump(settings, at_least=at_least, timeout=timeout)
    )
    print(
        f"epoch {done.before} -> {done.after}; {done.revoked} sessions ended in {done.namespaces} namespaces"
    )
