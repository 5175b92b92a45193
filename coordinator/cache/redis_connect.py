"""Makes redis-py clients from URLs: standalone, Sentinel and Cluster, with TLS and ACL users.

==================================================  =========================================================
``redis://[user:password@]host:port[/db]``          one server; ``rediss://`` with TLS
``redis+sentinel://host:port,host:port/service``    the primary that these sentinels name; ``rediss+sentinel://``
``redis+cluster://host:port,host:port``             a cluster, found from any of these; ``rediss+cluster://``
==================================================  =========================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from coordinator.errors import ConfigError

__all__ = ["RedisClient", "RedisEndpoint", "connect", "parse_url"]

RedisClient = Redis | RedisCluster

_KINDS: Final = ("", "sentinel", "cluster")
_DEFAULT_PORT: Final = 6379


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisEndpoint:
    """A URL, taken apart. ``service``: name of a Sentinel's primary; ``db``: of a single server."""

    kind: str
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    username: str | None = None
    password: str | None = None
    db: int = 0
    service: str = ""


def parse_url(url: str) -> RedisEndpoint:
    """Take a URL apart.

    Raises:
        ConfigError: it is none of those above; the message never holds the password.
    """
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    if scheme not in ("redis", "rediss") or kind not in _KINDS:
        raise ConfigError(f"redis.url: unknown scheme {parts.scheme!r}; see the table in docs/running.md")
    credentials, _, where = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    hosts: list[tuple[str, int]] = []
    for host in where.split(","):
        split = urlsplit(f"//{host}")
        try:
            port = split.port or _DEFAULT_PORT
        except ValueError as error:
            raise ConfigError(f"redis.url: bad port in {host!r}") from error
        if not split.hostname:
            raise ConfigError("redis.url: a host is missing")
        hosts.append((split.hostname, port))
    path = unquote(parts.path.strip("/"))
    if kind == "sentinel" and not path:
        raise ConfigError("redis.url: a Sentinel URL ends with /<service>")
    if kind == "" and (len(hosts) > 1 or (path and not path.isdigit())):
        raise ConfigError("redis.url: one host, and a number of a database after it")
    if kind == "cluster" and path not in ("", "0"):
        raise ConfigError("redis.url: a cluster has database 0 only")
    return RedisEndpoint(
        kind=kind,
        tls=scheme == "rediss",
        hosts=tuple(hosts),
        username=unquote(user) or None,
        password=unquote(password) or None,
        db=int(path) if kind == "" and path else 0,
        service=path if kind == "sentinel" else "",
    )


def connect(url: str, *, connections: int, call_s: float, ca_file: str = "") -> RedisClient:
    """A client that is not connected yet; whoever calls closes it with ``aclose``.

    Nothing is tried again by itself, and no call waits longer than ``call_s`` for a connection or an answer.

    Args:
        url: see above.
        connections: most connections, to each node of a cluster.
        call_s: seconds.
        ca_file: PEM of the authorities that sign the servers' certificates; empty: the system's.

    Raises:
        ConfigError: see `parse_url`.
    """
    at = parse_url(url)
    options: dict[str, Any] = {
        "username": at.username,
        "password": at.password,
        "socket_timeout": call_s,
        "socket_connect_timeout": call_s,
        "socket_keepalive": True,
        "client_name": "leasekeeper",
    }
    tls: dict[str, Any] = {"ssl": True, **({"ssl_ca_certs": ca_file} if ca_file else {})} if at.tls else {}
    never = Retry(NoBackoff(), 0)
    if at.kind == "cluster":
        return RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in at.hosts],
            max_connections=connections,
            retry=never,
            **options,
            **tls,
        )
    if at.kind == "sentinel":
        sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
            at.hosts, sentinel_kwargs={**options, **tls}, **options, **tls
        )
        primary: Redis = sentinel.master_for(at.service, max_connections=connections, retry=never)
        return primary
    [(host, port)] = at.hosts
    client = Redis(host=host, port=port, db=at.db, retry=never, **options, **tls)
    pool = client.connection_pool
    client.connection_pool = BlockingConnectionPool(
        connection_class=pool.connection_class,
        max_connections=connections,
        timeout=call_s,
        **pool.connection_kwargs,
    )
    return client
