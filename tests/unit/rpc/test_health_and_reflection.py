"""Health per service and live; reflection under both names; every method of the contract is served."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from coordinator.errors import ConfigError
from coordinator.rpc.auth import Scope, TokenTable
from coordinator.rpc.methods import METHODS, SERVICES
from coordinator.rpc.reflection import REFLECTION_SERVICES
from tests.unit.rpc.fakes import served

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
JOBS = "leasekeeper.v1.JobService"


async def status(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=2)
    return int(answer.status)


async def test_the_process_is_alive_before_its_services_are_ready() -> None:
    async with served() as s:
        assert (SERVING, NOT_SERVING) == (await status(s.channel, ""), await status(s.channel, JOBS))
        s.health.set_ready(True)
        assert {SERVING} == {await status(s.channel, service) for service in SERVICES}
        s.health.set_ready(False)
        assert (SERVING, NOT_SERVING) == (await status(s.channel, ""), await status(s.channel, JOBS))


async def test_drain_is_not_serving_for_ever() -> None:
    async with served() as s:
        s.health.set_ready(True)
        s.health.drain()
        s.health.set_ready(False)
        s.health.set_ready(True)
        assert {NOT_SERVING} == {await status(s.channel, service) for service in ("", *SERVICES)}


async def test_an_unknown_service_is_not_found() -> None:
    async with served() as s:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status(s.channel, "nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_of_health_sees_each_change_and_the_end_at_drain() -> None:
    async with served() as s:
        stub = health_pb2_grpc.HealthStub(s.channel)
        known = stub.Watch(health_pb2.HealthCheckRequest(service=JOBS), timeout=5)
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"), timeout=5)
        seen = [(await known.read()).status, (await unknown.read()).status]
        s.health.set_ready(True)
        seen.append((await known.read()).status)
        s.health.drain()
        seen.append((await known.read()).status)

        assert [NOT_SERVING, SERVICE_UNKNOWN, SERVING, NOT_SERVING] == seen
        assert [grpc.aio.EOF, grpc.aio.EOF] == [await known.read(), await unknown.read()]


@pytest.mark.parametrize("name", REFLECTION_SERVICES)
async def test_reflection_lists_every_service(name: str) -> None:
    async with served() as s:
        call = s.channel.stream_stream(
            f"/{name}/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )(timeout=2)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = await call.read()
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=JOBS))
        described = await call.read()
        await call.done_writing()

        services = {service.name for service in listed.list_services_response.service}
        assert {*SERVICES, "grpc.health.v1.Health", *REFLECTION_SERVICES} == services
        assert described.file_descriptor_response.file_descriptor_proto


async def test_reflection_asks_for_a_token_where_access_is_controlled() -> None:
    async with served(tokens=TokenTable({})) as s:
        call = s.channel.stream_stream(f"/{REFLECTION_SERVICES[0]}/ServerReflectionInfo")(timeout=2)
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_every_method_of_the_contract_is_served() -> None:
    async with served() as s:
        methods = {
            method.name: service.full_name for service in SERVICES.values() for method in service.methods
        }
        assert set(methods) == set(METHODS)
        for name, service in methods.items():
            stub = s.channel.unary_unary(f"/{service}/{name}")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub(b"\xff", timeout=2)
            assert (name, grpc.StatusCode.INVALID_ARGUMENT) == (name, caught.value.code())


GOOD_ENTRY = f"""
[[token]]
name = "billing"
sha256 = "{"0" * 64}"
namespaces = ["billing"]
scopes = ["jobs:read", "work"]
"""


def test_a_tokens_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(GOOD_ENTRY)

    TokenTable.load(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "must hold"),
        ("[[token]]\nname = 'x'\n", "missing keys"),
        (GOOD_ENTRY.replace("work", "root"), "root"),
        (GOOD_ENTRY.replace("0" * 64, "0" * 63), "64 hex digits"),
        (GOOD_ENTRY + "admin = true\n", "admin"),
        (GOOD_ENTRY * 2, "same token"),
        ("[[", "tokens.toml"),
    ],
)
def test_a_bad_tokens_file_says_what_is_wrong(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(content)

    with pytest.raises(ConfigError, match=says):
        TokenTable.load(path)


def test_scopes_are_what_the_methods_ask_for() -> None:
    asked = {method.scope for method in METHODS.values()}

    assert {Scope.READ, Scope.WRITE, Scope.WORK, Scope.ADMIN} == asked
