"""Settings into what the store and the server are made with. Files are read here, once."""

from __future__ import annotations

from pathlib import Path

from coordinator.config import CircuitSettings, EtcdSettings, ServerSettings, Settings, StorageSettings
from coordinator.core.circuit import CircuitPolicy
from coordinator.errors import ConfigError
from coordinator.etcd.auth import Credentials
from coordinator.etcd.channels import ChannelConfig, EtcdTls
from coordinator.etcd.client import EtcdConfig
from coordinator.etcd.commit_config import CommitterConfig
from coordinator.etcd.compaction import CompactionConfig
from coordinator.etcd.guarded_op import GroupLimits
from coordinator.etcd.present import PresentConfig
from coordinator.etcd.retention import RetentionConfig
from coordinator.etcd.retention_pressure import PressureConfig
from coordinator.etcd.storage_gauge import GaugeConfig
from coordinator.etcd.store import StoreConfig
from coordinator.rpc.call_guard import GuardConfig
from coordinator.rpc.limits import CallLimits
from coordinator.rpc.server import ListenConfig, TlsConfig
from coordinator.services.circuits import CircuitConfig

__all__ = ["call_limits", "circuit_config", "etcd_config", "guard_config", "listen_config", "store_config"]

_HYSTERESIS = 0.05


def _read(name: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {error}") from error


def etcd_config(settings: EtcdSettings) -> EtcdConfig:
    """How to reach etcd.

    Raises:
        ConfigError: a file cannot be read.
    """
    tls = None
    if settings.tls_ca is not None or any(end.startswith("https://") for end in settings.endpoint_list):
        tls = EtcdTls(
            ca=_read("etcd.tls_ca", settings.tls_ca),
            certificate=_read("etcd.tls_cert", settings.tls_cert),
            key=_read("etcd.tls_key", settings.tls_key),
            server_name=settings.tls_server_name,
        )
    credentials = Credentials(user=settings.user, password=settings.password) if settings.user else None
    return EtcdConfig(
        endpoints=settings.endpoint_list, channel=ChannelConfig(tls=tls), credentials=credentials
    )


def store_config(settings: Settings, *, coordinator_id: str, endpoint: str, version: str) -> StoreConfig:
    """The store, whole."""
    storage = settings.storage
    return StoreConfig(
        etcd=etcd_config(settings.etcd),
        coordinator_id=coordinator_id,
        root=settings.etcd.root,
        endpoint=endpoint,
        version=version,
        committer=CommitterConfig(
            limits=GroupLimits.of_server(settings.etcd.max_txn_ops),
            txn_timeout=settings.etcd.request_timeout_s,
            drain_timeout=settings.server.grace_s / 5,
        ),
        present=PresentConfig(state_dir=storage.state_dir),
        retention=RetentionConfig(ttl=round(storage.retention_s)),
        gauge=_gauge_config(storage),
        compaction=CompactionConfig(
            urgent=storage.compact_in_use, keep=storage.history_s, critical=storage.stop_in_use
        ),
        pressure=PressureConfig(max_finished=storage.retained_max),
    )


def _gauge_config(storage: StorageSettings) -> GaugeConfig:
    return GaugeConfig(
        quota=storage.quota_bytes,
        in_use_stop=storage.stop_in_use,
        in_use_go=storage.stop_in_use * (1 - _HYSTERESIS),
        allocated_stop=storage.stop_allocated,
        allocated_go=storage.stop_allocated * (1 - _HYSTERESIS / 2),
        allocated_notice=storage.notice_allocated,
    )


def circuit_config(circuits: CircuitSettings) -> CircuitConfig:
    """When circuits open, and how they close."""
    return CircuitConfig(
        enabled=circuits.enabled,
        policy=CircuitPolicy(
            window_ms=round(circuits.window_s * 1000),
            failure_ratio=circuits.failure_ratio,
            min_outcomes=circuits.min_outcomes,
            loss_ratio=circuits.loss_ratio,
            min_lost_sessions=circuits.min_lost_sessions,
            first_pause_ms=round(circuits.first_pause_s * 1000),
            longest_pause_ms=round(circuits.longest_pause_s * 1000),
            probes_to_close=circuits.probes_to_close,
        ),
    )


def listen_config(server: ServerSettings) -> ListenConfig:
    """The listener."""
    tls = None
    if server.tls_cert is not None and server.tls_key is not None:
        tls = TlsConfig(cert=server.tls_cert, key=server.tls_key, client_ca=server.tls_client_ca)
    return ListenConfig(
        address=server.listen, tls=tls, reuse_port=server.reuse_port, reflection=server.reflection
    )


def guard_config(server: ServerSettings) -> GuardConfig:
    """Bounds of calls."""
    return GuardConfig(
        unary_timeout_s=server.unary_timeout_s, max_calls=server.max_calls, max_streams=server.max_streams
    )


def call_limits(settings: Settings) -> CallLimits:
    """The limits that callers meet."""
    sessions = settings.sessions
    return CallLimits(
        ttl_min_ms=round(sessions.ttl_min_s * 1000),
        ttl_default_ms=round(sessions.ttl_default_s * 1000),
        ttl_max_ms=round(sessions.ttl_max_s * 1000),
        wait_max_ms=round(settings.server.wait_max_s * 1000),
    )
