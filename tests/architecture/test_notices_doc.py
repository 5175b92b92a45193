"""docs/notices.md: its kinds and metrics are those that exist, and its example checks real signatures."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, cast

import pytest

from coordinator.app.readings import (
    _COMMITTED,
    _TXNS,
    lock_readings,
    notice_readings,
    queue_readings,
    service_readings,
    store_readings,
    stream_readings,
)
from coordinator.core.notice import NoticeKind
from coordinator.etcd.commit_config import CommitterStats
from coordinator.observability.metrics import Metrics
from coordinator.observability.webhook import signature
from tests.architecture.source_tree import ROOT

PAGE = (ROOT / "docs" / "notices.md").read_text()


@pytest.fixture(scope="module")
def is_genuine() -> Callable[..., bool]:
    """The function of the example, as it stands on the page."""
    found = re.search(r"<!-- signature -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    exec(found[1], names)
    return cast("Callable[..., bool]", names["is_genuine"])


def test_every_kind_has_its_row() -> None:
    assert re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.MULTILINE) == [kind.name for kind in NoticeKind]


def test_the_metrics_on_the_page_are_those_that_are_served() -> None:
    metrics, nothing = Metrics(), cast("Any", object())
    metrics.expose(
        [
            *store_readings(cast("Any", type("Store", (), {"gauge": nothing})())),
            *notice_readings(nothing, nothing),
            *service_readings(nothing, nothing, nothing, nothing),
            *lock_readings(nothing, nothing, nothing),
            *queue_readings(nothing, nothing),
            *stream_readings(nothing),
        ]
    )
    described = {
        family.name + ("_total" if family.type == "counter" else "")
        for collector in metrics.registry._collector_to_names
        for family in collector.describe()
    }

    assert set(re.findall(r"`(leasekeeper_\w+)(?:\{[\w,]+\})?`", PAGE)) == described


def test_every_count_of_the_committer_is_served() -> None:
    counts = {field.name for field in fields(CommitterStats)} - {"group_sizes"}

    assert set(_COMMITTED) | set(_TXNS) == counts


def test_the_example_takes_a_genuine_signature_and_no_other(is_genuine: Callable[..., bool]) -> None:
    body, secret = b'{"notices":[],"dropped":0}', "s3cret-s3cret-s3cret"
    header = signature(secret, 1_700_000_000, body)

    assert is_genuine(secret, header, body, now=1_700_000_010.5)
    assert not is_genuine(secret, header, body + b" ", now=1_700_000_010)
    assert not is_genuine("another", header, body, now=1_700_000_010)
    assert not is_genuine(secret, header.replace("t=17", "t=18"), body, now=1_800_000_000)
    assert not is_genuine(secret, header, body, now=1_700_001_000)
    assert not is_genuine(secret, "", body, now=1_700_000_010)
