"""Prepares the next turn: when an answer ends, computes the history as the client will send it.

Templates drop thoughts, re-format calls and close empty thoughts their own way, so the tokens that were sampled are often not
the ones the next request begins with. While the agent runs its tool or the user reads, the difference is prefilled from the
nearest kept state as background work, which yields to every request. (DESIGN: canonical continuation.)
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from engine.api.answer import Choice, message_of
from engine.api.plan import ChatPlan
from engine.api.service import Service
from engine.ipc import BACKGROUND, Anchor, Done, Generate, token_array
from engine.protocol import log_line
from engine.text.messages import MessageError, normalise
from engine.text.text_model import TextModel

log = logging.getLogger("moorage.api")

# Sessions that wait for their next turn at one time; more would only compete with each other for the same memory.
MAX_RUNNING = 8


@dataclass
class Continuations:
    """The background prefills of one server. A request of the same session ends what still runs for it."""

    service: Service
    _running: dict[asyncio.Task[None], str] = field(default_factory=dict)

    def request_arrived(self, session: str) -> None:
        for task, owner in list(self._running.items()):
            if session and owner == session:
                task.cancel()

    def answer_ended(self, text: TextModel, plan: ChatPlan, choice: Choice, ident: str) -> None:
        """Start preparing. Does nothing for work of low priority, or when enough is being prepared already."""
        if plan.hints.priority < 0:
            return
        if len(self._running) >= MAX_RUNNING:
            self.service.metrics.continuations.labels("skipped").inc()
            return
        task = asyncio.create_task(self._prepare(text, plan, choice, ident))
        self._running[task] = plan.session
        task.add_done_callback(lambda t: self._running.pop(t, None))

    async def close(self) -> None:
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _prepare(self, text: TextModel, plan: ChatPlan, choice: Choice, ident: str) -> None:
        loop = asyncio.get_running_loop()
        variants = await loop.run_in_executor(self.service.text_thread, continuations, text, plan, choice)
        live = plan.tokens + choice.sampled
        outcome = "as sampled"
        for number, (name, tokens) in enumerate(variants):
            common = common_prefix(live, tokens)
            # The state behind the answer (its last token is never computed) is of use only if the history begins with all of it:
            # where one token differs, a recurrent model would go back to the turn before.
            if common >= len(live) - 1 or len(tokens) >= self.service.engine.state.max_context:
                continue
            outcome = "prefilled"
            log.info("%s", log_line("next turn prepared", req=ident, variant=name, tokens=len(tokens), common=common))
            await self._prefill(plan, tokens, f"{ident}-next-{number}")
        self.service.metrics.continuations.labels(outcome).inc()

    async def _prefill(self, plan: ChatPlan, tokens: list[int], ident: str) -> None:
        request = Generate(
            id=ident,
            tokens=token_array(tokens),
            max_new=0,
            anchors=(Anchor(offset=len(tokens), kind="turn", weight=0.9),),
            session=plan.session,
            priority=BACKGROUND,
        )
        with self.service.engine.generate(request) as stream:
            async for message in stream:
                if isinstance(message, Done):
                    return


def common_prefix(a: list[int], b: list[int]) -> int:
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    return next(i for i in range(limit) if a[i] != b[i])


def continuations(text: TextModel, plan: ChatPlan, choice: Choice) -> list[tuple[str, list[int]]]:
    """(name, tokens) of the histories the next request may begin with: thought kept, thought stripped."""
    message = message_of(choice.said)
    variants: list[tuple[str, dict[str, Any]]] = []
    if "reasoning_stripped" not in plan.hints.expect or "reasoning_content" not in message:
        variants.append(("kept", message))
    if "reasoning_content" in message:
        variants.append(("stripped", {k: v for k, v in message.items() if k != "reasoning_content"}))
    out: list[tuple[str, list[int]]] = []
    for name, answer in variants:
        try:
            (clean,) = normalise([answer], text.thinking.close).messages
        except MessageError as e:
            log.warning("%s", log_line("the answer cannot be sent back as it is", field=e.param, why=str(e)))
            continue
        builder = text.builder_for(plan.tools)
        assert builder is not None
        tokens = builder.history([*plan.messages, clean], plan.tools, plan.template_arguments)
        if tokens and all(tokens != known for _, known in out):
            out.append((name, tokens))
    return out
