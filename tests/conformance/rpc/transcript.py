"""What a coordinator answered, without what no two runs share: times, revisions, tokens, sessions."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Any

import grpc.aio
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from tests.unit.rpc.fakes import told

__all__ = ["Transcript"]

TIMES = {
    "submit_time",
    "ready_time",
    "claim_time",
    "last_beat_time",
    "settle_time",
    "rank_time",
    "start_time",
    "end_time",
    "etag",
    "revision",
    "next_page_token",
}
TOKEN = re.compile(r"\b1[0-9]{13,}\b")


class Transcript:
    """Collects answers and refusals in order."""

    def __init__(self) -> None:
        self.lines: list[object] = []
        self._known: dict[str, str] = {}

    async def note(self, call: Awaitable[Any], *, delay: bool = True) -> Any:
        """Write down what *call* is answered; None if it is refused. *delay*: with its RetryInfo."""
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            refusal = told(error)
            retry_ms = refusal.retry_ms if delay else None
            said = (error.details(), refusal.metadata, refusal.fields, retry_ms)
            self.lines.append((refusal.code.name, refusal.reason, *map(self._plain, said)))
            return None
        self.lines.append(self._answer(answer))
        return answer

    def _answer(self, answer: object) -> object:
        if isinstance(answer, Message):
            return self._plain(MessageToDict(answer, preserving_proto_field_name=True))
        if isinstance(answer, list):
            return [self._answer(one) for one in answer]
        return self._plain(answer)

    def _plain(self, value: object) -> object:
        if isinstance(value, dict):
            return {key: TIMES & {key} or self._field(key, one) for key, one in sorted(value.items())}
        if isinstance(value, list | tuple):
            return [self._plain(one) for one in value]
        return TOKEN.sub("TOKEN", value) if isinstance(value, str) else value

    def _field(self, key: str, value: object) -> object:
        if key in ("session_id", "holder") or (key == "rollback_job_id" and value):
            return self._known.setdefault(str(value), f"{key}-{len(self._known)}")
        return self._plain(value)
