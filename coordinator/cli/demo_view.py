"""What the demo shows while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator.cli.demo_ledger import Summary

__all__ = ["DemoView", "LiveView", "PlainView", "Scene", "WorkerLine", "summary_lines", "view_for"]

_EVENTS_SHOWN = 8
_LINE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLine:
    """One worker process: ``state`` is one word, ``holds`` the jobs that etcd says it holds."""

    name: str
    pid: int
    state: str
    holds: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """How things stand."""

    total: int
    done: int
    recoveries: int
    refused: int
    workers: Sequence[WorkerLine] = field(default_factory=tuple)


class DemoView(Protocol):
    """Shows scenes and events; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, scene: Scene) -> None:
        """Things stand like this now."""

    def tell(self, event: str) -> None:
        """Something happened that people should notice."""


class PlainView:
    """One line for each event, and one a second for progress."""

    def __init__(self, console: Console, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._monotonic = monotonic
        self._start = self._next = monotonic()
        self._last_done = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, scene: Scene) -> None:
        """Print a line if the last one is old, or everything is done."""
        now = self._monotonic()
        complete = scene.done == scene.total != self._last_done
        if now < self._next and not complete:
            return
        self._next, self._last_done = now + _LINE_SECONDS, scene.done
        self.tell(
            f"{scene.done}/{scene.total} done, {sum(len(one.holds) for one in scene.workers)} held,"
            f" {scene.recoveries} recovered, {scene.refused} stale writes refused"
        )

    def tell(self, event: str) -> None:
        """Print the event with the seconds since the start."""
        line = f"[{self._monotonic() - self._start:6.1f} s] {event}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """A table that stays in place."""

    def __init__(self, console: Console, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._start = monotonic()
        self._events: deque[str] = deque(maxlen=_EVENTS_SHOWN)
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, scene: Scene) -> None:
        """Draw."""
        head = Table.grid(padding=(0, 2))
        head.add_row(
            ProgressBar(total=max(1, scene.total), completed=scene.done, width=40),
            f"{scene.done}/{scene.total} jobs",
            f"{scene.recoveries} recovered",
            f"{scene.refused} stale writes refused",
        )
        workers = Table(box=None, pad_edge=False)
        for column in ("worker", "pid", "state", "holds"):
            workers.add_column(column, no_wrap=True)
        for one in scene.workers:
            style = {"killed": "red", "frozen": "yellow", "working": "green"}.get(one.state, "")
            workers.add_row(one.name, str(one.pid), Text(one.state, style=style), Text(", ".join(one.holds)))
        events = Text("\n".join(self._events), style="dim")
        self._live.update(Group(head, workers, events), refresh=True)

    def tell(self, event: str) -> None:
        """Add the event below the table."""
        self._events.append(f"{self._monotonic() - self._start:6.1f} s  {event}")


def view_for(console: Console) -> DemoView:
    """The live view on a terminal, plain lines elsewhere."""
    return LiveView(console) if console.is_terminal else PlainView(console)


def summary_lines(summary: Summary, statuses: Mapping[str, int]) -> list[str]:
    """The end, for people."""
    parsed = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    speed = f"{summary.seconds:.1f} s, {summary.jobs_per_second:.0f} a second"
    return [
        f"{summary.jobs} jobs, {summary.succeeded} succeeded ({parsed}) in {speed}",
        f"jobs recovered from workers that died or froze: {summary.recovered}",
        f"writes with an old token, refused by the SQLite file: {summary.stale_effects_refused}",
        f"completions with an old token, rejected by the coordinator: {summary.stale_settlements_rejected}",
        f"duplicate effects: {summary.duplicate_effects}",
        f"lost jobs: {summary.lost}",
    ]
