"""The console script ``leasekeeper``: runs workers itself, and finds all other commands by entry points.

Exit codes of ``leasekeeper worker run``: 0 after a clean stop (signal, or told by the coordinator), 1 if the
worker ended by an error, 2 for a wrong command line, target or setting, 70 if the worker was stuck and
`WorkerConfig.exit_when_stuck_after` is set, 130 if a second signal cut the drain short.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker_sdk._reload import run_reloading
from worker_sdk.errors import ConfigError, LeasekeeperError

if TYPE_CHECKING:
    from worker_sdk.worker import Worker

__all__ = ["main"]

_GROUP = "leasekeeper.commands"
_WRONG_USAGE = 2
_CUT_SHORT = 130
_INSTALL = "to get the service: pip install 'leasekeeper[server]', with `dev`, `demo` and `bench`: [dev]"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        SystemExit: always, with the exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["worker"]:
        raise SystemExit(_worker(given[1:]))
    command = _load_commands()
    asks_for_help = given in ([], ["--help"], ["-h"])
    if command is not None:
        try:
            raise SystemExit(command(args=given, prog_name="leasekeeper"))
        finally:
            if asks_for_help:
                print("Workers of your own code: leasekeeper worker run MODULE:ATTRIBUTE (see its --help)")
    if asks_for_help:
        print("usage: leasekeeper worker run MODULE:ATTRIBUTE\n")
        print(f"Other commands belong to the service; {_INSTALL}")
        raise SystemExit(0)
    print(f"leasekeeper: no command {given[0]!r} is installed; {_INSTALL}", file=sys.stderr)
    raise SystemExit(_WRONG_USAGE)


def _load_commands() -> Any | None:
    """Return the service's command-line app; None where the service or something that it needs is missing."""
    for entry in sorted(entry_points(group=_GROUP), key=lambda entry: entry.name):
        app = _load(entry)
        if app is not None:
            return app
    return None


def _load(entry: EntryPoint) -> Any | None:
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] in {
            "worker_sdk",
            "leasekeeper",
            "coordinator",
        }:
            raise
        # A third-party module of the [server] extra.
        print(f"leasekeeper: {error.name} is not installed; {_INSTALL}", file=sys.stderr)
        return None


def _worker(given: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="leasekeeper worker", description="Run workers of your own code.")
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser(
        "run", help="run a Worker until SIGTERM or SIGINT; a second signal ends it at once"
    )
    run.add_argument(
        "target", metavar="MODULE:ATTRIBUTE", help="a worker_sdk.Worker, or a function that makes one"
    )
    run.add_argument(
        "--queues", metavar="A,B=4", help="serve these in place of its own; with '=': slots of its own"
    )
    run.add_argument("--concurrency", type=int, metavar="N", help="slots that queues without '=' share")
    run.add_argument(
        "--drain-timeout", type=_seconds, metavar="SECONDS", help="how long running jobs may go on"
    )
    run.add_argument("--reload", action="store_true", help="start again when code below this folder changes")
    run.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    try:
        options = parser.parse_args(given)
    except SystemExit as error:
        return int(error.code or 0)
    logging.basicConfig(level=options.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if options.reload:
        return run_reloading(["worker", *(one for one in given if one != "--reload")], Path.cwd())
    try:
        worker = _load_worker(options.target)
        _set_queues(worker, options.queues, options.concurrency)
    except (LeasekeeperError, _BadTarget) as error:
        print(f"leasekeeper worker run: {error}", file=sys.stderr)
        return _WRONG_USAGE
    if options.drain_timeout is not None:
        worker.drain_timeout = options.drain_timeout
    try:
        return asyncio.run(_run(worker))
    except LeasekeeperError as error:
        print(f"leasekeeper worker run: {error}", file=sys.stderr)
        return _WRONG_USAGE if isinstance(error, ConfigError) else 1


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def _set_queues(worker: Worker, queues: str | None, concurrency: int | None) -> None:
    """Apply ``--queues`` and ``--concurrency``.

    Raises:
        ConfigError: they cannot work.
    """
    if queues is None and concurrency is None:
        return
    shared: list[str] = []
    own: dict[str, int] = {}
    for part in queues.split(",") if queues is not None else worker.queues:
        name, separator, slots = part.strip().partition("=")
        if not name or (separator and not slots.isdecimal()):
            raise ConfigError(f"--queues has {part!r}: give names, or name=slots")
        if separator:
            own[name] = int(slots)
        else:
            shared.append(name)
    if shared and own:
        raise ConfigError("--queues: give slots to every queue with '=', or to none")
    if own and concurrency is not None:
        raise ConfigError("--concurrency is for queues that share their slots: leave it out beside '='")
    worker.serve(own or shared, concurrency=16 if concurrency is None else concurrency)


async def _run(worker: Worker) -> int:
    await worker.run()
    code = _CUT_SHORT if worker.stats.cut_short else 0
    if worker.stats.abandoned:
        # asyncio.run would wait for handlers that ignore their cancellation. Their jobs are given back
        # already.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


class _BadTarget(Exception):
    """``MODULE:ATTRIBUTE`` does not lead to a worker."""


def _load_worker(target: str) -> Worker:
    from worker_sdk.worker import Worker  # deferred: `leasekeeper --help` needs no grpc

    module_name, separator, attribute = target.partition(":")
    if not (module_name and separator and attribute):
        raise _BadTarget(f"{target!r} is not MODULE:ATTRIBUTE")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise _BadTarget(f"no module {module_name!r} here or on the path") from error
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if callable(found) and not isinstance(found, Worker):
        found = found()
    if not isinstance(found, Worker):
        raise _BadTarget(f"{target!r} is no worker_sdk.Worker and makes none")
    return found
