"""Flags of the command line into settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coordinator.cli.settings_flags import read_settings
from coordinator.errors import ConfigError


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LEASEKEEPER_"):
            monkeypatch.delenv(name)


def test_a_named_flag_counts_before_set_and_set_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "leasekeeper.toml"
    path.write_text('[etcd]\nendpoints = "f:1"\nroot = "/file"\n[server]\nlisten = "127.0.0.1:1"\n')

    settings = read_settings(
        path, {"etcd.endpoints": "flag:1", "server.listen": None}, ["etcd.endpoints=set:1", "etcd.root=/set"]
    )

    assert ("flag:1", "/set", "127.0.0.1:1") == (
        settings.etcd.endpoints,
        settings.etcd.root,
        settings.server.listen,
    )


def test_a_value_may_hold_an_equals_sign() -> None:
    assert "/a=b" == read_settings(None, {}, ["etcd.root=/a=b"]).etcd.root


@pytest.mark.parametrize("text", ["etcd.root", "root=/a", "a.b.c=1", "=", ""])
def test_a_set_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="GROUP"):
        read_settings(None, {}, [text])


@pytest.mark.parametrize("text", ["etcd.rot=/a", "etdc.root=/a", "server.grace_s=soon"])
def test_an_unknown_setting_or_a_bad_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=text.partition("=")[0].partition(".")[0]):
        read_settings(None, {}, [text])
