"""The shell lines that `leasekeeper dev` prints: a whole worker's life with grpcurl, ready to paste."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["grpcurl_path_line", "tour_lines"]

_BUILT = Path(__file__).resolve().parents[2] / "tools" / "bin" / "grpcurl"

# The JSON that grpcurl prints has one space after a colon, or two.
_FIELD = r"""sed -n 's/.*"{name}": *"\([^"]*\)".*/\1/p'"""


def grpcurl_path_line(built: Path = _BUILT) -> list[str]:
    """The line that puts grpcurl on the PATH; none if it is there, or if there is no grpcurl that we know of.

    Args:
        built: where `make tools` puts it.
    """
    if shutil.which("grpcurl") is not None or not os.access(built, os.X_OK):
        return []
    return [f"PATH='{built.parent}':$PATH"]


def tour_lines(endpoint: str) -> list[str]:
    """Lines for a POSIX shell that submit a job and run it by hand; each may be pasted alone, in order.

    Args:
        endpoint: ``host:port`` of the coordinator.
    """

    def call(service: str, method: str, request: str) -> str:
        return f"grpcurl -plaintext -d {request} {endpoint} leasekeeper.v1.{service}/{method}"

    def captured(variable: str, field: str, line: str) -> str:
        return f"{variable}=$({line} | {_FIELD.format(name=field)}); echo {variable}=${variable}"

    now = "'$(date +%s%N)'"
    submit = call(
        "JobService",
        "SubmitJob",
        f"""'{{"request_id": "submit-{now}", """
        """"job": {"queue": "tour", "type": "greet", "payload": "aGVsbG8="}}'""",
    )
    session = call(
        "WorkerService",
        "OpenSession",
        f"""'{{"request_id": "open-{now}", "identity": "by hand", "ttl": "120s"}}'""",
    )
    claim = call(
        "WorkerService",
        "ClaimJob",
        f"""'{{"request_id": "claim-{now}", """
        """"session_id": "'$SESSION'", "job_id": "'$JOB'", "wait": "5s"}'""",
    )
    beat = call(
        "WorkerService",
        "Heartbeat",
        """'{"session_id": "'$SESSION'", "number": 1, "sent_at": "1s",""" + " "
        """"claims": [{"job_id": "'$JOB'", "fencing_token": "'$TOKEN'", "sequence": 1}]}'""",
    )
    complete = call(
        "WorkerService",
        "CompleteJob",
        """'{"job_id": "'$JOB'", "fencing_token": "'$TOKEN'", "result": "aGVsbG8gYmFjaw=="}'""",
    )
    return [
        captured("JOB", "job_id", submit),
        captured("SESSION", "session_id", session),
        captured("TOKEN", "fencing_token", claim),
        beat,
        complete,
        call("JobService", "GetJob", """'{"job_id": "'$JOB'"}'"""),
    ]
