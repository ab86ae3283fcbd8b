"""Nothing of a request stays behind, however it ended: neither objects nor bytes grow with the number of requests."""

import asyncio
import gc
import logging
import tracemalloc

import pytest
import uvloop

from gateway.answer import Answer
from gateway.dialects.items import Items
from gateway.toolcheck_watch import ToolWatch
from tests.support.fake_upstream import FakeUpstream, Stream, Whole, content, finish, message, tool_call, usage
from tests.support.gateway import Gateway, ask, settings

TOOL = {
    "type": "function",
    "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}
LONG = "x" * 4000  # what is kept of a request shows
ROUNDS = 60


async def ended_well(gw: Gateway, up: FakeUpstream) -> None:
    up.script(Stream([content("Hi"), finish(), usage(3, 1, 2)]))
    assert (await gw.post(ask(LONG, stream=True))).text() == "Hi"


async def whole(gw: Gateway, up: FakeUpstream) -> None:
    up.script(Whole(message("Hi")))
    assert (await gw.post(ask(LONG))).status == 200


async def calls(gw: Gateway, up: FakeUpstream) -> None:
    up.script(Stream([tool_call(0, '{"path":', "call_1", "read"), tool_call(0, '"a"}'), finish("tool_calls")]))
    assert (await gw.post(ask(LONG, stream=True, tools=[TOOL]))).status == 200


async def translated(gw: Gateway, up: FakeUpstream) -> None:
    up.script(Stream([content("Hi"), finish(), usage(3, 1, 2)]))
    body = {"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": LONG}]}
    assert (await gw.post(body, "/v1/messages")).status == 200


async def refused(gw: Gateway, up: FakeUpstream) -> None:
    assert (await gw.post(ask(LONG) | {"model": 7})).status == 400


async def died(gw: Gateway, up: FakeUpstream) -> None:
    up.script(Stream([content("Hi")], die_after=1))
    assert (await gw.post(ask(LONG, stream=True))).events[-1]["error"]["code"] == "upstream_died"


async def left(gw: Gateway, up: FakeUpstream) -> None:
    up.script(Stream([content("Hi"), 30.0]))
    async with gw.http.post(gw.url + "/v1/chat/completions", json=ask(LONG, stream=True)) as r:
        await r.content.readany()
        r.close()
    while gw.app.pipeline.limits.status()["running"]:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("end", [ended_well, whole, calls, translated, refused, died, left])
def test_nothing_of_a_request_stays_behind(end, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("gateway.client.WATCH_AFTER_S", 0.001)
    monkeypatch.setattr(logging.getLogger("moorage"), "disabled", True)  # pytest keeps every record it sees
    gc.collect()
    gc.freeze()  # what other tests left is neither counted nor looked through again: the collections below took minutes
    try:
        # On the loop that the gateway runs on: asyncio's own keeps cancelled timers for a while.
        before, later = uvloop.run(counted(end, tmp_path))
    finally:
        gc.unfreeze()
    # A leak is at least one object and the request's text for every request.
    assert later[0] - before[0] < ROUNDS / 2
    assert later[1] - before[1] < ROUNDS * len(LONG) / 4


async def translated_calls(gw: Gateway, up: FakeUpstream) -> None:
    up.script(Stream([tool_call(0, '{"path":', "call_1", "read"), tool_call(0, '"a"}'), finish("tool_calls")]))
    tool = {"name": "read", "input_schema": TOOL["function"]["parameters"]}
    body = {"model": "m", "max_tokens": 9, "stream": True, "tools": [tool], "messages": [{"role": "user", "content": LONG}]}
    assert (await gw.post(body, "/v1/messages")).status == 200


@pytest.mark.parametrize("end", [ended_well, whole, calls, translated, translated_calls])
def test_what_was_known_of_an_answer_goes_with_it_and_waits_for_no_collection(end, tmp_path) -> None:
    """Bodies of 200 KB hang on it, and a busy gateway looks for cycles once in 50,000 objects."""

    async def still_there() -> int:
        async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw:
            for _ in range(10):
                await end(gw, up)
            while gw.app.pipeline.limits.status()["running"] or gw.app.pipeline.records.written < 10:
                await asyncio.sleep(0.01)
            # of the newest request uvicorn may still hold something
            return sum(isinstance(o, (Answer, Items, ToolWatch)) for o in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        assert uvloop.run(still_there()) <= 3
    finally:
        gc.enable()


async def counted(end, tmp_path) -> tuple[tuple[int, int], tuple[int, int]]:
    """(objects, bytes) before and after ROUNDS requests."""
    async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw:

        async def after(rounds: int) -> tuple[int, int]:
            for _ in range(rounds):
                await end(gw, up)
            while gw.app.pipeline.records._queue:
                await asyncio.sleep(0.01)
            up.requests.clear()
            found = []
            for _ in range(10):  # connections take a moment to be gone
                await asyncio.sleep(0.02)
                gc.collect()
                found.append((len(gc.get_objects()), tracemalloc.get_traced_memory()[0]))
            return min(found)

        await after(ROUNDS)  # caches, pools and tables get their size
        tracemalloc.start()
        try:
            await after(1)
            return await after(1), await after(ROUNDS)
        finally:
            tracemalloc.stop()
