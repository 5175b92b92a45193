"""Values in etcd: core values to protobuf records and back, each with a format version.

Decoding raises ``CodecError`` for whatever this version cannot read; callers set such a record aside, count
it and go on. The job's own record is in ``job_codec``, all others in ``record_codec``.
"""

from __future__ import annotations

from coordinator.etcd.job_codec import JobCodec
from coordinator.etcd.record_codec import (
    FORMAT,
    decode_checkpoint,
    decode_claim,
    decode_due,
    decode_epoch,
    decode_record,
    decode_result,
    decode_session,
    decode_spec,
    decode_unique,
    encode_cancel,
    encode_checkpoint,
    encode_claim,
    encode_due,
    encode_epoch,
    encode_result,
    encode_session,
    encode_spec,
    encode_unique,
)

__all__ = [
    "FORMAT",
    "JobCodec",
    "decode_checkpoint",
    "decode_claim",
    "decode_due",
    "decode_epoch",
    "decode_record",
    "decode_result",
    "decode_session",
    "decode_spec",
    "decode_unique",
    "encode_cancel",
    "encode_checkpoint",
    "encode_claim",
    "encode_due",
    "encode_epoch",
    "encode_result",
    "encode_session",
    "encode_spec",
    "encode_unique",
]
