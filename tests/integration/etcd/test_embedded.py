"""Embedded servers: their own ports, no orphans, data that outlive a restart."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest

from coordinator.embedded import etcd_process, valkey_process
from coordinator.embedded.child_process import ChildStartError, free_ports, listens_on
from coordinator.embedded.etcd_cluster import EtcdCluster
from coordinator.embedded.etcd_process import EtcdBinaryMissing, EtcdOptions, EtcdProcess, find_etcd_binary
from coordinator.embedded.valkey_process import ValkeyOptions, ValkeyProcess
from coordinator.etcd.client import EtcdClient, EtcdConfig
from tests.support.polling import eventually
from tests.support.services import EtcdFactory, ValkeyFactory, missing_service

PARENT = """
import sys, time
from pathlib import Path
from coordinator.embedded.etcd_process import EtcdProcess
server = EtcdProcess(Path(sys.argv[1])).start()
print(server.pid, flush=True)
time.sleep(60)
"""


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie of a parent that is gone belongs to init; it no longer runs.
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_no_server_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    try:
        find_etcd_binary()
    except EtcdBinaryMissing as error:
        missing_service("etcd", str(error))
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PARENT,
        str(tmp_path / "orphan"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 30))
    assert exists(pid)
    parent.kill()
    await asyncio.wait_for(parent.wait(), 10)
    await eventually(lambda: not exists(pid), timeout=5, what="the server to end")


async def test_data_outlive_a_kill(etcd_factory: EtcdFactory) -> None:
    server = await asyncio.to_thread(etcd_factory)
    async with EtcdClient(EtcdConfig(endpoints=server.endpoints)) as client:
        await client.put(b"k", b"kept", timeout=5)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.restart)
        assert (await client.range(b"k", timeout=5)).kvs[0].value == b"kept"


def test_a_taken_port_is_replaced_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        thief.listen()
        taken = thief.getsockname()[1]
        tries: list[int] = []

        def ports(count: int) -> list[int]:
            tries.append(count)
            found = free_ports(count)
            return [taken, *found[1:]] if len(tries) == 1 else found

        for module in (etcd_process, valkey_process):
            monkeypatch.setattr(module, "free_ports", ports)
        with EtcdProcess(tmp_path / "one") as server:
            assert server.endpoint != f"127.0.0.1:{taken}"
            assert len(tries) == 2
        tries.clear()
        with ValkeyProcess(tmp_path / "valkey") as valkey:
            assert valkey.port != taken
            assert listens_on(valkey.pid, valkey.port)
        tries.clear()
        with EtcdCluster(tmp_path / "three", EtcdOptions()) as cluster:
            assert len({*cluster.endpoints, f"127.0.0.1:{taken}"}) == 4


def test_a_listener_of_somebody_else_is_not_ours() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert listens_on(os.getpid(), port)
        assert not listens_on(os.getppid(), port)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ChildStartError, match="no-such-flag"):
        EtcdProcess(tmp_path, EtcdOptions(extra_flags=("--no-such-flag",))).start()


def test_the_program_is_chosen_by_variable_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEASEKEEPER_ETCD_BIN", "/bin/true")
    assert find_etcd_binary("3.6") == Path("/bin/true")
    monkeypatch.setenv("LEASEKEEPER_ETCD_BIN", str(tmp_path / "absent"))
    with pytest.raises(EtcdBinaryMissing, match="absent"):
        find_etcd_binary()


def test_valkey_keeps_data_only_where_asked(valkey_factory: ValkeyFactory) -> None:
    def talk(server: ValkeyProcess, command: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            connection.sendall(command + b"\r\n")
            return connection.recv(100)

    for persistent, expected in ((True, b"$1\r\nv\r\n"), (False, b"$-1\r\n")):
        server = valkey_factory(
            ValkeyOptions(persistent=persistent, extra_config=("--appendfsync", "always"))
        )
        assert talk(server, b"SET k v") == b"+OK\r\n"
        server.kill()
        server.restart()
        assert talk(server, b"GET k") == expected
