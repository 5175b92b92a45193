"""The commands of the console script that need the server's packages.

``commands_entry`` is the application that the entry-point group ``leasekeeper.commands`` names. It is made
on first use, because worker processes of the demo import from here too and need none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coordinator.cli.commands import commands_entry

__all__ = ["commands_entry"]


def __getattr__(name: str) -> Any:
    if name != "commands_entry":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from coordinator.cli.commands import commands_entry as app

    return app
