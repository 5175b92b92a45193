"""What is in etcd, told by a client that shares no code with ours: cslab-etcd3, in a process of its own.

A process of its own, because that client brings generated code under etcd's own package names, threads,
and another view of gRPC's global state. As a program it writes one JSON object::

    python -m tests.support.etcd_oracle keys ENDPOINT PREFIX_HEX
    python -m tests.support.etcd_oracle lease ENDPOINT LEASE_ID
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.services import missing_service

__all__ = ["OracleKey", "keys_in_etcd", "lease_in_etcd"]

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleKey:
    """One key as the oracle saw it."""

    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


async def _ask(*words: str) -> dict[str, object]:
    if importlib.util.find_spec("etcd3") is None:
        missing_service("oracle", "cslab-etcd3 is not installed")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.etcd_oracle",
        *words,
        cwd=_ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    if process.returncode != 0:
        raise AssertionError(f"the oracle failed: {err.decode()}")
    answer: dict[str, object] = json.loads(out)
    return answer


async def keys_in_etcd(endpoint: str, prefix: bytes) -> dict[bytes, OracleKey]:
    """Return every key under *prefix*, read from *endpoint* by the independent client."""
    answer = await _ask("keys", endpoint, prefix.hex())
    found: dict[bytes, OracleKey] = {}
    for key, fields in answer.items():
        assert isinstance(fields, dict)
        found[bytes.fromhex(key)] = OracleKey(
            value=bytes.fromhex(fields["value"]),
            create_revision=fields["create_revision"],
            mod_revision=fields["mod_revision"],
            version=fields["version"],
            lease=fields["lease"],
        )
    return found


async def lease_in_etcd(endpoint: str, lease_id: int) -> tuple[int, set[bytes]]:
    """Return the remaining seconds of a lease (-1: there is none) and the keys attached to it."""
    answer = await _ask("lease", endpoint, str(lease_id))
    keys, ttl = answer["keys"], answer["ttl"]
    assert isinstance(keys, list)
    assert isinstance(ttl, int)
    return ttl, {bytes.fromhex(key) for key in keys}


def _main() -> None:
    import etcd3  # type: ignore[import-untyped]

    what, endpoint, subject = sys.argv[1:]
    host, _, port = endpoint.rpartition(":")
    client = etcd3.client(host=host, port=int(port), timeout=10)
    answer: dict[str, object]
    if what == "keys":
        answer = {}
        for value, meta in client.get_prefix(bytes.fromhex(subject)):
            answer[meta.key.hex()] = {
                "value": value.hex(),
                "create_revision": meta.create_revision,
                "mod_revision": meta.mod_revision,
                "version": meta.version,
                "lease": meta.lease_id,
            }
    else:
        info = client.get_lease_info(int(subject))
        answer = {"ttl": info.TTL, "keys": [key.hex() for key in info.keys]}
    client.close()
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    _main()
