"""Settings: sources and their order, unknown keys, relations that show both numbers."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import Settings, load_settings
from coordinator.core.notice import NoticeKind
from coordinator.errors import ConfigError


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LEASEKEEPER_"):
            monkeypatch.delenv(name)


def test_the_defaults_work_together() -> None:
    assert Settings() == load_settings()


def test_a_flag_counts_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "leasekeeper.toml"
    path.write_text('[etcd]\nendpoints = "f:1"\nuser = "f"\npassword = "f"\n[sessions]\nttl_default_s = 20\n')
    monkeypatch.setenv("LEASEKEEPER_ETCD__ENDPOINTS", "e:1,e:2")
    monkeypatch.setenv("LEASEKEEPER_ETCD__USER", "e")

    settings = load_settings(path, {"etcd": {"user": "flag"}})

    assert ("e:1", "e:2") == settings.etcd.endpoint_list
    assert ("flag", "f") == (settings.etcd.user, settings.etcd.password)
    assert 20 == settings.sessions.ttl_default_s
    assert 2 == settings.sessions.ttl_min_s


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("LEASEKEEPER_ETCD__ENDPOINT", "etcd.endpoint.*no such setting"),
        ("LEASEKEEPER_ECTD__ENDPOINTS", "no group 'ectd'"),
    ],
)
def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, says: str) -> None:
    monkeypatch.setenv(name, "x")

    with pytest.raises(ConfigError, match=says):
        load_settings()


def test_variables_of_an_orchestrator_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEASEKEEPER_PORT", "tcp://10.0.0.1:7420")
    monkeypatch.setenv("LEASEKEEPER_SERVICE_HOST", "10.0.0.1")

    load_settings()


@pytest.mark.parametrize(
    "content", ["[etcd]\nendpoint = 'x'\n", "[ectd]\nendpoints = 'x'\n", "listen = 'x'\n"]
)
def test_an_unknown_key_of_the_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "leasekeeper.toml"
    path.write_text(content)

    with pytest.raises(ConfigError, match="no such setting"):
        load_settings(path)


@pytest.mark.parametrize("content", ["[etcd", "[etcd]\nendpoints = 1\n", "[server]\ngrace_s = 'soon'\n"])
def test_a_file_that_cannot_be_read_says_so(tmp_path: Path, content: str) -> None:
    path = tmp_path / "leasekeeper.toml"
    path.write_text(content)

    with pytest.raises(ConfigError):
        load_settings(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml"):
        load_settings(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"sessions": {"ttl_min_s": 1}}, "(2) must be at most sessions.ttl_min_s (1)"),
        ({"circuits": {"failure_ratio": 1.5}}, "circuits.failure_ratio (1.5) must be at most all (1)"),
        ({"circuits": {"first_pause_s": 400}}, "must be at most circuits.longest_pause_s (300)"),
        ({"circuits": {"probes_to_close": 0}}, "must be greater than 0"),
        ({"sessions": {"ttl_min_s": 12}}, "ttl_min_s (12) must be at most sessions.ttl_default_s (10)"),
        ({"sessions": {"ttl_max_s": 9}}, "ttl_default_s (10) must be at most sessions.ttl_max_s (9)"),
        ({"sessions": {"heartbeat_max_s": 1900}}, "heartbeat_max_s (1900) must be at most"),
        ({"sessions": {"ttl_min_s": -1}}, "sessions.ttl_min_s (-1) must be greater than 0"),
        ({"sessions": {"ttl_min_s": float("nan")}}, "sessions.ttl_min_s (nan) must be"),
        (
            {"server": {"wait_max_s": 31}},
            "wait_max_s (31) must be at most the 30 s of the contract (30)",
        ),
        (
            {"etcd": {"request_timeout_s": 11}},
            "_s (11) must be at most server.unary_timeout_s (10)",
        ),
        ({"server": {"grace_s": 2}}, "etcd.request_timeout_s (3) must be at most server.grace_s (2)"),
        (
            {"storage": {"compact_in_use": 0.9}},
            "_use (0.9) must be at most storage.stop_in_use (0.8)",
        ),
        ({"storage": {"stop_allocated": 1.5}}, "stop_allocated (1.5) must be at most the whole quota (1)"),
        ({"storage": {"history_s": 5}}, "must be at most storage.history_s (5)"),
        ({"server": {"tls_cert": "/nowhere/cert.pem"}}, "tls_cert and server.tls_key must be given together"),
        ({"server": {"tls_cert": "/nowhere/cert.pem"}}, "there is no file /nowhere/cert.pem"),
        ({"etcd": {"user": "u"}}, "etcd.user and etcd.password"),
        ({"etcd": {"endpoints": " , "}}, "at least one host:port"),
        ({"log": {"level": "loud"}}, "log.level"),
        (
            {"notices": {"webhook_kinds": "dead, lots"}},
            "webhook_kinds: there is no kind LOTS; there are STUCK",
        ),
        (
            {"notices": {"webhook_url": "http://h/", "webhook_secret": "short"}},
            "notices.webhook_url needs a notices.webhook_secret of 16 or more",
        ),
        ({"notices": {"hung_after_s": 0}}, "notices.hung_after_s (0) must be greater than 0"),
    ],
)
def test_settings_that_cannot_work_together_show_both_numbers(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_settings(None, flags)


def test_tokens_over_plain_text_need_a_word(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.touch()
    auth = {"tokens_file": path}

    load_settings(None, {"auth": auth})
    load_settings(None, {"auth": auth | {"allow_plaintext": True}, "server": {"listen": "0.0.0.0:7420"}})
    for group in ("server", "reconciler"):
        with pytest.raises(ConfigError, match=rf"{group}\.listen \(0\.0\.0\.0:7420\)"):
            load_settings(None, {"auth": auth, group: {"listen": "0.0.0.0:7420"}})


def test_the_password_is_not_shown() -> None:
    assert "geheim" not in repr(load_settings(None, {"etcd": {"user": "u", "password": "geheim"}}))


def test_the_secret_of_the_webhook_is_not_shown() -> None:
    notices = {"webhook_url": "http://h/", "webhook_secret": "geheim-geheim-geheim"}

    assert "geheim" not in repr(load_settings(None, {"notices": notices}))


def test_kinds_for_the_webhook_are_named_in_any_case() -> None:
    settings = load_settings(None, {"notices": {"webhook_kinds": "dead, Lost,"}})

    assert settings.notices.kinds == {NoticeKind.DEAD, NoticeKind.LOST}
