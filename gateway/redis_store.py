"""The Store in Redis, for several gateway processes. Each call is one Lua script, so it is atomic.

Redis gone means degraded, not down: this process counts by itself until Redis answers again, says so once per outage, and limits
hold per process meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from gateway.store import Grant, MemoryStore

log = logging.getLogger("moorage")

# A request waits for this at most; a Redis slower than that costs more than it gives.
TIMEOUT_S = 0.5
# Commands take ~0.1 ms, so a few connections carry thousands of requests a second; a burst waits for one instead of failing.
CONNECTIONS, POOL_WAIT_S = 16, 5.0
RETRY_S = 2.0  # seconds of counting alone before Redis is tried again

# KEYS[1] counter; ARGV amount, limit, window in ms. Returns {ok, used, ms until the window ends}; a window starts with its first
# booking.
TAKE = """
local used = tonumber(redis.call('GET', KEYS[1]) or '0')
local amount, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
local left = redis.call('PTTL', KEYS[1])
if left < 0 then used = 0; left = tonumber(ARGV[3]) end
if amount > 0 and used + amount > limit then return {0, tostring(used), left} end
used = math.max(0, used + amount)
redis.call('SET', KEYS[1], tostring(used), 'PX', left)
return {1, tostring(used), left}
"""


class RedisStore:
    """Implements gateway.store.Store."""

    def __init__(
        self, url: str, prefix: str = "moorage:", timeout: float = TIMEOUT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # Once more on a fresh connection: after a restart of Redis every pooled one is dead, and each of them would look like
        # another outage. A Redis that hangs is not asked twice.
        again = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
        pool = aioredis.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=POOL_WAIT_S,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=again,
        )
        self._client = aioredis.Redis.from_pool(pool)
        self._take = self._client.register_script(TAKE)
        self._prefix, self._clock = prefix, clock
        self._alone = MemoryStore()
        self._retry_at = 0.0
        self.degraded = False

    async def take(self, name: str, amount: float, limit: float, window: float) -> Grant:
        bound = min(limit, 1e300)  # Lua reads no infinity

        async def ask() -> Grant:
            ok, used, left = await self._take(keys=[self._prefix + name], args=[amount, bound, max(1, int(window * 1000))])
            return Grant(bool(ok), max(0.0, limit - float(used)), 0.0 if ok else left / 1000)

        return await self._or_alone(ask, lambda: self._alone.take(name, amount, limit, window))

    async def put(self, name: str, value: bytes, ttl: float) -> None:
        async def ask() -> None:
            await self._client.set(self._prefix + name, value, px=max(1, int(ttl * 1000)))

        await self._or_alone(ask, lambda: self._alone.put(name, value, ttl))

    async def get(self, name: str) -> bytes | None:
        return await self._or_alone(lambda: self._client.get(self._prefix + name), lambda: self._alone.get(name))

    async def _or_alone(self, ask: Callable[[], Awaitable[Any]], alone: Callable[[], Awaitable[Any]]) -> Any:
        if self.degraded and self._clock() < self._retry_at:
            return await alone()
        if self.degraded:
            self._retry_at = self._clock() + RETRY_S  # one request asks whether it is back, the others do not wait for that
        try:
            value = await ask()
        except (RedisError, OSError, TimeoutError) as e:
            self._retry_at = self._clock() + RETRY_S
            if not self.degraded:
                self.degraded = True
                log.error("redis is gone (%s): limits hold per process until it is back; check store.redis", type(e).__name__)
            return await alone()
        if self.degraded:
            self.degraded = False
            log.warning("redis is back: limits are shared again")
        return value

    async def close(self) -> None:
        await self._client.aclose()
        await self._alone.close()
