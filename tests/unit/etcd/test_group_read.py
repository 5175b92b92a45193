"""Point reads of many callers: few Txns, every caller its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from coordinator.errors import EtcdUnavailable
from coordinator.etcd.group_read import GroupReadConfig, GroupReader
from leasekeeper.internal.etcd.v1.kv_pb2 import TxnRequest, TxnResponse
from tests.support.clock import SteppingClock


class FakeClient:
    """Answers each read when told to; a key's value is the key."""

    def __init__(self) -> None:
        self.requests: list[list[bytes]] = []
        self.gates: list[asyncio.Future[Exception | None]] = []

    async def read_txn(self, request: TxnRequest, *, timeout: float) -> TxnResponse:
        keys = [op.request_range.key for op in request.success]
        self.requests.append(keys)
        gate: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.gates.append(gate)
        error = await gate
        if error is not None:
            raise error
        response = TxnResponse()
        response.header.revision = 40 + len(self.requests)
        response.header.raft_term = 3
        for key in keys:
            found = response.responses.add().response_range
            found.SetInParent()
            if not key.startswith(b"absent"):
                found.kvs.add(key=key, value=key)
        return response


class Bench:
    def __init__(self, config: GroupReadConfig) -> None:
        self.client = FakeClient()
        self.clock = SteppingClock()
        self.reader = GroupReader(self.client, self.clock, config)  # type: ignore[arg-type]

    def ask(self, *keys: bytes, seconds: float = 60.0) -> asyncio.Task[list[bytes | None]]:
        async def get() -> list[bytes | None]:
            found = await self.reader.get(keys, deadline=self.clock.monotonic() + seconds)
            return [kv.value if kv is not None else None for kv in found.kvs]

        return asyncio.create_task(get())

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench(GroupReadConfig(max_keys=4, max_in_flight=2, slow=0.1))
    running = asyncio.create_task(made.reader.run())
    await made.settle()
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_what_is_asked_in_one_round_travels_together(bench: Bench) -> None:
    first, second = bench.ask(b"a", b"absent"), bench.ask(b"b")
    await bench.settle()
    assert bench.client.requests == [[b"a", b"absent", b"b"]]
    bench.client.gates[0].set_result(None)
    assert await first == [b"a", None]
    assert await second == [b"b"]


async def test_what_is_asked_meanwhile_goes_next(bench: Bench) -> None:
    first = bench.ask(b"a")
    await bench.settle()
    later = [bench.ask(b"b"), bench.ask(b"c")]
    await bench.settle()
    assert len(bench.client.requests) == 1
    bench.client.gates[0].set_result(None)
    await bench.settle()
    assert bench.client.requests[1:] == [[b"b", b"c"]]
    bench.client.gates[1].set_result(None)
    await asyncio.gather(first, *later)


async def test_a_full_read_does_not_wait_and_none_is_overfull(bench: Bench) -> None:
    asked = [bench.ask(b"a")]
    await bench.settle()
    asked += [bench.ask(b"b", b"c", b"d"), bench.ask(b"e", b"f")]
    await bench.settle()
    assert bench.client.requests == [[b"a"], [b"b", b"c", b"d"]]
    for number in range(3):
        await bench.settle()
        bench.client.gates[number].set_result(None)
    await asyncio.gather(*asked)
    assert bench.client.requests[2:] == [[b"e", b"f"]]


async def test_a_slow_read_holds_up_no_other(bench: Bench) -> None:
    first = bench.ask(b"a")
    await bench.settle()
    await bench.clock.advance(0.2)
    second = bench.ask(b"b")
    await bench.settle()
    bench.client.gates[1].set_result(None)
    assert await second == [b"b"]
    bench.client.gates[0].set_result(None)
    assert await first == [b"a"]


async def test_an_error_is_told_to_everybody_in_it(bench: Bench) -> None:
    asked = [bench.ask(b"a"), bench.ask(b"b")]
    await bench.settle()
    bench.client.gates[0].set_result(EtcdUnavailable("gone"))
    errors = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(error) for error in errors] == ["gone", "gone"]
    assert errors[0] is not errors[1]
    again = bench.ask(b"a")
    await bench.settle()
    bench.client.gates[1].set_result(None)
    assert await again == [b"a"]


async def test_a_caller_does_not_wait_past_its_deadline(bench: Bench) -> None:
    with pytest.raises(EtcdUnavailable):
        await bench.ask(b"a", seconds=0.0)
    with pytest.raises(EtcdUnavailable):
        await bench.ask(b"a", seconds=0.02)


async def test_more_keys_than_fit_are_a_mistake(bench: Bench) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        await bench.ask(*[b"k"] * 5)


async def test_nobody_waits_for_a_reader_that_has_ended() -> None:
    bench = Bench(GroupReadConfig())
    running = asyncio.create_task(bench.reader.run())
    await bench.settle()
    waiting = bench.ask(b"a")
    behind = bench.ask(b"b")
    await bench.settle()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    for asked in (waiting, behind, bench.ask(b"c")):
        with pytest.raises(EtcdUnavailable):
            await asked
