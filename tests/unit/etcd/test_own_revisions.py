"""Own echoes on the watch: known, perhaps ours, or others'."""

from __future__ import annotations

from coordinator.etcd.own_revisions import OwnRevisions


def test_only_what_was_added_is_ours() -> None:
    own = OwnRevisions()
    own.add(5)
    own.add(5)
    assert own.is_own(5)
    assert not own.is_own(4)


def test_the_oldest_are_forgotten_first() -> None:
    own = OwnRevisions(kept=2)
    for revision in (1, 2, 3):
        own.add(revision)
    assert [own.is_own(revision) for revision in (1, 2, 3)] == [False, True, True]


def test_an_unknown_revision_may_become_ours_while_answers_are_under_way() -> None:
    waiting = True
    own = OwnRevisions(under_way=lambda: waiting)
    own.add(5)
    assert own.may_become_own(6)
    assert not own.may_become_own(5)
    waiting = False
    assert not own.may_become_own(6)


def test_after_a_restore_no_number_is_ours() -> None:
    own = OwnRevisions()
    own.add(5)
    own.forget()
    assert not own.is_own(5)
