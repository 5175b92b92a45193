"""Which versions of etcd a coordinator starts on.

A keepalive of an older etcd may be answered with success for a lease that is already revoked. Promise P8,
that a holder learns of an expiry in time, does not hold there, so such versions need a word from the
operator.
"""

from __future__ import annotations

import logging

from coordinator.errors import ConfigError, EtcdUnavailable, StorageError
from coordinator.etcd.client import EtcdClient
from coordinator.etcd.cluster import judge_version

__all__ = ["check_etcd_version"]

_LOG = logging.getLogger(__name__)


async def check_etcd_version(client: EtcdClient, *, allow_unsafe: bool, timeout: float) -> list[str]:
    """Judge every member that answers.

    Args:
        client: the etcd client.
        allow_unsafe: warn instead of refusing.
        timeout: seconds for each member.

    Returns:
        The defects, one text a member; empty: all is well.

    Raises:
        ConfigError: a member has a defect and ``allow_unsafe`` is False.
        EtcdUnavailable: no member answered.
    """
    defects = []
    answered = 0
    failure: StorageError | None = None
    for member in client.ring.members:
        try:
            status = await client.status(member.endpoint, timeout=timeout)
        except StorageError as error:
            failure = error
            continue
        answered += 1
        verdict = judge_version(status.version)
        if not verdict.supported:
            defects.append(f"etcd at {member.endpoint}: {verdict.defect}")
    if not answered:
        raise EtcdUnavailable(f"no member told its version: {failure}")
    if defects and not allow_unsafe:
        raise ConfigError(
            "; ".join(defects) + ". Supported are 3.4.38+, 3.5.23+ and 3.6.5+;"
            " --allow-unsafe-etcd starts all the same"
        )
    for defect in defects:
        _LOG.warning("unsafe etcd is allowed: %s; a holder may learn too late that its lease is gone", defect)
    return defects
