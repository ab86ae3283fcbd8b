"""Who may ask, and how much. `admit` stands first in the pipeline after reading, `settle` runs whatever happened.

With no keys configured everybody is `anonymous`, which is why the gateway binds to loopback by default. Keys are kept as hashes
only. Rates and budgets are booked in the store (shared between processes when it is Redis), places in this process.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.answer import Answer
from gateway.config import Key, LimitRules
from gateway.errors import Refusal
from gateway.fairness import FairLine, Full
from gateway.store import Store
from gateway.turn import Caller, Turn

CHARS_PER_TOKEN = 4  # the estimate booked before the upstream has counted; corrected when it has
MINUTE, DAY = 60.0, 86400.0
BATCH_HEADER = "x-moorage-priority"  # `batch`: this request may wait behind interactive ones


@dataclass(slots=True)
class Lease:
    """What a turn holds: a place in the line, and tokens booked by estimate."""

    key: Key | None
    place: str
    tokens: int = 0
    settled: bool = False


class Limits:
    def __init__(self, keys: tuple[Key, ...], rules: LimitRules, store: Store) -> None:
        self._keys = [(_digest(k), k) for k in keys]
        self._rules, self._store = rules, store
        self._line = FairLine(rules.concurrency, rules.waiting, {k.name: k.concurrency for k in keys})

    async def admit(self, turn: Turn) -> Turn:
        """The turn with its caller and lease. Raises Refusal: 401 unknown key, 403 model not allowed, 429 with Retry-After."""
        key = self.key(turn.received.headers)
        name = key.name if key else "anonymous"
        caller = Caller(name, bool(key and key.admin))
        lease = Lease(key, name)
        if key is not None:
            _check_model(key, turn.model)
            await self._book(key, turn, lease)
        try:
            await self._wait(turn, key, name)
        except BaseException:
            await self._give_back(lease, 0)
            raise
        return turn.but(caller=caller, lease=lease)

    async def settle(self, turn: Turn, answer: Answer) -> None:
        """The turn is over: leave the place, correct the booked tokens by the real ones, book the cost."""
        lease = turn.lease
        if not isinstance(lease, Lease) or lease.settled:
            return
        lease.settled = True
        self._line.leave(lease.place)
        usage = answer.usage or {}
        used = _count(usage, "prompt_tokens") + _count(usage, "completion_tokens")
        await self._give_back(lease, used if usage else lease.tokens if answer.first_byte else 0)
        if lease.key is not None and lease.key.budget is not None and answer.attempts:
            cost = price(usage, answer.attempts[-1].deployment.control)
            if cost:
                await self._store.take(f"budget:{lease.key.name}", cost, math.inf, lease.key.budget_days * DAY)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Who sent these headers. Raises Refusal 401."""
        key = self.key(headers)
        return Caller(key.name, key.admin) if key else Caller()

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return self._line.length

    def status(self) -> dict[str, Any]:
        return {"running": dict(self._line.running), "waiting": self._line.length}

    # --- keys

    def key(self, headers: Mapping[str, str]) -> Key | None:
        """Whose key `Authorization: Bearer` or `x-api-key` is, hashed and compared in constant time with every key.

        None where no keys are configured. Raises Refusal 401.
        """
        if not self._keys:
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _sha256(given)
        found = [key for known, key in self._keys if hmac.compare_digest(known, digest)]
        if not found:
            cause = "The API key is not known here" if given else "No API key was sent"
            raise Refusal(401, cause, "Send one of the configured keys as `Authorization: Bearer KEY`", code="invalid_api_key")
        return found[0]

    # --- rates and budgets

    async def _book(self, key: Key, turn: Turn, lease: Lease) -> None:
        if key.budget is not None:
            grant = await self._store.take(f"budget:{key.name}", 0.0, key.budget, key.budget_days * DAY)
            if grant.remaining <= 0:
                raise _too_much(f"The budget of key {key.name} ({key.budget:g} in {key.budget_days:g} days) is used up", DAY)
        if key.rpm is not None:
            grant = await self._store.take(f"rpm:{key.name}", 1, key.rpm, MINUTE)
            if not grant.ok:
                raise _too_much(f"Key {key.name} may send {key.rpm} requests a minute", grant.wait)
        if key.tpm is not None:
            tokens = min(len(turn.received.body) // CHARS_PER_TOKEN, key.tpm)  # one large request must fit an empty minute
            grant = await self._store.take(f"tpm:{key.name}", tokens, key.tpm, MINUTE)
            if not grant.ok:
                raise _too_much(f"Key {key.name} may use {key.tpm} tokens a minute", grant.wait)
            lease.tokens = tokens

    async def _give_back(self, lease: Lease, used: int) -> None:
        if lease.key is not None and lease.key.tpm is not None and used != lease.tokens:
            await self._store.take(f"tpm:{lease.key.name}", used - lease.tokens, math.inf, MINUTE)

    async def _wait(self, turn: Turn, key: Key | None, name: str) -> None:
        asked = turn.received.headers.get(BATCH_HEADER, key.priority if key else "")
        kind = "batch" if asked == "batch" else "interactive"
        if self._line.enter_now(name):
            return
        try:
            async with asyncio.timeout(self._rules.wait):
                await self._line.enter(name, kind)
        except Full:
            raise _too_much(f"{self._line.length} requests wait already, the limit is {self._rules.waiting}", 5) from None
        except TimeoutError:
            raise _too_much(f"No place became free within {self._rules.wait:g} s", self._rules.wait) from None


_EMPTY = hashlib.sha256()  # a copy costs a fifth of a new one, which OpenSSL looks up by its name


def _sha256(text: str) -> bytes:
    made = _EMPTY.copy()
    made.update(text.encode())
    return made.digest()


def _digest(key: Key) -> bytes:
    """`sha256:HEX` in the file is the hash itself; anything else is hashed now and not kept."""
    value = key.key.reveal()
    return bytes.fromhex(value[7:]) if value.startswith("sha256:") else _sha256(value)


def _check_model(key: Key, model: str) -> None:
    if not key.may(model):
        raise Refusal(
            403,
            f"Key {key.name} may not use model {model[:80]!r}",
            f"It may use {', '.join(key.models)}",
            code="model_not_allowed",
        )


def _too_much(message: str, wait: float) -> Refusal:
    seconds = max(1, math.ceil(wait))
    return Refusal(429, message, f"Try again in {seconds} s", code="rate_limit_exceeded", headers={"retry-after": str(seconds)})


def _count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def price(usage: Mapping[str, Any], prices: Mapping[str, Any]) -> float:
    """What an answer cost by LiteLLM's per-token prices of its deployment; reused tokens at their own price when one is given."""

    def per(name: str, otherwise: float = 0.0) -> float:
        value = prices.get(name)
        return float(value) if isinstance(value, int | float) else otherwise

    details = usage.get("prompt_tokens_details")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else 0
    fresh = max(0, _count(usage, "prompt_tokens") - cached)
    full = per("input_cost_per_token")
    return (
        fresh * full
        + cached * per("cache_read_input_token_cost", full)
        + _count(usage, "completion_tokens") * per("output_cost_per_token")
    )
