"""What people see of a demo."""

from __future__ import annotations

import io

from rich.console import Console

from coordinator.cli.demo_ledger import Summary
from coordinator.cli.demo_view import LiveView, PlainView, Scene, WorkerLine, summary_lines, view_for

SCENE = Scene(
    total=10,
    done=4,
    recoveries=1,
    refused=2,
    workers=[WorkerLine(name="w1", pid=12, state="frozen", holds=["[red]a.py[/red]"])],
)


def test_plain_lines_come_once_a_second_and_at_the_end() -> None:
    out = io.StringIO()
    now = [0.0]
    view = PlainView(Console(file=out, width=200), lambda: now[0])

    view.show(SCENE)
    now[0] = 0.5
    view.show(SCENE)
    view.show(Scene(total=10, done=10, recoveries=1, refused=2))
    view.show(Scene(total=10, done=10, recoveries=1, refused=2))
    view.tell("killed [w1]")

    assert out.getvalue().splitlines() == [
        "[   0.0 s] 4/10 done, 1 held, 1 recovered, 2 stale writes refused",
        "[   0.5 s] 10/10 done, 0 held, 1 recovered, 2 stale writes refused",
        "[   0.5 s] killed [w1]",
    ]


def test_the_live_view_shows_workers_and_what_they_hold() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    view = view_for(console)

    assert isinstance(view, LiveView)
    with view:
        view.tell("froze w1")
        view.show(SCENE)
    shown = out.getvalue()
    for part in ("4/10 jobs", "w1", "frozen", "[red]a.py[/red]", "froze w1"):
        assert part in shown


def test_no_terminal_means_plain_lines() -> None:
    assert isinstance(view_for(Console(file=io.StringIO())), PlainView)


def test_the_summary_says_every_number() -> None:
    summary = Summary(
        jobs=1000,
        succeeded=999,
        recovered=3,
        stale_effects_refused=2,
        stale_settlements_rejected=1,
        duplicate_effects=0,
        lost=4,
        seconds=12.34,
        jobs_per_second=81.0,
    )

    text = "\n".join(summary_lines(summary, {"parsed": 998, "syntax_error": 1}))

    for part in (
        "1000 jobs, 999 succeeded (998 parsed, 1 syntax_error) in 12.3 s",
        "died or froze: 3",
        "lost jobs: 4",
    ):
        assert part in text
