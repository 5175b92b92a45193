"""Callers that wait for any job of some types, in the order in which they came."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import TypeVar

__all__ = ["Waiter", "Waiters"]

_K = TypeVar("_K")

Pair = tuple[str, str, str]
"""(namespace, queue, type)."""


class Waiter:
    """One long poll. It is woken at most once between two calls of ``Waiters.add``."""

    __slots__ = ("number", "pairs", "woken")

    def __init__(self, number: int, pairs: tuple[Pair, ...]) -> None:
        self.number = number
        self.pairs = pairs
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Waiters:
    """Who waits for which (namespace, queue, type).

    As many wake as jobs arrive, first come first; a waiter that found nothing goes back to its old place.
    """

    def __init__(self) -> None:
        self._by_pair: defaultdict[Pair, OrderedDict[int, Waiter]] = defaultdict(OrderedDict)
        self._numbers = 0

    def __len__(self) -> int:
        numbers = {number for line in self._by_pair.values() for number in line}
        return len(numbers)

    def number(self) -> int:
        """A place in line, kept over the rounds of one call."""
        self._numbers += 1
        return self._numbers

    def add(self, number: int, pairs: Iterable[Pair]) -> Waiter:
        """Stand in the line of each pair."""
        waiter = Waiter(number, tuple(pairs))
        for pair in waiter.pairs:
            _insert(self._by_pair[pair], waiter)
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """Stand in no line any more; no error if it stands in none."""
        for pair in waiter.pairs:
            _drop(self._by_pair, pair, waiter)

    def waiting_for(self, pair: Pair) -> bool:
        """Whether somebody waits for this pair."""
        return pair in self._by_pair

    def wake_one(self, pair: Pair) -> bool:
        """Wake the first who waits for this pair."""
        line = self._by_pair.get(pair)
        return line is not None and self._wake(next(iter(line.values())))

    def wake_all(self) -> None:
        """Wake everybody, to tell them that there is nothing to wait for."""
        for waiter in [waiter for line in self._by_pair.values() for waiter in line.values()]:
            self._wake(waiter)

    def _wake(self, waiter: Waiter) -> bool:
        self.remove(waiter)
        if waiter.woken.done():
            return False
        waiter.woken.set_result(None)
        return True


def _insert(line: OrderedDict[int, Waiter], waiter: Waiter) -> None:
    line[waiter.number] = waiter
    if len(line) > 1 and next(iter(line)) > waiter.number:
        # Back to an old place: nearly always the first, since waking starts there.
        line.move_to_end(waiter.number, last=False)


def _drop(lines: dict[_K, OrderedDict[int, Waiter]], key: _K, waiter: Waiter) -> None:
    line = lines.get(key)
    if line is not None and line.get(waiter.number) is waiter:
        del line[waiter.number]
        if not line:
            del lines[key]
