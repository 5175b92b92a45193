"""Every storage error has one answer, and none turns the unknown into a failure."""

from __future__ import annotations

import pytest

from coordinator import errors
from coordinator.errors import LeasekeeperError, OutcomeUnknown, Reason, RequestError, StorageError
from coordinator.services.storage_errors import refused


def kinds(base: type[LeasekeeperError]) -> list[type[LeasekeeperError]]:
    return [base, *(kind for child in base.__subclasses__() for kind in kinds(child))]


@pytest.mark.parametrize("kind", [*kinds(StorageError), errors.CodecError], ids=lambda kind: kind.__name__)
def test_every_storage_error_is_told_with_its_name_and_cause(kind: type[LeasekeeperError]) -> None:
    error = kind("planned")
    told = refused(error, {"job_id": "j1"})
    assert told.metadata["job_id"] == "j1"
    assert told.metadata["storage"] == kind.__name__
    assert told.__cause__ is error
    assert (told.reason is Reason.OUTCOME_UNKNOWN) is isinstance(error, OutcomeUnknown)


def test_only_the_base_itself_has_no_answer_of_its_own() -> None:
    internal = {kind.__name__ for kind in kinds(StorageError) if refused(kind("")).reason is Reason.INTERNAL}
    assert internal == {"StorageError", "InvalidRequest", "DuplicateKey"}


def test_a_refusal_stays_as_it_is() -> None:
    error = RequestError(Reason.EPOCH_REGRESSED, "as it is")
    assert refused(error) is error
