"""Runs this process as one of the service: settings, log, and the exit code.

Exit codes: 0 stopped in order by a signal; 2 the settings, the address or the etcd version cannot be used;
1 a part failed for good, as the log says.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import typer

from coordinator import failpoints
from coordinator.app import Role
from coordinator.app import serve as run_role
from coordinator.cli.settings_flags import check_state_dir, read_settings
from coordinator.config import Settings
from coordinator.errors import ConfigError
from coordinator.observability.logging import configure_logging

__all__ = ["run_process"]

_FAILED: Final = 1
_CANNOT_RUN: Final = 2
_LOG = logging.getLogger(__name__)


def run_process(
    role: Role,
    command: str,
    config: Path | None,
    named: Mapping[str, object | None],
    extra: Sequence[str] | None,
    *,
    adapt: Callable[[Settings], Settings] = lambda settings: settings,
    allow_failpoints: bool = False,
) -> None:
    """Run until SIGTERM or SIGINT.

    Args:
        role: what kind of process.
        command: how it was called, for messages.
        config: the settings file.
        named: settings that have a flag of their own, see ``read_settings``.
        extra: other settings, likewise.
        adapt: makes the settings fit the role.
        allow_failpoints: the failpoints of the environment may be armed; else they are refused.

    Raises:
        typer.Exit: with the exit code, if that is not 0.
    """
    try:
        settings = adapt(read_settings(config, named, extra))
        check_state_dir(settings.storage.state_dir)
        configure_logging(settings.log.level, settings.log.format)
        _arm_failpoints(allowed=allow_failpoints)
        run_role(settings, role=role, ready=lambda address: _LOG.info("serving", extra={"address": address}))
    except ConfigError as error:
        print(f"leasekeeper {command}: {error}", file=sys.stderr)
        raise typer.Exit(_CANNOT_RUN) from error
    except Exception as error:
        _LOG.critical("the %s failed", role.name, exc_info=error)
        raise typer.Exit(_FAILED) from error


def _arm_failpoints(*, allowed: bool) -> None:
    text = os.environ.get(failpoints.VARIABLE, "")
    if text and not allowed:
        raise ConfigError(f"{failpoints.VARIABLE} is set: it is for tests, and needs --allow-failpoints")
    failpoints.arm(text)
