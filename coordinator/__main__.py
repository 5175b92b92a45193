"""``python -m coordinator``: the same as ``leasekeeper``, for images that start without a shell."""

from __future__ import annotations

from coordinator.cli.commands import commands_entry

if __name__ == "__main__":
    commands_entry(prog_name="leasekeeper")
