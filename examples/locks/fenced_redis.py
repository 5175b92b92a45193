"""A key in Redis that only the newest holder of a lock may change: a script compares and writes at once.

Tokens are compared as text of equal length: they are 63 bits wide, and Lua's numbers keep only 53.
"""

from __future__ import annotations

import redis

GUARD = """
local seen = redis.call('HGET', KEYS[1], 'token')
if seen and seen > ARGV[2] then
  return 0
end
redis.call('HSET', KEYS[1], 'value', ARGV[1], 'token', ARGV[2])
return 1
"""


def write_key(client: redis.Redis, key: str, value: str, token: int) -> bool:
    """Write, unless a holder with a larger token has written before; whether it was written."""
    return bool(client.eval(GUARD, 1, key, value, f"{token:020d}"))
