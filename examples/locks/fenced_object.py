"""An object that only the newest holder of a lock may change, in a store with conditional writes.

The token lies in the object's metadata. A write names the version that it has read (``If-Match``, or
``If-None-Match: *`` for the first one), so nothing can come in between. Amazon S3 and its likes have both.
"""

from __future__ import annotations

import http.client

TOKEN = "x-amz-meta-fencing-token"
_TIMEOUT = 10.0
_TRIES = 10


def write_object(host: str, path: str, data: bytes, token: int) -> bool:
    """Write, unless a holder with a larger token has written before; whether it was written.

    Raises:
        RuntimeError: others wrote in between ten times in a row, or the store refused otherwise.
    """
    for _ in range(_TRIES):
        status, headers = _call(host, "HEAD", path)
        if status not in (200, 404):
            raise RuntimeError(f"the store answered {status}")
        if status == 200 and int(headers[TOKEN]) > token:
            return False
        condition = {"If-Match": headers["etag"]} if status == 200 else {"If-None-Match": "*"}
        status, _ = _call(host, "PUT", path, data, {**condition, TOKEN: str(token)})
        if status in (200, 201):
            return True
        if status not in (404, 409, 412):  # all three: somebody else was there meanwhile, look again
            raise RuntimeError(f"the store answered {status}")
    raise RuntimeError(f"others changed {path} {_TRIES} times in a row")


def _call(
    host: str, method: str, path: str, data: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str]]:
    connection = http.client.HTTPConnection(host, timeout=_TIMEOUT)
    try:
        connection.request(method, path, data, headers or {})
        answer = connection.getresponse()
        answer.read()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()
