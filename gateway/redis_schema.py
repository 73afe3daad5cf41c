"""Keys and scripts of the control plane in Redis, all in one place. Every key has a time to live.

`id` is the client's, behind its tenant where it has one (`names.py`).

    rw:req:{id}         hash     state (running | finished | interrupted), epoch, holder, length of the log, digest of what was
                                 asked, seed, verifier that works on it, finish (JSON, once finished)
    rw:req:{id}:epoch   counter  fencing: the highest epoch given out
    rw:req:{id}:lease   string   holder that drives the request now; expires unless renewed
    rw:req:{id}:log     list     committed output in order, several tokens an item (`sessions.Run` as JSON)
    rw:session:{id}     hash     several turns of one conversation: verifier, number of tokens it held
    rw:kv:M:K           zset     verifiers that hold the KV of a prompt block, by the second at which that was last seen; M is the
                                 fingerprint of the model, K the chained hash of the block (a hint; the verifier's own cache decides)
    rw:quota:{tenant}   hash     token bucket: level, and when it was (ms)

`{id}` is a hash tag: all keys of one request lie in one slot of a cluster, so scripts may touch them together. Request keys live
`retention_s` (longest request + 60 s) from the last write, and 60 s after the end.

Fencing. An epoch is only ever given out by a script that holds the lease or takes it over. A lease that ran out, or vanished with a
Redis that restarted empty, is taken back by its holder as long as nobody was granted a later epoch: so an outage of Redis does not
stop a running request. Every write carries its epoch; a later one refuses it.
"""

from __future__ import annotations

# Of all scripts on a request, KEYS: request, epoch, lease, log. ARGV begins with: holder, epoch, ttl of the lease, retention (ms).
_HELD = """
local holder = redis.call('GET', KEYS[3])
local epoch = tonumber(redis.call('GET', KEYS[2]) or '0')
local function expire(ms) for _, i in ipairs({1, 2, 4}) do redis.call('PEXPIRE', KEYS[i], ms) end end
local function grant(e)
  redis.call('SET', KEYS[2], e)
  redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[3])
  redis.call('HSET', KEYS[1], 'state', 'running', 'epoch', e, 'holder', ARGV[1])
  expire(ARGV[4])
end
"""

# More ARGV: the least epoch, field, value, … of the hash. A new run: the log of an earlier one is forgotten. 0 = it is running.
BEGIN = (
    _HELD
    + """
if holder and holder ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1], KEYS[4])
for i = 6, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
epoch = math.max(epoch + 1, tonumber(ARGV[5]))
grant(epoch)
return epoch
"""
)

# More ARGV: digest. Another holder goes on with a run: {epoch, hash, log}. Epoch 0 = nothing to drive: unknown, or finished;
# -1 = the id belongs to a request that asked something else.
TAKE_OVER = (
    _HELD
    + """
local digest = redis.call('HGET', KEYS[1], 'digest')
if not digest then return {0, {}, {}} end
if digest ~= ARGV[5] then return {-1, {}, {}} end
local fields, log = redis.call('HGETALL', KEYS[1]), redis.call('LRANGE', KEYS[4], 0, -1)
if redis.call('HGET', KEYS[1], 'state') == 'finished' then return {0, fields, log} end
grant(epoch + 1)
return {epoch + 1, fields, log}
"""
)

# The holder begins another attempt. 0 = somebody else drives the request now.
NEXT_EPOCH = (
    _HELD
    + """
if (holder and holder ~= ARGV[1]) or epoch > tonumber(ARGV[2]) then return 0 end
grant(tonumber(ARGV[2]) + 1)
return tonumber(ARGV[2]) + 1
"""
)

# More ARGV: offset, number of tokens, item of the log, state, tokens in all, ms to keep after the end, field, value, …
# Renews the lease; appends if the log is `offset` long; ends the run if a state is given and the log is whole then.
# The length of the log afterwards, or -1: somebody else drives the request now.
WRITE = (
    _HELD
    + """
if (holder and holder ~= ARGV[1]) or epoch > tonumber(ARGV[2]) then return -1 end
grant(ARGV[2])
local length = tonumber(redis.call('HGET', KEYS[1], 'length') or '0')
if tonumber(ARGV[6]) > 0 and length == tonumber(ARGV[5]) then
  redis.call('RPUSH', KEYS[4], ARGV[7])
  length = length + tonumber(ARGV[6])
  redis.call('PEXPIRE', KEYS[4], ARGV[4])
end
redis.call('HSET', KEYS[1], 'length', length)
for i = 11, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
if ARGV[8] ~= '' and length == tonumber(ARGV[9]) then
  redis.call('DEL', KEYS[3])
  redis.call('HSET', KEYS[1], 'state', ARGV[8])
  expire(ARGV[10])
end
return length
"""
)

# Empties the log, for a holder whose own record differs from it. 0 = somebody else drives the request now.
RESTART = (
    _HELD
    + """
if holder ~= ARGV[1] or epoch ~= tonumber(ARGV[2]) then return 0 end
redis.call('DEL', KEYS[4])
redis.call('HSET', KEYS[1], 'length', 0)
return 1
"""
)

# KEYS: bucket. ARGV: cost (negative: given back), tokens per second, size of the bucket. 0 = taken; else ms until it could be.
# A bucket that is full may be overdrawn by one request, so that none is too large for ever.
TAKE_TOKENS = """
local time = redis.call('TIME')
local now, size = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[3])
local known = redis.call('HMGET', KEYS[1], 'level', 'at')
local level = math.min(size, tonumber(known[1] or size) + (now - tonumber(known[2] or now)) / 1000 * ARGV[2])
local cost = tonumber(ARGV[1])
if cost > 0 and level < math.min(cost, size) then
  return math.max(1, math.ceil((math.min(cost, size) - level) / ARGV[2] * 1000))
end
level = math.min(size, level - cost)
redis.call('HSET', KEYS[1], 'level', tostring(level), 'at', now)
redis.call('PEXPIRE', KEYS[1], math.ceil((size - math.min(level, 0)) / ARGV[2] * 1000) + 1000)
return 0
"""


def request_keys(request_id: str) -> list[str]:
    key = f"rw:req:{{{request_id}}}"
    return [key, f"{key}:epoch", f"{key}:lease", f"{key}:log"]


def session_key(session_id: str) -> str:
    return f"rw:session:{{{session_id}}}"


def block_key(model: str, block: str) -> str:
    return f"rw:kv:{model}:{block}"


def quota_key(tenant: str) -> str:
    return f"rw:quota:{{{tenant}}}"
