"""Find the operations whose deadline has passed without a timer for each.

Deadlines are kept in slots of one tick (a hashed timing wheel; Varghese and Lauck 1987, scheme 6). Adding and
removing is one set operation. An operation is found at most two ticks after its deadline, never before it.
"""

from __future__ import annotations

from coordinator.etcd.guarded_op import Entry

__all__ = ["DeadlineWheel"]


class DeadlineWheel:
    """All operations under way, by deadline. ``tick`` in seconds."""

    __slots__ = ("_slots", "_tick")

    def __init__(self, tick: float) -> None:
        self._tick = tick
        self._slots: dict[int, set[Entry]] = {}

    def add(self, entry: Entry) -> None:
        """Remember ``entry`` until ``remove`` or until ``due`` returns it."""
        number = int(entry.deadline / self._tick) + 1
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = set()
        slot.add(entry)
        entry.slot = slot

    def remove(self, entry: Entry) -> None:
        """Forget ``entry``; nothing happens if it is not here."""
        if entry.slot is not None:
            entry.slot.discard(entry)
            entry.slot = None

    def due(self, now: float) -> list[Entry]:
        """Remove and return the entries whose deadline lies before ``now``, earliest slots first."""
        last = int(now / self._tick)
        found: list[Entry] = []
        for number in sorted(number for number in self._slots if number <= last):
            found.extend(self._slots.pop(number))
        for entry in found:
            entry.slot = None
        return found

    def clear(self) -> list[Entry]:
        """Remove and return all."""
        found = [entry for slot in self._slots.values() for entry in slot]
        self._slots.clear()
        for entry in found:
            entry.slot = None
        return found
