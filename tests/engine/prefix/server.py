"""The real HTTP app over the real scheduler, decoder and prefix cache in one process; answers may be scripted.

`server.say("...")` queues what the next request samples (special tokens by their text, ended by the stop token); without it the
model speaks. The forward pass always runs, so pages and states are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np

from engine.app import create_app
from engine.build import Parts, build
from engine.cache_control import BadCommand, rebuild
from engine.config import EngineConfig
from engine.elastic import Elastic
from engine.ipc import ControlReply, Done, FromWorker, Generate, RequestError
from engine.prefix.cache import RadixCache
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.stores import stores_of
from engine.supervisor import EngineState


class Stream:
    def __init__(self, engine: Engine, request: Generate) -> None:
        self._engine, self._id = engine, request.id
        self.messages: asyncio.Queue[FromWorker] = asyncio.Queue()
        self._ended = False

    async def __aiter__(self) -> AsyncIterator[FromWorker]:
        while not self._ended:
            message = await self.messages.get()
            self._ended = isinstance(message, Done | RequestError)
            yield message

    def cancel(self, reason: str) -> None:
        self._engine.scheduler.cancel(self._id, reason)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended:
            self.cancel("client gone")
        self._engine.streams.pop(self._id, None)


class Engine:
    """What the app needs of a supervisor, without processes."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.scheduler = Scheduler(parts.prefix, parts.limits, self._now, parts.grammars)
        self.runner = Runner(self._forward, parts.library)
        self._logits: Any = None
        self.state = EngineState(phase="ready", fraction=1.0, max_context=parts.limits.max_context, vocab=parts.limits.vocab)
        self.memory = Elastic(stores_of(parts, self.scheduler))
        self.streams: dict[str, Stream] = {}
        self.first_logits: list[np.ndarray] = []  # [V] of the first token of every answer, in the order they were sampled
        self.replies: deque[list[int]] = deque()
        self._scripts: dict[str, list[int]] = {}
        self._work = asyncio.Event()
        self._failed: Exception | None = None  # what ended `run`

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _forward(self, batch: Any) -> Any:
        self._logits = self.parts.forward(batch)
        return self._logits

    def _note_logits(self, step: Any) -> None:
        at = 0
        for chunk in step:
            at += len(chunk.echo) + chunk.sample
            if chunk.sample and not chunk.seq.sampled:
                self.first_logits.append(np.array(self._logits[at - 1]))

    def generate(self, request: Generate) -> Stream:
        if request.max_new and self.replies:
            self._scripts[request.id] = self.replies.popleft()
        stream = self.streams[request.id] = Stream(self, request)
        if self._failed is not None:
            self._tell_failure(stream, request.id)
            return stream
        self.scheduler.submit(request)
        self._work.set()
        return stream

    def _tell_failure(self, stream: Stream, ident: str) -> None:
        stream.messages.put_nowait(RequestError(id=ident, status=500, code="engine", message=repr(self._failed)))

    async def control(self, verb: str, timeout: float = 30.0, **args: Any) -> ControlReply:
        prefix = self.parts.prefix
        verbs = {
            "cache.status": prefix.status,
            "cache.rebuild": lambda: rebuild(prefix, args["options"], self.memory),
            "cache.forget": lambda: prefix.delete_session(args["session"]),
        }
        try:
            return ControlReply(id="c", body=verbs[verb]())
        except BadCommand as e:
            return ControlReply(id="c", body={}, error=str(e), status=400)

    async def run(self) -> None:
        try:
            await self._run()
        except Exception as e:  # said to whoever waits or comes: nobody would ever answer them
            logging.exception("the engine failed")
            self._failed = e
            for ident, stream in self.streams.items():
                self._tell_failure(stream, ident)
            raise

    async def _run(self) -> None:
        while True:
            self.parts.prefix.tick()
            step = self.scheduler.plan()
            if step:
                outcomes = [self._scripted(c.seq, o) for c, o in zip(step, self.runner.run(step), strict=True)]
                self._note_logits(step)
                self.scheduler.commit(step, outcomes)
            for message in self.scheduler.outbox:
                if message.id in self.streams:
                    self.streams[message.id].messages.put_nowait(message)
            self.scheduler.outbox.clear()
            if not self.scheduler.busy:
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(0)

    def _scripted(self, seq: Any, outcome: Any) -> Any:
        script = self._scripts.get(seq.id)
        return outcome if script is None or outcome.token is None else outcome._replace(token=script[seq.sampled])


class Server:
    def __init__(self, engine: Engine, app: Any, http: httpx.AsyncClient) -> None:
        self.engine, self.app, self.http = engine, app, http
        self.prefix = engine.parts.prefix
        self.service = app.state.service
        suffix = self.service.text.builder.build([{"role": "user", "content": "x"}], [], {"enable_thinking": True}).suffix
        self.opens_thought = "<think>" in suffix  # the template begins the thought, not the model

    def say(self, text: str | list[int]) -> None:
        tokenizer = self.service.text.tokenizer
        tokens = tokenizer.encode(text, False) if isinstance(text, str) else list(text)
        self.engine.replies.append([*tokens, self.service.text.stop_ids[0]])

    async def chat(self, messages: list[dict[str, Any]], settle: bool = True, **body: Any) -> dict[str, Any]:
        """One chat request; `settle` waits until the engine has prepared the next turn."""
        body = {"model": "m", "messages": messages, "temperature": 0, "moorage": {"session": "s"}, **body}
        response = await self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        if settle:
            await self.settle()
        return response.json()

    async def settle(self) -> None:
        """Wait until nothing is being prepared in the background."""
        await asyncio.sleep(0)
        while running := list(self.service.continuations._running):
            await asyncio.wait(running)

    def no_background_work(self) -> None:
        self.service.continuations.answer_ended = lambda *_: None

    async def complete(self, prompt: list[int], session: str = "s", **body: Any) -> dict[str, Any]:
        body = {"model": "m", "prompt": prompt, "temperature": 0, "moorage": {"session": session}, **body}
        response = await self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()


def config(model: Path, **changes: Any) -> EngineConfig:
    defaults = {
        "kernels": "auto",
        "max_context": 4096,
        "kv_bytes": 64 << 20,
        "max_running": 4,
        "prefill_chunk": 256,
        "threads": 1,
    }
    return EngineConfig(model=str(model), **{**defaults, **changes})


@contextlib.asynccontextmanager
async def serving(
    model: Path, *, clean: bool = True, wall: Callable[[], float] = time.time, **changes: Any
) -> AsyncIterator[Server]:
    """`clean` False ends as kill -9 does once the writer's queue is empty; `wall` is the clock on the server's wall."""
    with patch.object(RadixCache.__init__, "__kwdefaults__", {**RadixCache.__init__.__kwdefaults__, "wall": wall}):
        engine = Engine(build(config(model, **changes), lambda fraction, stage: None))
    app = create_app(engine, "m", str(model), manage=False)
    await app.state.service.load_text()
    loop = asyncio.create_task(engine.run())
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine", timeout=120) as http:
            yield Server(engine, app, http)
    finally:
        loop.cancel()
        disk = engine.parts.prefix.disk
        if clean:
            engine.scheduler.shutdown()
            engine.parts.prefix.shutdown()
        elif disk is not None:
            while engine.parts.prefix.tick():
                disk.collect(wait_s=10)
            disk._store.stop(10)
        app.state.service.text_thread.shutdown()
