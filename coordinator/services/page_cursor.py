"""Page tokens: a mark of the query that they were made for, and where its next page begins."""

from __future__ import annotations

from coordinator.errors import FieldViolation, Reason, RequestError

__all__ = ["page_cursor", "position_in"]


def page_cursor(mark: str, position: str) -> str:
    """The token of the page that begins at, or after, ``position``."""
    return f"{mark}.{position}"


def position_in(cursor: str, mark: str, *, from_start: bool = False) -> str:
    """Where the page begins; empty: at the start.

    Args:
        cursor: as the caller sent it; empty for the first page.
        mark: of the query that it sent along.
        from_start: whether a token may say the start, as that of a call that had no time to begin.

    Raises:
        RequestError: VALIDATION_FAILED, the token was made for another query.
    """
    if not cursor:
        return ""
    made_for, dot, position = cursor.partition(".")
    if made_for != mark or not dot or not (position or from_start):
        text = "it was not made for this query"
        raise RequestError(
            Reason.VALIDATION_FAILED, f"page_token: {text}", fields=[FieldViolation("page_token", text)]
        )
    return position
