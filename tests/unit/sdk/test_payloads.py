"""Typed payloads: what an annotation takes and refuses, and what a result becomes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Literal

import pydantic
import pytest

from tests.support.fake_worker_server import FakeCoordinator
from tests.support.polling import eventually
from tests.unit.sdk.conftest import Working, make
from worker_sdk import ConfigError, Context, SyncContext
from worker_sdk._outcome import from_result
from worker_sdk._payloads import BadPayload, json_bytes, payload_reader, reader_of
from worker_sdk._work import Completed, Failed


class Colour(Enum):
    RED = "red"
    TWO = 2


@dataclass
class Item:
    name: str
    price: float
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    id: int
    items: list[Item]
    colour: Colour = Colour.RED
    parent: Order | None = None
    when: datetime | None = None
    kind: Literal["a", 1] = "a"

    def __post_init__(self) -> None:
        if self.id < 0:
            raise ValueError("id must not be negative")


class Model(pydantic.BaseModel):
    n: int
    item: Item | None = None


@dataclass
class Holder:
    model: Model


def read(annotation: object, text: str | bytes) -> object:
    return reader_of(annotation)(text.encode() if isinstance(text, str) else text)


@pytest.mark.parametrize(
    ("annotation", "payload", "value"),
    [
        (bytes, b"\x00\xff", b"\x00\xff"),
        (str, "grün".encode(), "grün"),
        (int, "3", 3),
        (float, "3", 3.0),
        (bool, "true", True),
        (dict, '{"a": [1]}', {"a": [1]}),
        (list, "[1, null]", [1, None]),
        (Any, "null", None),
        (int | None, "null", None),
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (tuple[int, str], '[1, "a"]', (1, "a")),
        (tuple[int, ...], "[1, 2]", (1, 2)),
        (set[int], "[1, 1]", {1}),
        (list[Item], '[{"name": "x", "price": 1}]', [Item("x", 1.0)]),
        (Colour, "2", Colour.TWO),
        (datetime, '"2026-01-02T03:04:05Z"', datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        (Model, '{"n": 1, "item": {"name": "x", "price": 2}}', Model(n=1, item=Item("x", 2.0))),
        (list[Model], '[{"n": 1}]', [Model(n=1)]),
        (Holder, '{"model": {"n": 1}}', Holder(Model(n=1))),
        (
            Order,
            '{"id": 1, "items": [], "parent": {"id": 0, "items": [{"name": "y", "price": 2.5}]}, "new": 1}',
            Order(id=1, items=[], parent=Order(id=0, items=[Item("y", 2.5)])),
        ),
    ],
)
def test_a_payload_of_the_annotated_shape_is_read(annotation: object, payload: str, value: object) -> None:
    found = read(annotation, payload)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("annotation", "payload", "message"),
    [
        (str, b"\xff", "payload: no UTF-8 at byte 0"),
        (int, "3.5", "payload: must be int, is a number"),
        (int, "true", "payload: must be int, is a bool"),
        (float, '"3"', "payload: must be float, is a text"),
        (float, "1" + "0" * 400, "payload: too large for a float"),
        (float, "NaN", "payload: no JSON: NaN is no JSON"),
        (dict, "", "payload: no JSON"),
        (dict, b"\xff{}", "payload: no JSON"),
        (dict, "[]", "payload: must be an object, is a list"),
        (list, "[" * 100_000, "payload: nested too deeply"),
        (dict[str, int], '{"a": "b"}', "payload.a: must be int, is a text"),
        (tuple[int, str], "[1]", "payload: must be a list of 2, is a list"),
        (set[Any], "[[]]", "payload: unhashable"),
        (Colour, '"blue"', "payload: must be a Colour, is a text"),
        (int | None, '"x"', "payload: must be int, is a text or payload: must be null"),
        (datetime, '"tomorrow"', "payload: must be a date and time in ISO 8601"),
        (Order, '{"id": 1}', "payload: lacks items"),
        (Order, '{"id": 1, "items": [{"name": "x", "price": []}]}', "payload.items[0].price: must be float"),
        (Order, '{"id": -1, "items": []}', "payload: ValueError: id must not be negative"),
        (Order, '{"id": 1, "items": [], "kind": true}', "payload.kind: must be one of 'a', 1, is a bool"),
        (Model, '{"n": "secret-x"}', "n: Input should be a valid integer"),
        (list[Model], "[{}]", "payload[0]: n: Field required"),
    ],
)
def test_a_payload_of_another_shape_is_refused_with_its_place(
    annotation: object, payload: str, message: str
) -> None:
    with pytest.raises(BadPayload) as refused:
        read(annotation, payload)
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("annotation", [complex, dict[int, str], list[complex], type, "Absent"])
def test_an_annotation_without_a_rule_is_refused_at_registration(annotation: object) -> None:
    def handle(ctx: Context, payload: Any) -> None: ...

    handle.__annotations__["payload"] = annotation
    with pytest.raises(ConfigError, match="handle"):
        payload_reader(handle, "handle")


def test_a_handler_of_another_shape_is_refused_at_registration(server: FakeCoordinator) -> None:
    worker = make(server)

    def untyped(ctx, payload): ...  # type: ignore[no-untyped-def]

    def three(ctx: Context, a: int, b: int) -> None: ...

    def named(ctx: Context, *, a: int) -> None: ...

    for function, message in ((untyped, "what type"), (three, "ctx, payload"), (named, "ctx, payload")):
        with pytest.raises(ConfigError, match=message):
            worker.handler("t")(function)  # type: ignore[type-var]
    worker.handler("t")(lambda ctx, retries=3: None)


def test_results_become_json_with_the_same_types() -> None:
    order = Order(id=1, items=[Item("x", 1.0)], when=datetime(2026, 1, 2, tzinfo=UTC))
    outcome = from_result(order)
    assert isinstance(outcome, Completed)
    assert outcome.content_type == "application/json"
    assert read(Order, outcome.result) == order
    assert json.loads(json_bytes({"m": Model(n=1), "c": Colour.TWO, "s": {1}})) == {
        "m": {"n": 1, "item": None},
        "c": 2,
        "s": [1],
    }
    assert isinstance(from_result(object()), Failed)


def test_models_of_msgspec_are_judged_by_msgspec() -> None:
    msgspec = pytest.importorskip("msgspec")
    struct = msgspec.defstruct("Mail", [("to", str), ("size", int)])
    assert read(struct, '{"to": "a", "size": 1}') == struct("a", 1)
    assert read(list[struct], '[{"to": "a", "size": 1}]') == [struct("a", 1)]
    with pytest.raises(BadPayload, match=r"Expected `int`"):
        read(struct, '{"to": "a", "size": "x"}')
    assert json_bytes(struct("a", 1)) == b'{"to": "a", "size": 1}'


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_bad_payload_makes_the_job_dead_before_its_handler_begins(
    server: FakeCoordinator, working: Working, kind: str
) -> None:
    worker = make(server)
    seen: list[object] = []

    async def on_loop(ctx: Context, item: Item) -> Item:
        seen.append(item)
        return item

    def in_thread(ctx: SyncContext, item: Item) -> Item:
        seen.append(item)
        return item

    worker.handler("t")(on_loop if kind == "async" else in_thread)
    server.add("good", payload=b'{"name": "x", "price": 2}')
    server.add("bad", payload=b'{"name": 1, "price": 2}')
    async with working(worker):
        await eventually(lambda: worker.stats.failed == 1 and worker.stats.completed == 1)
        await eventually(lambda: server.how("bad") == ["fail"] and server.how("good") == ["complete"])
    assert seen == [Item("x", 2.0)]
    fail = server.jobs["bad"].settlements[0].fail
    assert (fail.no_retry, fail.failure.type) == (True, "BadPayload")
    assert fail.failure.message == "payload.name: must be str, is a number"
    assert json.loads(server.jobs["good"].settlements[0].complete.result) == {
        "name": "x",
        "price": 2.0,
        "tags": [],
    }
