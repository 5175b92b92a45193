"""``leasekeeper queues``: show queues and their figures, set their defaults, pause and resume them."""

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
from leasekeeper.v1 import queue_service_pb2 as pb
from leasekeeper.v1.queue_service_pb2_grpc import QueueServiceStub

__all__ = ["queues"]

_WRONG_USAGE: Final = 2
_PAGE: Final = 1_000
_MOST_PAGES: Final = 1_000
_TIMEOUTS: Final = ("queue_timeout", "run_timeout", "total_timeout", "heartbeat_timeout")
_SECONDS: Final = "Seconds; 0 sets it to its default."

queues: Final = typer.Typer(
    help="Show, set, pause and resume queues.", no_args_is_help=True, pretty_exceptions_enable=False
)
queues.callback()(connect)

QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.", show_default=False)]
Span = Annotated[float | None, typer.Option(min=0, help=_SECONDS, show_default=False)]


@queues.command("list")
def list_command(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List the queues that ever had a job or settings."""
    target: Target = context.obj
    found: list[pb.Queue] = []
    token = ""
    for _ in range(_MOST_PAGES):
        request = pb.ListQueuesRequest(namespace=target.namespace, page_size=_PAGE, page_token=token)
        answer = _page(context, request)
        found += answer.queues
        token = answer.next_page_token
        if not token:
            break
    if as_json:
        print_json({"namespace": target.namespace, "queues": [_plain(queue) for queue in found]})
        return
    table = Table("queue", "paused", "since", "reason", "set", box=None)
    for queue in found:
        settings = [name for name, value in _settings(queue.settings).items() if value]
        cells = (
            queue.queue,
            "yes" if queue.paused else "-",
            time_of(queue, "pause_time") or "-",
            queue.pause_reason or "-",
            ", ".join(settings) or "-",
        )
        table.add_row(*map(Text, cells))
    Console(highlight=False).print(table)


@queues.command("get")
def get_command(context: typer.Context, queue: QueueName, as_json: JsonFlag = False) -> None:
    """Show one queue: its settings, its pause, its etag."""
    _show(_get(context, queue), as_json=as_json)


@queues.command("set")
def set_command(
    context: typer.Context,
    queue: QueueName,
    target_waits: Annotated[
        str | None,
        typer.Option(help="Seconds for priorities 1 to 5, as in 1,10,60,600,3600; '' for the defaults."),
    ] = None,
    queue_timeout: Span = None,
    run_timeout: Span = None,
    total_timeout: Span = None,
    heartbeat_timeout: Span = None,
    max_retries: Annotated[int | None, typer.Option(min=0, help="Of jobs without a retry policy.")] = None,
    initial_delay: Annotated[
        float | None, typer.Option(min=0, help="Seconds before the first retry.")
    ] = None,
    max_delay: Annotated[float | None, typer.Option(min=0, help="Longest seconds before a retry.")] = None,
    default_retries: Annotated[
        bool, typer.Option("--default-retries", help="Forget the retry policy of the queue.")
    ] = False,
    etag: Annotated[str, typer.Option(help="Change it only if it still has this etag.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Change what jobs of the queue take where they leave it out; what is not named stays.

    It reads the queue first, and changes nothing if somebody else changes it meanwhile.
    """
    before = _get(context, queue)
    settings = pb.QueueSettings()
    settings.CopyFrom(before.settings)
    if target_waits is not None:
        del settings.target_waits[:]
        settings.target_waits.extend(map(span_of, _numbers(target_waits)))
    spans = (queue_timeout, run_timeout, total_timeout, heartbeat_timeout)
    for name, seconds in zip(_TIMEOUTS, spans, strict=True):
        if seconds:
            getattr(settings, name).CopyFrom(span_of(seconds))
        elif seconds is not None:
            settings.ClearField(name)  # type: ignore[arg-type]
    if default_retries:
        settings.ClearField("retry_policy")
    if max_retries is not None:
        settings.retry_policy.max_retries = max_retries
    if initial_delay is not None:
        settings.retry_policy.initial_delay.CopyFrom(span_of(initial_delay))
    if max_delay is not None:
        settings.retry_policy.max_delay.CopyFrom(span_of(max_delay))
    request = pb.UpdateQueueRequest(
        namespace=context.obj.namespace,
        request_id=uuid.uuid4().hex,
        queue=queue,
        etag=etag or before.etag,
        settings=settings,
    )
    answer = call(
        context,
        lambda channel, metadata, left: QueueServiceStub(channel).UpdateQueue(
            request, metadata=metadata, timeout=left
        ),
    )
    _show(answer.queue, as_json=as_json)


@queues.command("pause")
def pause_command(
    context: typer.Context,
    queue: QueueName,
    reason: Annotated[str, typer.Option(help="For people.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Let nothing more be claimed from the queue; what runs goes on, and so do submissions."""
    request = pb.PauseQueueRequest(
        namespace=context.obj.namespace, request_id=uuid.uuid4().hex, queue=queue, reason=reason
    )
    answer = call(
        context,
        lambda channel, metadata, left: QueueServiceStub(channel).PauseQueue(
            request, metadata=metadata, timeout=left
        ),
    )
    _show(answer.queue, as_json=as_json)


@queues.command("resume")
def resume_command(context: typer.Context, queue: QueueName, as_json: JsonFlag = False) -> None:
    """Take a pause back."""
    request = pb.ResumeQueueRequest(namespace=context.obj.namespace, request_id=uuid.uuid4().hex, queue=queue)
    answer = call(
        context,
        lambda channel, metadata, left: QueueServiceStub(channel).ResumeQueue(
            request, metadata=metadata, timeout=left
        ),
    )
    _show(answer.queue, as_json=as_json)


@queues.command("stats")
def stats_command(context: typer.Context, queue: QueueName, as_json: JsonFlag = False) -> None:
    """Show what waits and runs, how old it is, and how fast it moves, as one coordinator knows it."""
    request = pb.GetQueueStatsRequest(namespace=context.obj.namespace, queue=queue)
    answer = call(
        context,
        lambda channel, metadata, left: QueueServiceStub(channel).GetQueueStats(
            request, metadata=metadata, timeout=left
        ),
    )
    figures = _figures(queue, answer)
    if as_json:
        print_json(figures)
        return
    console = Console(highlight=False)
    oldest = figures["oldest_seconds"]
    console.print(
        f"{queue}: {figures['pending']} pending, {figures['running']} running, "
        f"oldest {'-' if oldest is None else f'{oldest:.1f} s'}, "
        f"{figures['add_rate']:.1f}/s in, {figures['dispatch_rate']:.1f}/s out"
        f"{', paused' if figures['paused'] else ''}"
    )
    types = Table("type", "pending", "running", "circuit", box=None)
    for one in figures["types"]:
        types.add_row(*map(Text, (one["type"], str(one["pending"]), str(one["running"]), one["circuit"])))
    console.print(types)
    if figures["priorities"]:
        note = "" if figures["all_at_hand"] else " (of the jobs at hand)"
        priorities = Table(f"priority{note}", "pending", "oldest, s", box=None)
        for one in figures["priorities"]:
            priorities.add_row(str(one["priority"]), str(one["pending"]), f"{one['oldest_seconds']:.1f}")
        console.print(priorities)


def _page(context: typer.Context, request: pb.ListQueuesRequest) -> pb.ListQueuesResponse:
    return call(
        context,
        lambda channel, metadata, left: QueueServiceStub(channel).ListQueues(
            request, metadata=metadata, timeout=left
        ),
    )


def _get(context: typer.Context, queue: str) -> pb.Queue:
    request = pb.GetQueueRequest(namespace=context.obj.namespace, queue=queue)
    answer = call(
        context,
        lambda channel, metadata, left: QueueServiceStub(channel).GetQueue(
            request, metadata=metadata, timeout=left
        ),
    )
    return answer.queue


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")] if text.strip() else []
    except ValueError as error:
        print(f"--target-waits {text!r}: five numbers of seconds are wanted", file=sys.stderr)
        raise typer.Exit(_WRONG_USAGE) from error


def _settings(settings: pb.QueueSettings) -> dict[str, Any]:
    retry = settings.retry_policy
    return {
        "target_waits": [wait.ToMilliseconds() / 1000 for wait in settings.target_waits],
        **{name: seconds_of(settings, name) for name in _TIMEOUTS},
        "retry_policy": {
            "max_retries": retry.max_retries,
            "initial_delay": seconds_of(retry, "initial_delay"),
            "multiplier": retry.multiplier,
            "max_delay": seconds_of(retry, "max_delay"),
            "jitter": retry.jitter,
            "max_lease_losses": retry.max_lease_losses,
            "non_retryable_types": list(retry.non_retryable_types),
        }
        if settings.HasField("retry_policy")
        else None,
    }


def _plain(queue: pb.Queue) -> dict[str, Any]:
    return {
        "queue": queue.queue,
        "paused": queue.paused,
        "pause_reason": queue.pause_reason,
        "pause_time": time_of(queue, "pause_time"),
        "etag": queue.etag,
        "settings": _settings(queue.settings),
    }


def _figures(queue: str, answer: pb.GetQueueStatsResponse) -> dict[str, Any]:
    return {
        "queue": queue,
        "paused": answer.paused,
        "pending": answer.pending,
        "running": answer.running,
        "oldest_seconds": seconds_of(answer, "oldest_age"),
        "all_at_hand": answer.all_at_hand,
        "add_rate": answer.add_rate,
        "dispatch_rate": answer.dispatch_rate,
        "priorities": [
            {
                "priority": one.priority,
                "pending": one.pending,
                "oldest_seconds": one.oldest_age.ToMilliseconds() / 1000,
            }
            for one in answer.priorities
        ],
        "types": [
            {
                "type": one.type,
                "pending": one.pending,
                "running": one.running,
                "circuit": pb.CircuitState.Name(one.circuit.state).removeprefix("CIRCUIT_STATE_"),
            }
            for one in answer.types
        ],
    }


def _show(queue: pb.Queue, *, as_json: bool) -> None:
    plain = _plain(queue)
    if as_json:
        print_json(plain)
        return
    console = Console(highlight=False)
    pause = f"paused since {plain['pause_time']}" if queue.paused else "not paused"
    console.print(Text(f"{queue.queue}: {pause}{f' ({queue.pause_reason})' if queue.pause_reason else ''}"))
    for name, value in plain["settings"].items():
        console.print(Text(f"  {name}: {value if value not in (None, []) else 'default'}"))
    console.print(Text(f"  etag: {queue.etag}"))
