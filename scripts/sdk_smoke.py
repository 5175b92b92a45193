#!/usr/bin/env python3
"""Import the SDK and every generated module, and send one message through the codec.

Run by ``make lower-bounds`` with the lowest dependencies, and on the installed wheel. It needs nothing but
the SDK's three dependencies, and fails if the import pulls in a package that only the server needs.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

SERVER_ONLY = (
    "redis",
    "typer",
    "rich",
    "pydantic",
    "structlog",
    "uvloop",
    "prometheus_client",
    "coordinator",
)


def main() -> None:
    """Import everything, round-trip a message, and check what was loaded.

    Raises:
        SystemExit: something of the server was imported.
    """
    sdk = importlib.import_module("worker_sdk")
    missing = [name for name in getattr(sdk, "__all__", ()) if not hasattr(sdk, name)]
    if missing:
        raise SystemExit(f"worker_sdk.__all__ names what is not there: {missing}")

    generated = importlib.import_module("leasekeeper")
    modules = [
        found.name
        for found in pkgutil.walk_packages(generated.__path__, "leasekeeper.")
        if found.name.endswith(("_pb2", "_pb2_grpc"))
    ]
    if not modules:
        raise SystemExit("no generated modules found")
    for name in modules:
        importlib.import_module(name)

    jobs = importlib.import_module("leasekeeper.v1.job_service_pb2")
    request = jobs.GetJobRequest(namespace="default")
    if jobs.GetJobRequest.FromString(request.SerializeToString()) != request:
        raise SystemExit("a message does not survive its own encoding")

    leaked = [name for name in SERVER_ONLY if name in sys.modules]
    if leaked:
        raise SystemExit(f"importing the SDK imports what only the server needs: {leaked}")
    print(f"worker_sdk and {len(modules)} generated modules import on their own")


if __name__ == "__main__":
    main()
