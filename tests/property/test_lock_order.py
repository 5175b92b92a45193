"""Who owns a lock, against the definition read word by word: quadratic, and without a running count."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.lock_order import LockEntry, LockMode, line_of


def entry(revision: int, mode: LockMode, permits: int) -> LockEntry:
    """An entry of a session of its own."""
    return LockEntry(
        name="l", waiter=f"w{revision}", session=f"s{revision}", mode=mode, permits=permits, revision=revision
    )


_KINDS = st.one_of(
    st.just((LockMode.EXCLUSIVE, 1)),
    st.just((LockMode.SHARED, 1)),
    st.tuples(st.just(LockMode.SEMAPHORE), st.integers(1, 4)),
)
_LINES = st.lists(_KINDS, max_size=12).map(
    lambda kinds: [entry(at + 1, mode, permits) for at, (mode, permits) in enumerate(kinds)]
)


def told_owners(entries: Sequence[LockEntry]) -> set[str]:
    """Owners by the sentence in the design; one that contradicts earlier permits never owns, and is no entry
    like those behind it."""
    kept: list[LockEntry] = []
    for one in entries:
        semaphores = [k for k in kept if k.mode is LockMode.SEMAPHORE]
        if one.mode is LockMode.SEMAPHORE and semaphores and semaphores[0].permits != one.permits:
            continue
        kept.append(one)
    owners = set()
    for one in kept:
        earlier = [k for k in entries if k.revision < one.revision]
        most = {LockMode.EXCLUSIVE: 1, LockMode.SHARED: 10**9, LockMode.SEMAPHORE: one.permits}[one.mode]
        if all((k.mode, k.permits) == (one.mode, one.permits) for k in earlier) and len(earlier) < most:
            owners.add(one.waiter)
    return owners


@given(_LINES)
def test_an_entry_owns_iff_all_before_it_are_alike_and_leave_it_a_place(entries: list[LockEntry]) -> None:
    assert {one.waiter for one in line_of(entries).owners} == told_owners(entries)


@given(_LINES, st.data())
def test_a_deletion_only_adds_owners(entries: list[LockEntry], data: st.DataObject) -> None:
    line = line_of(entries)
    if not entries:
        return
    gone = data.draw(st.sampled_from(entries))
    after = {one.waiter for one in line_of([one for one in entries if one != gone]).owners}

    assert {one.waiter for one in line.owners} - {gone.waiter} <= after


@given(_LINES, _KINDS)
def test_who_is_admitted_owns_once_it_is_there(entries: list[LockEntry], kind: tuple[LockMode, int]) -> None:
    line = line_of(entries)
    standing = [*line.owners, *line.waiters]
    new = entry(len(entries) + 1, *kind)
    after = line_of([*standing, new])

    assert line_of(standing).admits(new) == (new in after.owners)
    assert (line.disagrees(new) is not None) == (new in after.misfits)


@given(_LINES)
def test_whoever_waits_owns_in_the_end_in_the_order_of_arrival(entries: list[LockEntry]) -> None:
    line = line_of(entries)
    standing = [*line.owners, *line.waiters]
    served: list[LockEntry] = []
    while standing:
        owners = line_of(standing).owners
        assert owners, "somebody waits and nobody owns"
        served.extend(one for one in owners if one not in served)
        standing.remove(owners[0])

    assert [one.revision for one in served] == sorted(one.revision for one in served)
