"""`leasekeeper bench`: rates and latencies on an embedded etcd that syncs to disk, one JSON line each."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.bench_recovery import RecoverySizes
from coordinator.cli.bench_suite import BenchSizes, Suite
from coordinator.cli.dev_servers import MissingExtra
from coordinator.cli.dev_signals import interrupt_on_sigterm
from coordinator.embedded.child_process import ChildStartError

__all__ = ["bench"]

_CANNOT_RUN = 2

bench = typer.Typer(
    name="bench",
    invoke_without_command=True,
    no_args_is_help=False,
    help="Measure. Without a sub-command everything runs, within six minutes. Every line is one JSON object.",
)


class Mode(StrEnum):
    """How many jobs a call carries."""

    BATCH = "batch"
    UNARY = "unary"


class Client(StrEnum):
    """Through what the load goes: the Python SDK, or the generated stubs alone."""

    SDK = "sdk"
    RAW = "raw"


Rounds = Annotated[int, typer.Option(min=1, max=20, help="Rounds; medians are printed.")]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        exists=True,
        file_okay=False,
        writable=True,
        help="Folder on the disk to measure; default: a temporary one.",
    ),
]
# Lines are JSON whether or not it is asked for; the option says so in scripts.
Json = Annotated[bool, typer.Option("--json", help="JSON lines, which is the only form there is.")]


@bench.callback()
def everything(
    context: typer.Context,
    rounds: Rounds = 3,
    folder: Folder = None,
    scale: Annotated[
        float, typer.Option(min=0.001, max=100, help="Size of every bench, 1 for the usual one.")
    ] = 1.0,
    as_json: Json = False,
) -> None:
    """Run every bench in one run, and compare them."""
    if context.invoked_subcommand is not None:
        misplaced = [name for name in ("rounds", "folder", "scale") if _given(context, name)]
        if misplaced:
            option = "dir" if misplaced[0] == "folder" else misplaced[0]
            print(
                f"leasekeeper bench: --{option} must stand behind {context.invoked_subcommand},"
                " as far as that has it",
                file=sys.stderr,
            )
            raise typer.Exit(_CANNOT_RUN)
        return
    usual = BenchSizes(rounds=rounds)
    suite = Suite(
        BenchSizes(
            batch_jobs=_scaled(usual.batch_jobs, scale),
            unary_jobs=_scaled(usual.unary_jobs, scale),
            idle_jobs=_scaled(usual.idle_jobs, scale),
            floor_jobs=_scaled(usual.floor_jobs, scale),
            echo_calls=_scaled(usual.echo_calls, scale),
            warm_up=_scaled(usual.warm_up, scale),
            rounds=rounds,
        ),
        folder,
    )

    def run() -> None:
        suite.environment()
        suite.etcd_floor()
        suite.lifecycle_batch(Client.SDK)
        suite.lifecycle_batch(Client.RAW)
        suite.grpc_echo()
        suite.lifecycle_unary()
        suite.idle_latency()
        suite.shares()

    _guarded(run)


@bench.command()
def lifecycle(
    jobs: Annotated[int, typer.Option(min=1, max=1_000_000, help="Jobs a round.")] = 20_000,
    mode: Annotated[Mode, typer.Option(help="Jobs a call: a hundred, or one.")] = Mode.BATCH,
    client: Annotated[Client, typer.Option(help="SDK or bare stubs; unary is always bare.")] = Client.SDK,
    rounds: Rounds = 3,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Submit, claim, run an empty handler, complete."""
    suite = Suite(
        BenchSizes(batch_jobs=jobs, unary_jobs=jobs, warm_up=min(jobs, 2_000), rounds=rounds), folder
    )
    if mode is Mode.UNARY:
        _guarded(suite.lifecycle_unary)
    else:
        _guarded(functools.partial(suite.lifecycle_batch, client.value))


@bench.command("idle-latency")
def idle_latency(
    jobs: Annotated[int, typer.Option(min=1, max=100_000, help="Jobs a round.")] = 500,
    rounds: Rounds = 3,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Time from a submission to an idle queue until the handler starts."""
    _guarded(Suite(BenchSizes(idle_jobs=jobs, rounds=rounds), folder).idle_latency)


@bench.command()
def locks(
    pairs: Annotated[
        int, typer.Option(min=64, max=1_000_000, help="Locks taken and given back a round.")
    ] = 6_000,
    handovers: Annotated[int, typer.Option(min=1, max=100_000, help="Of one contended lock, a round.")] = 500,
    rounds: Rounds = 3,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Take and give back locks, 64 callers on names of their own and eight on one, beside two peers."""
    sizes = BenchSizes(lock_pairs=pairs, handovers=handovers, warm_up=min(pairs, 2_000), rounds=rounds)
    _guarded(Suite(sizes, folder).locks)


@bench.command()
def recovery(
    ttl: Annotated[float, typer.Option(min=2, max=60, help="TTL of every session, seconds.")] = 5.0,
    kills: Annotated[int, typer.Option(min=1, max=100, help="Workers killed one after the other.")] = 5,
    releases: Annotated[int, typer.Option(min=1, max=100, help="Jobs given back one by one.")] = 20,
    jobs: Annotated[int, typer.Option(min=12, max=5_400, help="Jobs that 12 killed workers hold.")] = 5_000,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """How long jobs rest when a worker is killed, leaves, or twelve are killed or five frozen at once."""
    sizes = RecoverySizes(ttl_s=ttl, kills=kills, releases=releases, mass_jobs=jobs)
    _guarded(functools.partial(Suite(BenchSizes(), folder).recovery, sizes))


@bench.command("etcd-floor")
def etcd_floor(
    jobs: Annotated[int, typer.Option(min=1, max=1_000_000, help="Lifecycles a round.")] = 20_000,
    rounds: Rounds = 3,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """The writes of a lifecycle straight to etcd, 60 operations a Txn, 4 Txns in flight."""
    _guarded(Suite(BenchSizes(floor_jobs=jobs, warm_up=min(jobs, 2_000), rounds=rounds), folder).etcd_floor)


@bench.command("grpc-echo")
def grpc_echo(
    calls: Annotated[int, typer.Option(min=1, max=10_000_000, help="Calls a round.")] = 20_000,
    rounds: Rounds = 3,
    as_json: Json = False,
) -> None:
    """Empty calls to an empty grpc.aio server, 64 callers."""
    _guarded(Suite(BenchSizes(echo_calls=calls, warm_up=min(calls, 2_000), rounds=rounds)).grpc_echo)


def _given(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _scaled(size: int, scale: float) -> int:
    return max(1, round(size * scale))


def _guarded(run: Callable[[], None]) -> None:
    try:
        with interrupt_on_sigterm():
            run()
    except (MissingExtra, ChildStartError) as error:
        print(f"leasekeeper bench: {error}", file=sys.stderr)
        raise typer.Exit(_CANNOT_RUN) from error
