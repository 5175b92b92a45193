"""Settings of the coordinator: where they come from, and whether they can work together.

A flag counts before the environment, the environment before the file, the file before the defaults. A
variable is named LEASEKEEPER_<GROUP>__<SETTING> (``LEASEKEEPER_ETCD__ENDPOINTS``); the file is TOML with
one table per group. Unknown keys are refused. Variables without ``__`` are not settings: orchestrators make
such names themselves (Kubernetes puts LEASEKEEPER_PORT into every pod beside a service called leasekeeper).

Names end in their unit: ``_s`` seconds, ``_bytes``; shares are fractions of the quota.
"""

from __future__ import annotations

from coordinator.config.checks import check_settings
from coordinator.config.groups import (
    AdminSettings,
    AuthSettings,
    CircuitSettings,
    EtcdSettings,
    LogSettings,
    NoticeSettings,
    ReconcilerSettings,
    ServerSettings,
    SessionSettings,
    Settings,
    StorageSettings,
)
from coordinator.config.sources import load_settings

__all__ = [
    "AdminSettings",
    "AuthSettings",
    "CircuitSettings",
    "EtcdSettings",
    "LogSettings",
    "NoticeSettings",
    "ReconcilerSettings",
    "ServerSettings",
    "SessionSettings",
    "Settings",
    "StorageSettings",
    "check_settings",
    "load_settings",
]
