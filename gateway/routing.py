"""Which deployment a turn goes to, and what the next attempt is when one fails.

The joint is `Router`: `attempts` is an async generator, so retries, back-off, fallbacks and waiting are all the router's own
business; the exchange only asks for the next deployment, and reports how each attempt began and ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, Protocol

from msgspec.structs import replace

from engine.protocol import log_line
from gateway.affinity import Affinity
from gateway.answer import Attempt
from gateway.config import Config, Deployment
from gateway.errors import Refusal, UpstreamError
from gateway.turn import Turn
from gateway.upstream.base import Health

log = logging.getLogger("moorage")

KEEP_NAMES = 1024  # of models asked for; they are the clients' to choose
MAX_BACKOFF_S = 8.0
MAX_WAIT_S = 600.0  # an upstream that asks for more is asked again anyway


class Router(Protocol):
    def attempts(self, turn: Turn, made: Sequence[Attempt]) -> AsyncIterator[Deployment]:
        """The deployments to try, best first; the next is taken only after a failure that allows it. Raises Refusal (404, 503).

        `made` grows meanwhile: the turn's attempts, the newest last.
        """
        ...

    def began(self, turn: Turn, attempt: Attempt) -> None:
        """A request is on its way to `attempt.deployment`."""
        ...

    def ended(self, turn: Turn, attempt: Attempt) -> None:
        """It is over, whatever happened; `attempt.error` says how. Called exactly once for every `began`."""
        ...


@dataclass(slots=True)
class State:
    """What is known of one deployment. Times are on the router's clock."""

    running: int = 0
    failures: int = 0  # in a row
    cool_until: float = 0.0
    draining: bool = False
    started: int = 0  # requests of this minute, for its rpm
    minute: int = 0


class Balanced:
    """Prefix affinity first, then least busy; retries with jitter, cooldown, fallbacks, drain.

    A deployment that knows the longest prefix of the conversation gets it, unless it is `overload` requests busier than the
    idlest one. One that fails `allowed_fails` times in a row is left alone for `cooldown` seconds, but never the last one there
    is: a client is better served by an honest error of the only engine than by a refusal on its behalf.
    """

    def __init__(
        self,
        config: Config,
        probe: Callable[[Deployment], Awaitable[Health]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._rules, self._probe, self._clock = config, config.routing, probe, clock
        self._serving = lru_cache(KEEP_NAMES)(config.serving)
        self._states = {d.name: State() for d in config.deployments}
        self._affinity = Affinity()
        self._prober: asyncio.Task | None = None

    # --- Router

    async def attempts(self, turn: Turn, made: Sequence[Attempt] = ()) -> AsyncIterator[Deployment]:
        names = (turn.model, *self._rules.fallbacks.get(turn.model, ()))
        groups = [(name, group) for name in names if (group := self._serving(name))]
        if not groups:
            raise unknown_model(self._config, turn.model)
        offered, hopeless = False, set()  # hopeless: names of those that will not take this request at all
        for name, group in groups:
            if name != turn.model:
                log.warning("%s", log_line("fallback", model=turn.model, to=name, req=turn.id))
            tried: list[str] = []
            for number in range(self._rules.retries + 1):
                deployment = self._pick(turn, [d for d in group if d.name not in hopeless], tried)
                if deployment is None:
                    break
                if deployment.name in tried:
                    await asyncio.sleep(self._backoff(number))
                tried.append(deployment.name)
                offered = True
                # Behind a wildcard stands whatever name is asked for, which is the fallback's here.
                yield deployment if name == turn.model else replace(deployment, model=deployment.upstream_model(name))
                if made and isinstance(error := made[-1].error, UpstreamError) and error.elsewhere:
                    hopeless.add(deployment.name)
        if not offered:
            message = f"Every deployment of {turn.model} is draining or at its limit"
            raise Refusal(503, message, "Try again in a minute", code="no_deployment", headers={"retry-after": "60"})

    def began(self, turn: Turn, attempt: Attempt) -> None:
        state = self._states[attempt.deployment.name]
        state.running += 1
        minute = int(self._clock() // 60)
        state.started = state.started + 1 if state.minute == minute else 1
        state.minute = minute

    def ended(self, turn: Turn, attempt: Attempt) -> None:
        name = attempt.deployment.name
        state = self._states[name]
        state.running -= 1
        error = attempt.error
        if error is None:
            state.failures = 0
            if len(self._serving(turn.model)) > 1:
                self._affinity.remember(turn, name)
        elif isinstance(error, UpstreamError) and _its_fault(error):
            self._failed(attempt.deployment, state, error)

    # --- choosing

    def _pick(self, turn: Turn, group: Sequence[Deployment], tried: Sequence[str]) -> Deployment | None:
        """The best deployment now; those not tried yet come first. None when all drain or are at their limit."""
        open_ = [d for d in group if not self._states[d.name].draining and not self._full(d)]
        fresh = [d for d in open_ if d.name not in tried]
        now = self._clock()
        warm = [d for d in fresh if self._states[d.name].cool_until <= now]
        candidates = warm or fresh or open_
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        idlest = min(candidates, key=self._load)
        known = self._affinity.best(turn, {d.name for d in candidates})
        close = next((d for d in candidates if d.name == known), None)
        if close is not None and self._states[known].running - self._states[idlest.name].running <= self._rules.overload:
            return close
        return idlest

    def _load(self, d: Deployment) -> float:
        weight = d.control.get("weight")
        return (self._states[d.name].running + 1) / (weight if isinstance(weight, int | float) and weight > 0 else 1)

    def _full(self, d: Deployment) -> bool:
        rpm, state = d.control.get("rpm"), self._states[d.name]
        return isinstance(rpm, int | float) and state.minute == int(self._clock() // 60) and state.started >= rpm

    def _backoff(self, number: int) -> float:
        """Full jitter: many clients that failed together do not come back together."""
        return random.uniform(0, min(MAX_BACKOFF_S, self._rules.backoff * 2**number))

    # --- failures

    def _failed(self, deployment: Deployment, state: State, error: UpstreamError) -> None:
        state.failures += 1
        wait = _retry_after(error)
        if state.failures < self._rules.allowed_fails and not wait:
            return
        state.cool_until = self._clock() + (wait or self._rules.cooldown)
        log.warning("%s", log_line("cooldown", deployment=deployment.name, s=wait or self._rules.cooldown, error=error.text))
        if self._probe is not None and (self._prober is None or self._prober.done()):
            self._prober = asyncio.get_running_loop().create_task(self._probe_cooling())

    async def _probe_cooling(self) -> None:
        """Ask the cooling ones how they are; who is well again comes back before its time. Ends when none is cooling."""
        while cooling := [d for d in self._config.deployments if self._states[d.name].cool_until > self._clock()]:
            await asyncio.sleep(self._rules.probe)
            for d in cooling:
                if (await self._probe(d)).state == "ready":
                    self._states[d.name].cool_until, self._states[d.name].failures = 0.0, 0
                    log.warning("%s", log_line("recovered", deployment=d.name))

    # --- for the operator

    def drain(self, name: str, on: bool) -> bool:
        """Give a deployment no new requests (or give it some again). False when there is none of this name."""
        state = self._states.get(name)
        if state is not None:
            state.draining = on
            log.warning("%s", log_line("drain", deployment=name, on=on, running=state.running))
        return state is not None

    def status(self) -> dict[str, dict[str, Any]]:
        now = self._clock()
        return {
            name: {
                "running": s.running,
                "draining": s.draining,
                "failures": s.failures,
                "cooling_s": round(max(0.0, s.cool_until - now), 1),
            }
            for name, s in self._states.items()
        }

    async def close(self) -> None:
        if self._prober is not None:
            self._prober.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._prober


def _its_fault(error: UpstreamError) -> bool:
    """Does this failure say something about the deployment, or only about the request?"""
    return error.kind != "status" or error.status >= 500 or error.status == 429


def _retry_after(error: UpstreamError) -> float:
    """Seconds, at most ten minutes; HTTP allows a number or a date. 0 for anything else."""
    said = error.headers.get("retry-after", "0").strip()
    if said.isdigit():
        return min(MAX_WAIT_S, float(said))
    try:
        return min(MAX_WAIT_S, max(0.0, parsedate_to_datetime(said).timestamp() - time.time()))
    except (ValueError, TypeError, OverflowError):
        return 0.0


def unknown_model(config: Config, model: str) -> Refusal:
    names = sorted({d.serves for d in config.deployments})
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    return Refusal(404, f"No model {model[:80]!r} here", f"Available: {shown}", code="model_not_found", param="model")
