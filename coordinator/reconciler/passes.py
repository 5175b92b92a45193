"""All passes of a process, by name: what is run by hand, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from coordinator.reconciler.report import Pass

__all__ = ["passes_by_name"]


def passes_by_name(passes: Sequence[Pass]) -> Mapping[str, Pass]:
    """The passes by name, in the order in which they run."""
    named = {one.name: one for one in passes}
    assert len(named) == len(passes), "two passes of one name"
    return MappingProxyType(named)
