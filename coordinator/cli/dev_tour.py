"""The shell lines that `leasekeeper dev` prints: a whole worker's life with grpcurl, ready to paste."""

from __future__ import annotations

__all__ = ["tour_lines"]

_FIELD = r"""sed -n 's/.*"{name}": "\(.*\)".*/\1/p'"""


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
        f"""'{{"requestId": "submit-{now}", """
        """"job": {"queue": "tour", "type": "greet", "payload": "aGVsbG8="}}'""",
    )
    session = call(
        "WorkerService",
        "OpenSession",
        f"""'{{"requestId": "open-{now}", "identity": "by hand", "ttl": "120s"}}'""",
    )
    claim = call(
        "WorkerService",
        "ClaimJob",
        f"""'{{"requestId": "claim-{now}", "sessionId": "'$SESSION'", "jobId": "'$JOB'", "wait": "5s"}}'""",
    )
    beat = call(
        "WorkerService",
        "Heartbeat",
        """'{"sessionId": "'$SESSION'", "number": 1, "sentAt": "1s",""" + " "
        """"claims": [{"jobId": "'$JOB'", "fencingToken": "'$TOKEN'", "sequence": 1}]}'""",
    )
    complete = call(
        "WorkerService",
        "CompleteJob",
        """'{"jobId": "'$JOB'", "fencingToken": "'$TOKEN'", "result": "aGVsbG8gYmFjaw=="}'""",
    )
    return [
        captured("JOB", "jobId", submit),
        captured("SESSION", "sessionId", session),
        captured("TOKEN", "fencingToken", claim),
        beat,
        complete,
        call("JobService", "GetJob", """'{"jobId": "'$JOB'"}'"""),
    ]
