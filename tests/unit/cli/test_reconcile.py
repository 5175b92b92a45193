"""`leasekeeper reconcile`: what it asks for, what it prints, and its exit code."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from coordinator.cli.commands import commands_entry
from coordinator.errors import FieldViolation, Reason, RequestError
from coordinator.rpc.status import CODES, DETAILS_KEY, to_status
from leasekeeper.v1 import admin_service_pb2 as pb
from leasekeeper.v1 import admin_service_pb2_grpc, types_pb2


class Admin(admin_service_pb2_grpc.AdminServiceServicer):
    """Answers what the test says, and notes what it is asked."""

    def __init__(self) -> None:
        self.answer = pb.RunReconcileResponse()
        self.error: RequestError | None = None
        self.asked: list[pb.RunReconcileRequest] = []
        self.headers: list[dict[str, str]] = []

    def RunReconcile(self, request: pb.RunReconcileRequest, context: Any) -> pb.RunReconcileResponse:  # noqa: N802
        self.asked.append(request)
        self.headers.append(dict(context.invocation_metadata()))
        if self.error is not None:
            details = to_status(self.error).SerializeToString()
            context.set_trailing_metadata(((DETAILS_KEY, details),))
            context.abort(CODES[self.error.reason], self.error.message)
        return self.answer


class Bench:
    """A coordinator, and the command."""

    def __init__(self, admin: Admin, address: str) -> None:
        self.admin = admin
        self.address = address

    def run(self, *arguments: str, address: str = "") -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        given = ["reconcile", "--address", address or self.address, *arguments]
        result = CliRunner().invoke(commands_entry, given, env={"COLUMNS": "200"})
        return result.exit_code, result.stdout, result.stderr


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LEASEKEEPER_"):
            monkeypatch.delenv(name)


@pytest.fixture
def bench() -> Iterator[Bench]:
    admin = Admin()
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield Bench(admin, f"127.0.0.1:{port}")
        server.stop(None).wait()


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address that refuses every connection, and that nobody else can take meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def report(name: str = "lost", *, recovered: int = 0, listed: int = 0, **more: Any) -> pb.PassReport:
    action = pb.ReconcileAction(
        kind="recovered",
        job_id="[red]j/1",
        state_before=types_pb2.JOB_STATE_RUNNING,
        state_after=types_pb2.JOB_STATE_PENDING,
        reason="its holder died",
    )
    counts = {"recovered": recovered} if recovered else {}
    made = pb.PassReport(examined=9, counts=counts, actions=[action] * listed, **{"pass": name}, **more)
    made.duration.FromMilliseconds(1_250)
    return made


def test_it_asks_for_what_the_command_line_says(bench: Bench) -> None:
    assert 0 == bench.run()[0]
    assert 0 == bench.run("-n", "mail", "--dry-run", "--pass", "lost", "--pass", "due", "--actions", "7")[0]

    assert [
        pb.RunReconcileRequest(namespace="default", max_actions=100),
        pb.RunReconcileRequest(namespace="mail", dry_run=True, passes=["lost", "due"], max_actions=7),
    ] == bench.admin.asked
    assert "authorization" not in bench.admin.headers[0]


@pytest.mark.parametrize(
    ("code", "arguments", "reports"),
    [
        (0, (), [report()]),
        (0, (), [report(recovered=5)]),
        (0, ("--dry-run",), [report()]),
        (3, ("--dry-run",), [report(), report("due", recovered=1)]),
        (1, (), [report(recovered=5), report("due", error="no member answers")]),
        (1, (), [report(recovered=5, failed=1)]),
        (1, ("--dry-run",), [report(recovered=5), report("due", error="no member answers")]),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_the_exit_code_says_whether_all_is_well(
    bench: Bench, code: int, arguments: tuple[str, ...], reports: list[pb.PassReport], form: tuple[str, ...]
) -> None:
    bench.admin.answer.passes.extend(reports)

    assert code == bench.run(*arguments, *form)[0]


def test_json_is_one_object_with_everything(bench: Bench) -> None:
    bench.admin.answer.passes.append(report(recovered=1, listed=1, failed=2, waiting=4, error="é"))

    _, out, _ = bench.run("--json")

    assert {
        "namespace": "default",
        "dry_run": False,
        "passes": [
            {
                "pass": "lost",
                "examined": 9,
                "counts": {"recovered": 1},
                "failed": 2,
                "waiting": 4,
                "seconds": 1.25,
                "error": "é",
                "actions": [
                    {
                        "kind": "recovered",
                        "job_id": "[red]j/1",
                        "state_before": "RUNNING",
                        "state_after": "PENDING",
                        "reason": "its holder died",
                    }
                ],
            }
        ],
    } == json.loads(out)
    assert 1 == out.count("\n")


def test_the_table_shows_passes_and_repairs_and_takes_no_text_for_markup(bench: Bench) -> None:
    bench.admin.answer.passes.extend([report(recovered=3, listed=2), report("due", error="[b]no member")])

    _, out, _ = bench.run("--dry-run")

    assert "would be done" in out
    assert "recovered 3" in out
    assert "due: [b]no member" in out
    assert 2 == out.count("[red]j/1")
    assert "RUNNING -> PENDING" in out
    assert "and 1 more" in out


def test_a_state_that_a_newer_coordinator_knows_is_shown_by_its_number(bench: Bench) -> None:
    told = report(recovered=1, listed=1)
    told.actions[0].state_after = 99  # type: ignore[assignment]
    bench.admin.answer.passes.append(told)

    assert "RUNNING -> 99" in bench.run()[1]


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.VALIDATION_FAILED, 2),
        (Reason.TOO_MANY_REQUESTS, 1),
        (Reason.PERMISSION_DENIED, 1),
        (Reason.NOT_READY, 1),
    ],
)
def test_a_refusal_says_its_reason_on_standard_error(bench: Bench, reason: Reason, code: int) -> None:
    field = FieldViolation("passes[0]", "there is no such pass")
    bench.admin.error = RequestError(reason, "passes[0]: there is no such pass", fields=(field,))

    ended, out, err = bench.run()

    assert (code, "") == (ended, out)
    assert f"leasekeeper reconcile: {reason.value}: passes[0]: there is no such pass" in err
    assert 1 == len(bench.admin.asked)


def test_a_coordinator_that_cannot_be_reached_is_passed_over_for_the_next(bench: Bench, nowhere: str) -> None:
    code, _, err = bench.run(address=f"{nowhere},{bench.address}")

    assert (0, "") == (code, err)


def test_nobody_there_is_told_with_the_address(bench: Bench, nowhere: str) -> None:
    code, out, err = bench.run(address=nowhere)

    assert (1, "") == (code, out)
    assert f"UNAVAILABLE: {nowhere}" in err


def test_the_token_comes_from_a_file_or_a_variable(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text("from-file\n")
    monkeypatch.setenv("LEASEKEEPER_TOKEN", "from-environment")

    assert [0, 0] == [bench.run()[0], bench.run("--token-file", str(path))[0]]
    assert ["Bearer from-environment", "Bearer from-file"] == [
        headers["authorization"] for headers in bench.admin.headers
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--address", "nowhere"), "host:port"),
        (("--address", "10.0.0.1:7420", "--token-file", "TOKEN"), "travels in the clear"),
        (("--token-file", "EMPTY"), "holds no token"),
        (("--token-file", "ABSENT"), "cannot be read"),
        (("--tls-ca", "ABSENT"), "cannot be read"),
        (("--tls-cert", "TOKEN"), "give both or neither"),
        (("--actions", "1001"), "--actions"),
    ],
)
def test_a_wrong_command_line_asks_nobody(
    tmp_path: Path, arguments: tuple[str, ...], says: str, bench: Bench
) -> None:
    (tmp_path / "TOKEN").write_text("secret")
    (tmp_path / "EMPTY").write_text("\n")
    given = [str(tmp_path / word) if word.isupper() else word for word in arguments]
    address = [] if "--address" in given else ["--address", bench.address]

    result = CliRunner().invoke(commands_entry, ["reconcile", *address, *given])

    assert 2 == result.exit_code
    assert says in result.stderr
    assert "secret" not in result.output
    assert [] == bench.admin.asked


def test_the_document_names_the_flags_and_exit_codes_that_there_are() -> None:
    """Of docs/reconciler.md, the section on runs by hand."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "reconciler.md").read_text()
    by_hand = text.partition("## Run it by hand")[2].partition("\n## ")[0]
    help_text = CliRunner().invoke(commands_entry, ["reconcile", "--help"], env={"COLUMNS": "200"}).output
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", by_hand))

    assert {"--dry-run", "--pass", "--json", "--token-file"} <= named
    assert [] == sorted(flag for flag in named if flag not in help_text)
    assert ["0", "1", "2", "3"] == re.findall(r"^\| (\d) \|", by_hand, re.MULTILINE)
