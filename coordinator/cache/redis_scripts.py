"""What happens to one entry of the cache, as Lua: each call is one atomic step on one hash, in one slot.

Fields of the hash (absent: none):

====  =============================================================================================
e     epoch; an entry of a lower one is as good as absent, and of a higher one out of the caller's reach
i     mark of its life: whoever has seen it knows that nothing was evicted since
n     1: the source has no such entry
v, c  value and content type
s, w  source and version of the value; they outlive it, so that no older version comes back
r     revision that the value is known to be as new as
x     when it turns stale (ms)
d     when it is gone (ms); the key itself expires no earlier
t, k  fill token and the revision known when it was granted
u     until when the token is good (ms)
j     revision of the last invalidation
====  =============================================================================================

Versions, revisions and the epoch are decimals padded to 20 digits and compared as text: Lua's numbers are
doubles, to which 2^53 and 2^53 + 1 are one. Times are the server's own, so that no coordinator's clock
counts. ``ARGV[1]`` is always the epoch, ``ARGV[2]`` how long (ms) traces are kept: a bookkeeping life, longer
than any load.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ABANDON", "FILL", "GET", "INVALIDATE", "PLANT", "PUT"]

_HEAD: Final = """
local key, epoch, keep = KEYS[1], ARGV[1], tonumber(ARGV[2])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local f = redis.call('HMGET', key, 'e', 'i', 'n', 'v', 'c', 's', 'w', 'r', 'x', 'd', 't', 'k', 'u', 'j')
local zero = string.rep('0', 20)
local stored_epoch = f[1] or zero
local behind = stored_epoch > epoch
if stored_epoch < epoch and f[1] then
  redis.call('DEL', key)
  f = {}
end
local has = (f[3] or f[4]) and f[10] and tonumber(f[10]) > now
local function last(ms)
  local left = redis.call('PTTL', key)
  if left < ms then redis.call('PEXPIRE', key, ms) end
end
"""

_STORE: Final = """
local function store(source, version, revision, fresh, stale, negative, value, content_type)
  redis.call('HDEL', key, 'v', 'c', 'n', 't', 'k', 'u')
  if negative == '1' then
    redis.call('HSET', key, 'n', '1')
  else
    redis.call('HSET', key, 'v', value, 'c', content_type)
  end
  redis.call('HSET', key, 'e', epoch, 's', source, 'w', version, 'r', revision,
    'x', now + tonumber(fresh), 'd', now + tonumber(fresh) + tonumber(stale))
  last(tonumber(fresh) + tonumber(stale))
  last(keep)
end
local function drop(revision)
  redis.call('HDEL', key, 'v', 'c', 'n', 'x', 'd', 'r', 't', 'k', 'u')
  redis.call('HSET', key, 'e', epoch, 'j', revision)
  last(keep)
end
"""

GET: Final = (
    _HEAD
    + """
local token, good, known, early, mark = ARGV[3], tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6]), ARGV[7]
if behind then return {'miss', '', '', '0', 0, 0, 0} end
local status, left, retry, granted = 'miss', 0, 0, 0
if has then
  left = tonumber(f[9]) - now
  if f[3] then status = 'negative' elseif left > 0 then status = 'fresh' else status = 'stale' end
end
local due = left <= early
local busy = f[11] and tonumber(f[13]) > now
if token ~= '' and due and not busy then
  granted = 1
  redis.call('HSET', key, 'e', epoch, 't', token, 'k', known, 'u', now + good)
  redis.call('HSETNX', key, 'i', mark)
  last(keep)
elseif status == 'miss' and busy then
  retry = tonumber(f[13]) - now
end
if status == 'miss' then return {status, '', '', '0', 0, granted, retry} end
return {status, f[4] or '', f[5] or '', f[7] or '0', left > 0 and left or 0, granted, retry}
"""
)
"""ARGV 3-7: token ('' for no wish), its life (ms), known revision, early (ms), mark of a new life.
Answers status, value, content type, version, ms until stale, granted, ms until the token of another ends."""

FILL: Final = (
    _HEAD
    + _STORE
    + """
local token, source, version, fresh, stale, negative = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]
if behind or f[11] ~= token or tonumber(f[13]) <= now then return {'dropped', f[7] or '0'} end
local known = f[12]
if source == '2' then version = known end
if negative == '1' and version == zero and f[7] and not (has and f[4]) then
  source, version = f[6], f[7]
end
if (f[6] == source and version < f[7]) or (source == '2' and f[14] and known < f[14]) then
  redis.call('HDEL', key, 't', 'k', 'u')
  return {'superseded', f[7] or '0'}
end
store(source, version, known, fresh, stale, negative, ARGV[9], ARGV[10])
return {'stored', version}
"""
)
"""ARGV 3-10: token, source, version, fresh (ms), stale (ms), negative, value, content type."""

ABANDON: Final = (
    _HEAD
    + """
if not behind and f[11] == ARGV[3] then redis.call('HDEL', key, 't', 'k', 'u') end
return {'stored', '0'}
"""
)
"""ARGV 3: token."""

PLANT: Final = (
    _HEAD
    + """
if behind then return {'', '0'} end
redis.call('HSET', key, 'e', epoch)
redis.call('HSETNX', key, 'i', ARGV[3])
last(keep)
return {redis.call('HGET', key, 'i'), '0'}
"""
)
"""ARGV 3: mark."""

PUT: Final = (
    _HEAD
    + _STORE
    + """
local mark, revision, source, version = ARGV[3], ARGV[4], ARGV[5], ARGV[6]
if source == '2' then version = revision end
if behind then return {'dropped', f[7] or '0'} end
if f[14] and revision <= f[14] then return {'superseded', f[7] or '0'} end
if mark == '' or f[2] ~= mark then
  local later = not f[6] or (f[6] == source and version > f[7])
  if f[8] and revision <= f[8] and not later then return {'superseded', f[7] or '0'} end
  drop(revision)
  if later then
    redis.call('HSET', key, 's', source, 'w', version)
  end
  return {'dropped', f[7] or '0'}
end
if f[6] == source and version < f[7] then return {'superseded', f[7]} end
if f[8] and revision <= f[8] and version == f[7] then return {'superseded', f[7]} end
store(source, version, revision, ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11])
return {'stored', version}
"""
)
"""ARGV 3-11: mark, revision, source, version, fresh (ms), stale (ms), negative, value, content type."""

INVALIDATE: Final = (
    _HEAD
    + _STORE
    + """
local revision = ARGV[3]
if behind then return {'dropped', '0'} end
if f[14] and revision <= f[14] then return {'superseded', '0'} end
if has and f[8] and revision <= f[8] then
  redis.call('HSET', key, 'j', revision)
  return {'superseded', f[7] or '0'}
end
if f[11] and f[12] >= revision then
  redis.call('HDEL', key, 'v', 'c', 'n', 'x', 'd', 'r')
  redis.call('HSET', key, 'j', revision)
  last(keep)
  return {'stored', '0'}
end
drop(revision)
redis.call('HSETNX', key, 'i', ARGV[4])
return {'stored', '0'}
"""
)
"""ARGV 3-4: revision, mark of a new life."""
