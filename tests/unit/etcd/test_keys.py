"""Keys: one form per thing, no two things under one key, ranges that hold exactly what they name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.effects import Slot, Where
from coordinator.core.lock_order import job_waiter
from coordinator.core.rank import Rank
from coordinator.errors import KeyFormatError
from coordinator.etcd.keys import FORMS, SHARDS, KeySpace, NamespaceKeys, job_shard

SPACE = KeySpace("/root")
KEYS = SPACE.namespace("default")

# Job ids, lock names, unique keys: 1-256 bytes of UTF-8 without control characters.
texts = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=64).filter(
    lambda text: len(text.encode()) <= 256
)
names = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True)
ranks = st.builds(Rank, st.integers(0, 10**14 - 1), st.integers(0, 10**14 - 1))

ODD = [
    " ",
    ".",
    "..",
    "/",
    "//",
    "a/b",
    "a/",
    "../q",
    "e\u0301",
    "\u00e9",
    "😀",
    "\u200f",
    "\u2028",
    "%2F",
    "%",
    "*",
    "{x}",
    "A",
    "a",
    "ab",
    "a-b",
    "a0",
    "x" * 256,
    "é" * 128,
]


@given(texts)
def test_every_job_key_says_which_job_it_is_of(job_id: str) -> None:
    assert KEYS.parse_state(KEYS.state(job_id)) == job_id
    assert KEYS.parse_claim(KEYS.claim(job_id)) == job_id
    assert KEYS.parse_cancel(KEYS.cancel(job_id)) == job_id


@given(names, names, ranks, texts)
def test_a_ready_key_says_queue_type_rank_and_job(queue: str, type_: str, rank: Rank, job_id: str) -> None:
    assert KEYS.parse_ready(KEYS.ready(queue, type_, rank, job_id)) == (queue, type_, rank, job_id)


@given(st.integers(0, 10**14 - 1), texts)
def test_a_due_key_says_time_and_job(ms: int, job_id: str) -> None:
    assert KEYS.parse_due(KEYS.due(ms, job_id)) == (ms, job_id)


@given(texts, texts)
def test_a_lock_key_says_name_and_waiter(name: str, waiter: str) -> None:
    assert KEYS.parse_lock(KEYS.lock(name, waiter)) == (name, waiter)


@given(st.lists(texts, min_size=2, max_size=2, unique=True), names, ranks)
def test_two_ids_share_no_key_and_no_range(ids: list[str], queue: str, rank: Rank) -> None:
    one, other = ids

    def all_keys(job_id: str) -> set[bytes]:
        return {
            KEYS.spec(job_id),
            KEYS.state(job_id),
            KEYS.ready(queue, "t", rank, job_id),
            KEYS.due(rank.ms, job_id),
            KEYS.claim(job_id),
            KEYS.cancel(job_id),
            KEYS.checkpoint(job_id),
            KEYS.result(job_id),
            KEYS.unique(queue, job_id),
            KEYS.lock(job_id, "w"),
        }

    assert not all_keys(one) & all_keys(other)
    entries = KEYS.lock_entries(one)
    assert not entries.start <= KEYS.lock(other, "w") < entries.end
    assert entries.start <= KEYS.lock(one, "w") < entries.end


@given(ranks, ranks)
def test_ready_keys_sort_by_rank(one: Rank, other: Rank) -> None:
    keys = sorted([KEYS.ready("q", "t", one, "j"), KEYS.ready("q", "t", other, "j")])
    assert [KEYS.parse_ready(key).rank for key in keys] == sorted([one, other])


@given(ranks, ranks, ranks, texts)
def test_a_ready_range_holds_the_ranks_after_one_up_to_another(
    rank: Rank, after: Rank, until: Rank, job_id: str
) -> None:
    span = KEYS.ready_between("q", "t", after, until)
    inside = span.start <= KEYS.ready("q", "t", rank, job_id) < span.end
    assert inside == (after < rank <= until)
    at = KEYS.ready_at("q", "t", after)
    assert (at.start <= KEYS.ready("q", "t", rank, job_id) < at.end) == (rank == after)


@given(st.integers(0, 10**14 - 1), st.integers(0, 10**14 - 1), texts)
def test_a_due_range_ends_with_its_millisecond(ms: int, until: int, job_id: str) -> None:
    span = KEYS.due_until(until)
    assert (span.start <= KEYS.due(ms, job_id) < span.end) == (ms <= until)


@given(texts, texts)
def test_a_shard_goes_on_after_any_of_its_jobs(job_id: str, last: str) -> None:
    shard = job_shard(job_id)
    whole = KEYS.state_shard(shard)
    key = KEYS.state(job_id)
    assert 0 <= shard < SHARDS
    assert whole.start <= key < whole.end
    assert not any(span.start <= key < span.end for span in [KEYS.state_shard((shard + 1) % SHARDS)])
    last_key = whole.start + KEYS.claim(last).removeprefix(KEYS.all_claims().start)
    rest = KEYS.state_shard(shard, last_key.removeprefix(whole.start))
    assert (rest.start <= key < rest.end) == (key > last_key)


@pytest.mark.parametrize("text", ODD)
def test_odd_ids_are_just_text(text: str) -> None:
    key = KEYS.claim(text)
    assert KEYS.parse_claim(key) == text
    assert key.count(b"/") == KEYS.claim("j").count(b"/")


def test_queues_that_begin_alike_have_ranges_of_their_own() -> None:
    for queue in ("a", "ab", "a-b", "a0", "a.b"):
        key = KEYS.ready(queue, "t", Rank(1, 1), "j")
        for other in ("a", "ab", "a-b", "a0", "a.b"):
            span = KEYS.ready_between(other, "t", None, None)
            assert (span.start <= key < span.end) == (queue == other)


@pytest.mark.parametrize("text", ["", "a\0b", "\n", "\x7f", "\x85", "x" * 257, "é" * 129, "\ud800"])
def test_what_cannot_be_an_id_makes_no_key(text: str) -> None:
    with pytest.raises(KeyFormatError):
        KEYS.state(text)
    with pytest.raises(KeyFormatError):
        KEYS.unique("q", text)


@pytest.mark.parametrize("text", ["", "A", "_system", "-a", "a/b", "a b", "é", "x" * 64, "a\n"])
def test_what_cannot_be_a_name_makes_no_key(text: str) -> None:
    with pytest.raises(KeyFormatError):
        SPACE.namespace(text)
    with pytest.raises(KeyFormatError):
        KEYS.queue(text)


@pytest.mark.parametrize("rank", [Rank(-1, 0), Rank(0, -1), Rank(10**14, 0), Rank(0, 10**14)])
def test_a_number_that_does_not_fit_makes_no_key(rank: Rank) -> None:
    with pytest.raises(KeyFormatError):
        KEYS.ready("q", "t", rank, "j")


@pytest.mark.parametrize("text", ["", "0", "00000000000000FF", "g" * 16, "0" * 17])
def test_a_session_is_named_by_its_lease(text: str) -> None:
    with pytest.raises(KeyFormatError):
        KEYS.session(text)
    assert KEYS.parse_session(KEYS.session("00000000000000ff")) == "00000000000000ff"


@given(st.binary(max_size=80))
def test_keys_that_nobody_built_are_refused_not_misread(tail: bytes) -> None:
    parsers = {
        KEYS.all_states().start: (KEYS.parse_state, KEYS.state),
        KEYS.all_claims().start: (KEYS.parse_claim, KEYS.claim),
        KEYS.all_cancels().start: (KEYS.parse_cancel, KEYS.cancel),
        KEYS.all_ready().start: (KEYS.parse_ready, lambda parts: KEYS.ready(*parts)),
        KEYS.all_types().start: (KEYS.parse_type, lambda parts: KEYS.type(*parts)),
        KEYS.due_until(0).start: (KEYS.parse_due, lambda parts: KEYS.due(*parts)),
    }
    for prefix, (parse, build) in parsers.items():
        try:
            found = parse(prefix + tail)
        except KeyFormatError:
            continue
        assert build(found) == prefix + tail


def test_a_record_in_another_jobs_shard_is_refused() -> None:
    key = KEYS.state("j")
    shard = (job_shard("j") + 1) % SHARDS
    moved = KEYS.state_shard(shard).start + key.rpartition(b"/")[2]
    with pytest.raises(KeyFormatError):
        KEYS.parse_state(moved)


def test_system_keys_are_parsed_back() -> None:
    assert SPACE.parse_bucket(SPACE.bucket(12, 0xFEED)) == (12, 0xFEED)
    assert SPACE.parse_coordinator(SPACE.coordinator("c-1")) == "c-1"
    assert SPACE.parse_registered(SPACE.registered("default")) == "default"
    for parse in (SPACE.parse_bucket, SPACE.parse_coordinator, SPACE.parse_registered):
        with pytest.raises(KeyFormatError):
            parse(b"/root/_system/other/x")
    with pytest.raises(KeyFormatError):
        SPACE.parse_bucket(SPACE.bucket(12, 1) + b"x")


@pytest.mark.parametrize("root", ["", "/", "a", "/a/"])
def test_a_root_begins_with_a_slash_and_ends_without(root: str) -> None:
    with pytest.raises(KeyFormatError):
        KeySpace(root)


@given(names, names)
def test_namespaces_do_not_overlap(one: str, other: str) -> None:
    a, b = SPACE.namespace(one), SPACE.namespace(other)
    spans = [NamespaceKeys.all_states, NamespaceKeys.all_claims, NamespaceKeys.all_sessions]
    for span_of in spans:
        span = span_of(a)
        assert (span.start <= b.state("j") < span.end) == (one == other and span_of is spans[0])


def test_every_slot_of_the_core_has_its_key() -> None:
    direct = {
        Slot.SPEC: KEYS.spec("j"),
        Slot.STATE: KEYS.state("j"),
        Slot.READY: KEYS.ready("q", "t", Rank(1, 2), "j"),
        Slot.DUE: KEYS.due(7, "j"),
        Slot.CLAIM: KEYS.claim("j"),
        Slot.CANCEL: KEYS.cancel("j"),
        Slot.CHECKPOINT: KEYS.checkpoint("j"),
        Slot.RESULT: KEYS.result("j"),
        Slot.UNIQUE: KEYS.unique("q", "u"),
        Slot.LOCK: KEYS.lock("l", job_waiter("j")),
    }
    for slot in Slot:
        where = Where(
            slot, "default", "j", queue="q", type="t", rank=Rank(1, 2), ms=7, unique_key="u", lock_name="l"
        )
        assert KEYS.where(where) == direct[slot]
    assert len(set(direct.values())) == len(Slot)


def test_the_list_of_forms_is_complete_and_true() -> None:
    samples = dict(SPACE.samples())
    assert set(samples) == set(FORMS)
    for name, key in samples.items():
        form = FORMS[name].split("/")
        parts = key.decode().removeprefix("/root/").split("/")
        assert len(parts) == len(form), name
        assert all(part == want for part, want in zip(parts, form, strict=True) if not want.startswith("<"))
