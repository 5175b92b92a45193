"""Typed payloads against msgspec, which reads the same annotations by rules of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_sdk import _payloads
from worker_sdk._payloads import BadPayload, json_bytes, reader_of


class Size(Enum):
    SMALL = "a"
    LARGE = "b"


@dataclass
class Leaf:
    a: int
    b: str = "none"


@dataclass(kw_only=True)
class Tree:
    leaf: Leaf
    trees: list[Tree] = field(default_factory=list)
    b: float | None = None
    a: dict[str, int] = field(default_factory=dict)


ANNOTATIONS: list[Any] = [
    int,
    float,
    bool,
    str | None,
    int | str,
    float | bool | None,
    list[int],
    dict[str, bool],
    tuple[int, str],
    tuple[str, ...],
    set[int],
    list[list[float]],
    Literal["a", 2],
    Size,
    Leaf,
    Tree,
    list[Leaf | None],
    dict[str, Tree],
]
# Few keys and few texts, so that many values fit; no whole numbers as floats, which msgspec takes for ints.
KEYS = st.sampled_from(["a", "b", "leaf", "trees"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers(-(2**63), 2**63 - 1)
    | st.sampled_from([0.5, -1.25, 1e300])
    | st.sampled_from(["a", "b", "", "2"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
LEAVES = st.fixed_dictionaries({"a": st.integers(-3, 3)}, optional={"b": st.text(max_size=3) | SCALARS})
TREES = st.recursive(
    st.fixed_dictionaries({"leaf": LEAVES}, optional={"a": st.dictionaries(KEYS, SCALARS, max_size=2)}),
    lambda inner: st.fixed_dictionaries(
        {"leaf": LEAVES, "trees": st.lists(inner, max_size=2)}, optional={"b": SCALARS}
    ),
    max_leaves=4,
)

REFUSED = object()


def compare(annotation: Any, value: object) -> None:
    """Both read it and agree, or both refuse it."""
    text = json.dumps(value).encode()
    try:
        wanted = msgspec.json.decode(text, type=annotation)
    except msgspec.ValidationError:
        wanted = REFUSED
    try:
        found = reader_of(annotation)(text)
    except BadPayload:
        found = REFUSED
    assert found == wanted
    assert type(found) is type(wanted)
    if found is not REFUSED:
        assert reader_of(annotation)(json_bytes(found)) == found


@settings(max_examples=300, deadline=None)
@given(annotation=st.sampled_from(ANNOTATIONS), value=VALUES | LEAVES | TREES | st.lists(LEAVES, max_size=2))
def test_payloads_are_read_and_refused_as_msgspec_does(annotation: Any, value: object) -> None:
    compare(annotation, value)


@settings(max_examples=200, deadline=None)
@given(payload=st.binary(max_size=30) | st.text(max_size=30).map(str.encode))
def test_any_bytes_at_all_are_read_or_refused_and_nothing_else(payload: bytes) -> None:
    for annotation in (str, Any, Tree, set[Any]):
        try:
            reader_of(annotation)(payload)
        except BadPayload:
            pass


def find_a_difference() -> None:
    @settings(max_examples=600, deadline=None, database=None, derandomize=True, report_multiple_bugs=False)
    @given(annotation=st.sampled_from(ANNOTATIONS), value=VALUES | LEAVES | TREES)
    def search(annotation: Any, value: object) -> None:
        compare(annotation, value)

    search()


def _bool_is_int(types: tuple[type, ...], name: str, value: object, path: str) -> object:
    if not isinstance(value, types):
        raise BadPayload(path)
    return float(value) if name == "float" else value  # type: ignore[arg-type]


def _any_length(checks: Any, value: object, path: str) -> object:
    if not isinstance(value, list):
        raise BadPayload(path)
    return tuple(check(item, path) for check, item in zip(checks, value, strict=False))


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("_scalar", _bool_is_int),
        ("_tuple", _any_length),
        ("_literal", lambda choices, value, path: value),
        ("_union", lambda checks, value, path: checks[0](value, path)),
    ],
)
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, name: str, bug: object) -> None:
    monkeypatch.setattr(_payloads, name, bug)
    with pytest.raises(AssertionError):
        find_a_difference()
