"""Flags of the command line into settings."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from coordinator.cli.settings_flags import check_state_dir, read_settings
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


@pytest.mark.parametrize(
    "listen", ["127.0.0.1:65535", "0.0.0.0:0", "[::1]:7420", "unix:/tmp/leasekeeper.sock"]
)
def test_an_address_that_can_be_listened_on_is_taken(listen: str) -> None:
    assert read_settings(None, {"server.listen": listen}, None).server.listen == listen


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("server.listen=here", "server.listen (here) must be host:port"),
        ("server.listen=:7420", "server.listen (:7420) must be host:port"),
        ("server.listen=127.0.0.1:http", "server.listen (127.0.0.1:http) must be host:port"),
        ("server.listen=127.0.0.1:99999", "server.listen: port 99999 must be at most 65535"),
        ("reconciler.listen=here", "reconciler.listen (here) must be host:port"),
        ("reconciler.listen=127.0.0.1:99999", "reconciler.listen: port 99999 must be at most 65535"),
        ("etcd.root=leasekeeper", "etcd.root (leasekeeper) must begin with a slash and not end in one"),
        ("etcd.root=/a/", "etcd.root (/a/) must begin with a slash and not end in one"),
    ],
)
def test_a_text_of_the_wrong_form_is_refused_before_anything_starts(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        read_settings(None, {}, [text])


def test_a_state_folder_is_made_or_refused(tmp_path: Path) -> None:
    made, file = tmp_path / "a" / "b", tmp_path / "file"
    file.touch()

    check_state_dir(None)
    check_state_dir(made)
    assert made.is_dir()
    for folder in (file, file / "below"):
        with pytest.raises(ConfigError, match=r"storage\.state_dir: .* cannot be made"):
            check_state_dir(folder)
