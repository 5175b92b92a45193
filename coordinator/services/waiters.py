"""Callers that wait for a job, in the order in which they came."""

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

    __slots__ = ("job_id", "number", "pairs", "woken")

    def __init__(self, number: int, pairs: tuple[Pair, ...], job_id: str) -> None:
        self.number = number
        self.pairs = pairs
        self.job_id = job_id
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Waiters:
    """Who waits for which (namespace, queue, type), or for one job by its id.

    As many wake as jobs arrive, first come first; a waiter that found nothing goes back to its old place.
    """

    def __init__(self) -> None:
        self._by_pair: defaultdict[Pair, OrderedDict[int, Waiter]] = defaultdict(OrderedDict)
        self._by_job: defaultdict[tuple[str, str], OrderedDict[int, Waiter]] = defaultdict(OrderedDict)
        self._numbers = 0

    def __len__(self) -> int:
        numbers = {number for line in self._by_pair.values() for number in line}
        return len(numbers) + sum(len(line) for line in self._by_job.values())

    @property
    def has_job_waiters(self) -> bool:
        """Whether anybody waits for a job by its id."""
        return bool(self._by_job)

    def number(self) -> int:
        """A place in line, kept over the rounds of one call."""
        self._numbers += 1
        return self._numbers

    def add(self, number: int, pairs: Iterable[Pair]) -> Waiter:
        """Stand in the line of each pair."""
        waiter = Waiter(number, tuple(pairs), "")
        for pair in waiter.pairs:
            _insert(self._by_pair[pair], waiter)
        return waiter

    def add_for_job(self, number: int, namespace: str, job_id: str) -> Waiter:
        """Wait for one job."""
        waiter = Waiter(number, ((namespace, "", ""),), job_id)
        _insert(self._by_job[namespace, job_id], waiter)
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """Stand in no line any more; no error if it stands in none."""
        if waiter.job_id:
            _drop(self._by_job, (waiter.pairs[0][0], waiter.job_id), waiter)
            return
        for pair in waiter.pairs:
            _drop(self._by_pair, pair, waiter)

    def waiting_for(self, pair: Pair) -> bool:
        """Whether somebody waits for this pair."""
        return pair in self._by_pair

    def wake_one(self, pair: Pair) -> bool:
        """Wake the first who waits for this pair."""
        line = self._by_pair.get(pair)
        return line is not None and self._wake(next(iter(line.values())))

    def wake_for_job(self, namespace: str, job_id: str) -> bool:
        """Wake the first who waits for this job."""
        line = self._by_job.get((namespace, job_id))
        return line is not None and self._wake(next(iter(line.values())))

    def wake_all(self) -> None:
        """Wake everybody, to tell them that there is nothing to wait for."""
        lines = [*self._by_pair.values(), *self._by_job.values()]
        for waiter in [waiter for line in lines for waiter in line.values()]:
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
