"""The demo's SQLite file: no older token gets in, every accepted write is logged, and the summary adds up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.cli.demo_ledger import Summary, summarize
from coordinator.cli.demo_parse import Counts, ParseStatus
from coordinator.cli.demo_sink import Sink, SinkReading, SinkRow, read_sink
from coordinator.core.job import Attempt, AttemptOutcome, Job, JobState, Terms
from coordinator.core.rank import Rank

COUNTS = Counts(status=ParseStatus.PARSED, lines=3, functions=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "effects.sqlite"
    Sink.create(file)
    return file


def test_a_newer_token_replaces_and_an_older_one_is_refused(path: Path) -> None:
    sink = Sink(path, "w")

    assert sink.write("a", 5, COUNTS)
    assert sink.write("a", 9, COUNTS)
    assert not sink.write("a", 5, COUNTS)
    sink.note_stale_settlement("a", 5, "CLAIM_LOST")
    sink.note_stale_settlement("a", 5, "UNAVAILABLE")
    sink.close()

    assert read_sink(path) == SinkReading(
        rows={"a": 9},
        accepted=(SinkRow("a", 5), SinkRow("a", 9)),
        refused=(SinkRow("a", 5),),
        stale_settlements=(SinkRow("a", 5),),
        statuses={"parsed": 1},
    )


def test_two_writers_see_each_others_tokens(path: Path) -> None:
    first, second = Sink(path, "one"), Sink(path, "two")

    assert first.write("a", 2, COUNTS)
    assert not second.write("a", 1, COUNTS)
    assert second.write("a", 2, COUNTS)
    first.close()
    second.close()


# Each example makes a file; a slow disk is no failure.
@settings(deadline=None)
@given(tokens=st.lists(st.integers(1, 6), min_size=1, max_size=12))
def test_the_row_carries_the_highest_token_and_the_log_never_goes_back(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int]
) -> None:
    path = tmp_path_factory.mktemp("sink") / "effects.sqlite"
    Sink.create(path)
    sink = Sink(path, "w")
    answers = [sink.write("a", token, COUNTS) for token in tokens]
    sink.close()

    reading = read_sink(path)
    log = [write.token for write in reading.accepted]
    assert reading.rows == {"a": max(tokens)}
    assert log == sorted(log)
    assert log == [token for token, accepted in zip(tokens, answers, strict=True) if accepted]
    assert len(reading.refused) == answers.count(False)


def job(job_id: str, *attempts: tuple[AttemptOutcome, int], state: JobState = JobState.SUCCEEDED) -> Job:
    return Job(
        namespace="demo",
        job_id=job_id,
        terms=Terms(queue="q", type="t", submit_ms=1),
        state=state,
        ready_ms=1,
        rank=Rank(1, 1),
        attempts=tuple(
            Attempt(number=i + 1, session="s", start_ms=1, token=token, outcome=outcome)
            for i, (outcome, token) in enumerate(attempts)
        ),
    )


def reading(
    rows: dict[str, int], accepted: list[tuple[str, int]], refused: list[tuple[str, int]] | None = None
) -> SinkReading:
    return SinkReading(
        rows=rows,
        accepted=tuple(SinkRow(*one) for one in accepted),
        refused=tuple(SinkRow(*one) for one in refused or []),
        stale_settlements=tuple(SinkRow(*one) for one in refused or []),
        statuses={},
    )


OK, LOST = AttemptOutcome.SUCCEEDED, AttemptOutcome.LOST


def test_a_run_with_a_recovery_and_a_refusal_is_good() -> None:
    jobs = {"a": job("a", (OK, 4)), "b": job("b", (LOST, 0), (OK, 9))}

    summary = summarize(["a", "b"], jobs, reading({"a": 4, "b": 9}, [("a", 4), ("b", 9)], [("b", 5)]), 2.0)

    assert summary == Summary(
        jobs=2,
        succeeded=2,
        recovered=1,
        stale_effects_refused=1,
        stale_settlements_rejected=1,
        duplicate_effects=0,
        lost=0,
        seconds=2.0,
        jobs_per_second=1.0,
    )
    assert summary.good


def test_a_row_with_another_token_than_the_settlement_is_a_duplicate_effect() -> None:
    jobs = {"a": job("a", (OK, 4))}

    assert summarize(["a"], jobs, reading({"a": 5}, [("a", 4), ("a", 5)]), 1.0).duplicate_effects == 1


def test_a_write_accepted_after_a_higher_token_is_a_duplicate_effect() -> None:
    jobs = {"a": job("a", (OK, 9))}

    assert (
        summarize(["a"], jobs, reading({"a": 9}, [("a", 9), ("a", 5), ("a", 9)]), 1.0).duplicate_effects == 1
    )


@pytest.mark.parametrize(
    ("jobs", "rows"),
    [
        ({}, {"a": 4}),
        ({"a": job("a", (OK, 4))}, {}),
        ({"a": job("a", (AttemptOutcome.RUNNING, 0), state=JobState.RUNNING)}, {"a": 4}),
    ],
    ids=["no record", "no row", "not ended"],
)
def test_a_job_that_is_nowhere_or_unfinished_is_lost(jobs: dict[str, Job], rows: dict[str, int]) -> None:
    summary = summarize(["a"], jobs, reading(rows, []), 1.0)

    assert (summary.lost, summary.succeeded, summary.good) == (1, 0, False)
