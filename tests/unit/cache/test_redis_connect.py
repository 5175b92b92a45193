"""URLs of Redis servers."""

from __future__ import annotations

import pytest

from coordinator.cache.redis_connect import RedisEndpoint, parse_url
from coordinator.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("redis://localhost", RedisEndpoint(kind="", tls=False, hosts=(("localhost", 6379),))),
        (
            "rediss://app:p%40ss@cache:7000/3",
            RedisEndpoint(kind="", tls=True, hosts=(("cache", 7000),), username="app", password="p@ss", db=3),
        ),
        (
            "redis://:secret@[::1]:7000",
            RedisEndpoint(kind="", tls=False, hosts=(("::1", 7000),), password="secret"),
        ),
        (
            "redis+sentinel://a:1,b:2/main",
            RedisEndpoint(kind="sentinel", tls=False, hosts=(("a", 1), ("b", 2)), service="main"),
        ),
        ("rediss+cluster://a:1,b:2", RedisEndpoint(kind="cluster", tls=True, hosts=(("a", 1), ("b", 2)))),
    ],
)
def test_a_url_names_servers_user_and_kind(url: str, endpoint: RedisEndpoint) -> None:
    assert parse_url(url) == endpoint


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost",
        "redis+proxy://localhost",
        "redis://user:hunter2@",
        "redis://user:hunter2@host:port",
        "redis://user:hunter2@a,b",
        "redis://user:hunter2@a/name",
        "redis+sentinel://user:hunter2@a:1",
        "redis+cluster://user:hunter2@a:1/2",
    ],
)
def test_a_bad_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert "hunter2" not in str(caught.value)
