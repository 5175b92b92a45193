"""Who may import foreign libraries and generated code. Layers are import-linter's (pyproject.toml)."""

from __future__ import annotations

import sys

import pytest

from tests.architecture.source_tree import SHIPPED, Module, modules, place

# What may be imported, and below which modules only. `a.b` covers `a.b` and everything in it.
IMPORTERS = {
    "redis": ("coordinator.cache", "coordinator.cli.bench_lock_peers"),
    "leasekeeper.v1": (
        "coordinator.rpc",
        "coordinator.cli",
        "worker_sdk._transport",
        "worker_sdk._convert",
        "worker_sdk._session",
        "worker_sdk.testing",
    ),
    "leasekeeper.internal": ("coordinator.etcd",),
    "grpc": (
        "coordinator.app",
        "coordinator.cli",
        "coordinator.etcd",
        "coordinator.observability",
        "coordinator.rpc",
        "worker_sdk._transport",
        "worker_sdk._convert",
        "worker_sdk._session",
        "worker_sdk.testing",
    ),
    "typer": ("coordinator.cli",),
    "rich": ("coordinator.cli",),
    "uvloop": ("coordinator.app", "coordinator.cli"),
    "prometheus_client": ("coordinator.observability",),
}
SDK_DEPENDENCIES = {"grpc", "google", "leasekeeper", "worker_sdk"}


def below(name: str, prefix: str) -> bool:
    """Return whether *name* is *prefix* or lies in it."""
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("library", IMPORTERS)
def test_only_its_adapter_imports(library: str) -> None:
    strangers = [
        f"{place(module)} imports {imported}"
        for module in modules(*SHIPPED)
        if not any(below(module.name, allowed) for allowed in IMPORTERS[library])
        for imported in module.imports()
        if below(imported, library)
    ]

    assert [] == strangers


def test_the_sdk_needs_only_its_three_dependencies() -> None:
    def foreign(module: Module) -> list[str]:
        tops = {imported.partition(".")[0] for imported in module.imports()}
        return sorted(tops - SDK_DEPENDENCIES - set(sys.stdlib_module_names) - allowed(module))

    def allowed(module: Module) -> set[str]:
        return {"coordinator"} if below(module.name, "worker_sdk.testing") else set()

    assert {} == {place(module): foreign(module) for module in modules("worker_sdk") if foreign(module)}


def test_shipped_code_never_imports_tests() -> None:
    leaks = [
        f"{place(module)} imports {imported}"
        for module in modules(*SHIPPED)
        for imported in module.imports()
        if imported.partition(".")[0] in {"tests", "pytest", "hypothesis", "trustme", "testcontainers"}
        and not below(module.name, "worker_sdk.testing")
    ]

    assert [] == leaks


def test_the_coordinator_reaches_no_private_part_of_the_sdk() -> None:
    reached = [
        f"{place(module)} imports {imported}"
        for module in modules("coordinator")
        for imported in module.imports()
        if below(imported, "worker_sdk") and any(part.startswith("_") for part in imported.split("."))
    ]

    assert [] == reached
