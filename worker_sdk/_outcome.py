"""From what a handler returned or raised to how its attempt ends. Pure.

====================================  ====================================================================
handler                               attempt
====================================  ====================================================================
returns None, bytes, str, `Result`    succeeded; also after it was told to stop: etcd judges by the token
returns anything else                 succeeded with its JSON; failed (``UnserializableResult``) if it has
                                      none, or (``ResultTooLarge``) over 64 KiB: the work is done and would
                                      only be done again, so both make the job DEAD
raises `Retry`                        failed, charged; next attempt after the given delay
raises `NoRetry`                      failed; the job is DEAD
raises any other Exception            failed, type = the exception's class
raises SystemExit, CancelledError,    failed likewise: a handler ends neither its worker nor the process, and
KeyboardInterrupt, GeneratorExit      a CancelledError of its own making is no shutdown
raises anything after it was told to  cancelled: released, so that the coordinator makes it CANCELLED ·
stop                                  run timeout: failed, ``RunTimeout`` · shutdown: released uncharged ·
                                      lost: nothing; released if only the local deadline has passed
====================================  ====================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from worker_sdk._follow_ups import FollowUps
from worker_sdk._payloads import json_bytes
from worker_sdk._work import Completed, Failed, Outcome, Released, StopReason
from worker_sdk.errors import NoRetry, Retry

__all__ = ["MAX_RESULT_BYTES", "Result", "from_exception", "from_result", "with_follow_ups"]

MAX_RESULT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Result:
    """A handler's result with its media type; at most 64 KiB."""

    data: bytes
    content_type: str = "application/octet-stream"


def from_result(value: object) -> Outcome:
    """Return how an attempt ends whose handler returned *value*."""
    completed: Completed
    if value is None:
        return _DONE
    if isinstance(value, Result):
        completed = Completed(bytes(value.data), value.content_type)
    elif isinstance(value, bytes | bytearray | memoryview):
        completed = Completed(bytes(value), "application/octet-stream")
    elif isinstance(value, str):
        completed = Completed(value.encode("utf-8", "replace"), "text/plain; charset=utf-8")
    else:
        try:
            completed = Completed(json_bytes(value), "application/json")
        except Exception as error:  # noqa: BLE001  a model's own code may raise anything
            return Failed("UnserializableResult", f"{type(value).__name__}: {error}", no_retry=True)
    if len(completed.result) > MAX_RESULT_BYTES:
        return Failed(
            "ResultTooLarge",
            f"the result has {len(completed.result)} bytes, at most {MAX_RESULT_BYTES} are stored",
            no_retry=True,
        )
    return completed


_DONE = Completed()


def with_follow_ups(outcome: Outcome, follow_ups: FollowUps) -> Outcome:
    """Return *outcome* with the jobs that were asked for; one that is no success submits none."""
    jobs = follow_ups.encoded
    if not jobs or not isinstance(outcome, Completed):
        return outcome
    return Completed(outcome.result, outcome.content_type, jobs)


def from_exception(error: BaseException, stop: StopReason | None) -> Outcome | None:
    """Return how an attempt ends whose handler raised *error*, after it was told to *stop* for that reason.

    None: the claim is lost, there is nothing to report.
    """
    if stop is StopReason.LOST:
        return None
    if stop is StopReason.SHUTDOWN:
        return Released(StopReason.SHUTDOWN.value)
    if stop is StopReason.CANCELLED:
        return Released("cancelled")
    if stop is StopReason.RUN_TIMEOUT:
        return Failed("RunTimeout", f"stopped at its run timeout ({type(error).__name__})")
    if isinstance(error, Retry):
        return Failed(error.type, _text(error), delay=error.delay)
    if isinstance(error, NoRetry):
        return Failed(error.type, _text(error), no_retry=True)
    return Failed(type(error).__name__, _text(error))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  an exception's own __str__ may raise anything
        return f"(the message of {type(error).__name__} cannot be read)"
