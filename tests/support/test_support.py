"""The test support keeps its own promises."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.embedded.etcd_process import EtcdProcess
from coordinator.embedded.valkey_process import ValkeyProcess
from tests.support.clock import SteppingClock
from tests.support.services import EtcdFactory
from tests.support.tcp_proxy import ProxyMode, TcpProxy


async def echo_server() -> tuple[asyncio.Server, str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_clock_wakes_sleepers_in_order_of_their_time() -> None:
    clock = SteppingClock()
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.monotonic()))

    async with asyncio.TaskGroup() as group:
        group.create_task(sleeper("late", 2.0))
        group.create_task(sleeper("early", 1.0))
        await clock.wait_for_sleepers(2)
        await clock.advance(1.5)
        assert woken == [("early", 1001.0)]
        await clock.advance(1.5)
    assert [name for name, _ in woken] == ["early", "late"]
    assert clock.now_ms() == 1_700_000_003_000


@pytest.mark.parametrize(
    ("mode", "answered"),
    [(ProxyMode.PASS, True), (ProxyMode.DROP, False), (ProxyMode.HALF_DROP, False), (ProxyMode.DELAY, True)],
)
async def test_proxy_mode_decides_whether_an_answer_comes(mode: ProxyMode, answered: bool) -> None:
    server, target = await echo_server()
    async with server, TcpProxy(target, delay=0.05) as proxy:
        proxy.set_mode(mode)
        host, port = proxy.endpoint.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"hello")
        if answered:
            assert await asyncio.wait_for(reader.read(100), 2) == b"hello"
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(100), 0.1)
        writer.close()
        assert (proxy.bytes_down > 0) == (answered or mode is ProxyMode.HALF_DROP)


async def test_proxy_reset_breaks_open_connections() -> None:
    server, target = await echo_server()
    async with server, TcpProxy(target) as proxy:
        host, port = proxy.endpoint.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"x")
        assert await asyncio.wait_for(reader.read(1), 2) == b"x"
        proxy.set_mode(ProxyMode.RESET)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(1), 2)
        writer.close()


def test_shared_servers_are_up(etcd_server: EtcdProcess, valkey_server: ValkeyProcess) -> None:
    assert etcd_server.healthy()
    assert valkey_server.running


def test_etcd_restarts_on_the_same_port_and_data(etcd_factory: EtcdFactory) -> None:
    server = etcd_factory()
    endpoint = server.endpoint
    server.kill()
    assert not server.healthy()
    server.restart()
    assert server.endpoint == endpoint
    server.pause()
    assert server.running
    assert not server.healthy()
    server.resume()
    assert server.healthy()
