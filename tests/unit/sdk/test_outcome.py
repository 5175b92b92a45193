"""How an attempt ends, for everything that a handler may return or raise."""

from __future__ import annotations

import asyncio

import pytest

from worker_sdk import JobCancelled, NoRetry, Result, Retry
from worker_sdk._convert.work import settlement_to
from worker_sdk._outcome import MAX_RESULT_BYTES, from_exception, from_result
from worker_sdk._work import Completed, Failed, Released, StopReason


class TwoArguments(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        (None, Completed()),
        (b"x", Completed(b"x", "application/octet-stream")),
        (bytearray(b"x"), Completed(b"x", "application/octet-stream")),
        ("é", Completed("é".encode(), "text/plain; charset=utf-8")),
        (Result(b"<a/>", "text/xml"), Completed(b"<a/>", "text/xml")),
        ({"a": 1}, Completed(b'{"a": 1}', "application/json")),
        (False, Completed(b"false", "application/json")),
    ],
)
def test_a_returned_value_is_the_result(value: object, outcome: Completed) -> None:
    assert from_result(value) == outcome


def test_a_value_without_json_is_a_failure_not_a_crash() -> None:
    outcome = from_result(object())
    assert isinstance(outcome, Failed)
    assert outcome.type == "UnserializableResult"


def test_a_result_over_the_limit_is_a_failure_that_shows_both_numbers() -> None:
    assert isinstance(from_result(b"x" * MAX_RESULT_BYTES), Completed)
    outcome = from_result(b"x" * (MAX_RESULT_BYTES + 1))
    assert isinstance(outcome, Failed)
    assert outcome.type == "ResultTooLarge"
    assert "65537" in outcome.message
    assert "65536" in outcome.message


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("bad"), Failed("ValueError", "bad")),
        (TwoArguments("a", "b"), Failed("TwoArguments", "a and b")),
        (SystemExit(3), Failed("SystemExit", "3")),
        (KeyboardInterrupt(), Failed("KeyboardInterrupt", "")),
        (GeneratorExit(), Failed("GeneratorExit", "")),
        (asyncio.CancelledError("mine"), Failed("CancelledError", "mine")),
        (Retry("later", delay=7.0), Failed("Retry", "later", delay=7.0)),
        (NoRetry("never", type="Poison"), Failed("Poison", "never", no_retry=True)),
        (Unprintable(), Failed("Unprintable", "(the message of Unprintable cannot be read)")),
    ],
)
def test_whatever_a_handler_raises_is_a_failure_of_its_class(error: BaseException, outcome: Failed) -> None:
    assert from_exception(error, None) == outcome


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), JobCancelled("x"), ValueError("while cleaning up")]
)
def test_timeout_cancel_and_shutdown_are_three_different_reasons(error: BaseException) -> None:
    timed_out = from_exception(error, StopReason.RUN_TIMEOUT)
    assert isinstance(timed_out, Failed)
    assert timed_out.type == "RunTimeout"
    assert from_exception(error, StopReason.CANCELLED) == Released("cancelled")
    assert from_exception(error, StopReason.SHUTDOWN) == Released("worker_shutdown")
    assert from_exception(error, StopReason.LOST) is None


def test_long_and_odd_texts_are_cut_at_a_characters_border() -> None:
    message = settlement_to("j", 1, Failed("T" * 200, "é" * 400 + "\ud800"))
    assert len(message.fail.failure.type) == 127
    assert message.fail.failure.message == "é" * 256


@pytest.mark.parametrize("delay", [-1.0, -1e-9, float("nan"), float("inf"), 1e12])
def test_a_delay_that_cannot_be_is_refused_where_it_is_raised(delay: float) -> None:
    """Fault case 057: it would be refused with the whole settlement, and the job stay held."""
    with pytest.raises(ValueError, match="delay: must be from 0 to 2592000 s"):
        Retry("later", delay=delay)


@pytest.mark.parametrize("delay", [0, 0.0001, 2_592_000])
def test_a_delay_within_its_bounds_is_told(delay: float) -> None:
    assert from_exception(Retry("later", delay=delay), None) == Failed("Retry", "later", delay=delay)
