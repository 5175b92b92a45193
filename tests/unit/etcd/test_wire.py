"""Hand-encoded requests are the messages that the generated classes would build."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.etcd import wire
from leasekeeper.internal.etcd.v1 import kv_pb2 as pb

KEYS = st.binary(min_size=1, max_size=40)
VALUES = st.one_of(
    st.binary(max_size=40), st.sampled_from([b"", b"v" * 127, b"v" * 128, b"v" * 4096, b"v" * 70_000])
)
NUMBERS = st.one_of(
    st.integers(0, (1 << 63) - 1), st.sampled_from([0, 1, 127, 128, 4095, 4096, 1 << 21, (1 << 63) - 1])
)

Pair = tuple[bytes, pb.RequestOp]
ComparePair = tuple[bytes, pb.Compare]


def _put(key: bytes, value: bytes, lease: int) -> Pair:
    op = pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))
    return wire.put(key, value, lease), op


def _delete(key: bytes) -> Pair:
    return wire.delete(key), pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))


def _delete_range(key: bytes, end: bytes) -> Pair:
    op = pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key, range_end=end))
    return wire.delete_range(key, end), op


def _get(key: bytes, end: bytes, limit: int, keys_only: bool) -> Pair:
    op = pb.RequestOp(request_range=pb.RangeRequest(key=key, range_end=end, limit=limit, keys_only=keys_only))
    return wire.get(key, end, limit, keys_only), op


FLAT_OPS: st.SearchStrategy[Pair] = st.one_of(
    st.builds(_put, KEYS, VALUES, NUMBERS),
    st.builds(_delete, KEYS),
    st.builds(_delete_range, KEYS, KEYS),
    st.builds(_get, KEYS, st.one_of(st.just(b""), KEYS), NUMBERS, st.booleans()),
)

C = pb.Compare
COMPARES: st.SearchStrategy[ComparePair] = st.one_of(
    st.builds(
        lambda key, n: (wire.create_eq(key, n), C(target=C.CREATE, key=key, create_revision=n)), KEYS, NUMBERS
    ),
    st.builds(lambda key, n: (wire.mod_eq(key, n), C(target=C.MOD, key=key, mod_revision=n)), KEYS, NUMBERS),
    st.builds(lambda key, n: (wire.lease_eq(key, n), C(target=C.LEASE, key=key, lease=n)), KEYS, NUMBERS),
    st.builds(lambda key, v: (wire.value_eq(key, v), C(target=C.VALUE, key=key, value=v)), KEYS, VALUES),
    st.builds(
        lambda key, end, n: (
            wire.range_mod_less(key, end, n),
            C(result=C.LESS, target=C.MOD, key=key, mod_revision=n, range_end=end),
        ),
        KEYS,
        KEYS,
        NUMBERS,
    ),
    st.builds(
        lambda key, end: (
            wire.range_absent(key, end),
            C(target=C.CREATE, key=key, create_revision=0, range_end=end),
        ),
        KEYS,
        KEYS,
    ),
)


def _nested(compares: list[ComparePair], thens: list[Pair], elses: list[Pair]) -> Pair:
    message = pb.TxnRequest(
        compare=[c for _, c in compares], success=[o for _, o in thens], failure=[o for _, o in elses]
    )
    encoded = wire.nested([c for c, _ in compares], [o for o, _ in thens], [o for o, _ in elses])
    return encoded, pb.RequestOp(request_txn=message)


OPS = st.one_of(
    FLAT_OPS,
    st.builds(
        _nested,
        st.lists(COMPARES, max_size=4),
        st.lists(FLAT_OPS, max_size=4),
        st.lists(FLAT_OPS, max_size=4),
    ),
)


@given(COMPARES)
def test_a_compare_decodes_to_the_message_built_by_objects(pair: ComparePair) -> None:
    encoded, message = pair
    decoded = pb.Compare.FromString(encoded)
    assert decoded == message
    assert decoded.WhichOneof("target_union") == message.WhichOneof("target_union")


@given(OPS)
def test_an_operation_decodes_to_the_message_built_by_objects(pair: Pair) -> None:
    encoded, message = pair
    assert pb.RequestOp.FromString(encoded) == message
    assert wire.is_put(encoded) == message.HasField("request_put")


@given(st.lists(COMPARES, max_size=3), st.lists(OPS, max_size=5), st.lists(OPS, max_size=5))
def test_a_txn_decodes_to_the_message_built_by_objects(
    compares: list[ComparePair], thens: list[Pair], elses: list[Pair]
) -> None:
    encoded = wire.txn([c for c, _ in compares], [o for o, _ in thens], [o for o, _ in elses])
    message = pb.TxnRequest(
        compare=[c for _, c in compares], success=[o for _, o in thens], failure=[o for _, o in elses]
    )
    assert pb.TxnRequest.FromString(encoded) == message
    assert len(encoded) == message.ByteSize()  # nothing superfluous either


@pytest.mark.parametrize(
    "build",
    [
        lambda: wire.put(b"", b"v"),
        lambda: wire.delete(b""),
        lambda: wire.get(b""),
        lambda: wire.create_eq(b"", 0),
        lambda: wire.delete_range(b"a", b""),
        lambda: wire.range_absent(b"a", b""),
        lambda: wire.put(b"k", b"v", -1),
        lambda: wire.mod_eq(b"k", -1),
        lambda: wire.mod_eq(b"k", 1 << 63),
        lambda: wire.get(b"k", limit=-1),
    ],
)
def test_an_empty_key_or_a_number_outside_int64_is_refused(build: Callable[[], bytes]) -> None:
    with pytest.raises(ValueError, match=r"empty key|outside|needs its end"):
        build()


@pytest.mark.parametrize("bits", range(63))
def test_a_number_is_encoded_as_protobuf_does_it_around_every_power_of_two(bits: int) -> None:
    for number in {(1 << bits) - 1, 1 << bits, (1 << bits) + 1}:
        message = pb.Compare(mod_revision=number).SerializeToString()
        assert wire.varint(number) == message[1:]
