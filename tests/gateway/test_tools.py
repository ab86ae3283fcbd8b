"""Equal tool lists become one shared list, and what follows from it is made once."""

import copy
import json

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import NormaliseRule
from gateway.config_file import parse
from gateway.dialects.base import loads
from gateway.dialects.chat import Chat
from gateway.edits import apply, render
from gateway.errors import Refusal
from gateway.pipeline import build
from gateway.policy import normalise
from gateway.tools import KnownTools, Tools, derived
from gateway.turn import Received, Turn

TOOLS = [
    {
        "function": {"parameters": {"type": "object", "properties": {"b": {}, "a": {"type": "string"}}}, "name": name},
        "type": "function",
    }
    for name in ("write", "read", "bash")
]


def turn(tools, **more) -> Turn:
    body = {"model": "m", "messages": [{"role": "user", "content": "q"}], "tools": tools, "stream": True} | more
    received = Received(route="/", headers={}, body=orjson.dumps(body))
    return Chat().read(Turn(id="r", received=received, dialect=Chat()))


def test_equal_lists_are_shared_and_different_ones_are_not() -> None:
    known = KnownTools()
    first, again = (known.stage(turn(copy.deepcopy(TOOLS))) for _ in range(2))
    assert first.body["tools"] is again.body["tools"] == TOOLS and first.parsed["tools"] is first.body["tools"]
    assert first.body["stream_options"] == {"include_usage": True}  # earlier decisions stay
    shuffled = known.stage(turn(TOOLS[::-1]))
    assert shuffled.body["tools"] == TOOLS[::-1] and shuffled.body["tools"] is not first.body["tools"]


def test_derived_is_made_once_a_list_and_name() -> None:
    made = []
    tools = Tools(TOOLS)
    for name in ("a", "a", "b"):
        derived(tools, name, lambda name=name: made.append(name))
    derived(list(tools), "a", lambda: made.append("plain"))
    assert made == ["a", "b", "plain"]


@given(st.permutations(range(len(TOOLS))), st.booleans(), st.sampled_from([b"", b" "]))
def test_shared_tools_are_normalised_and_rendered_as_fresh_ones_are(order, schemas, space) -> None:
    """What was remembered for one spelling of the request is never sent for another."""
    known, rule = KnownTools(), NormaliseRule(tool_schemas=schemas)
    for gap in (b"", b" ", space):
        raw = orjson.dumps({"model": "m", "messages": [], "tools": [TOOLS[i] for i in order]}).replace(
            b'"tools":', b'"tools":' + gap
        )
        raw = raw.replace(b'{"type"', b"{" + gap + b'"type"')
        fresh = orjson.loads(raw)
        shared = fresh | {"tools": known.get(fresh["tools"])}
        plain, ours = (apply(b, [e for d in normalise.decide(b, rule) for e in d.edits]) for b in (fresh, shared))
        assert render(raw, shared, ours) == render(raw, fresh, plain)


def test_memory_is_bounded_by_bytes() -> None:
    known = KnownTools(keep=1000)
    big = [{"type": "function", "function": {"name": "x" * 2000}}]
    assert known.get(big) is big
    for i in range(100):
        known.get([{"type": "function", "function": {"name": f"{i:0100}"}}])
    assert known._size <= 1000 and sum(map(len, known._lists)) == known._size


def test_tools_nested_beyond_json_are_left_alone() -> None:
    deep: list = []
    for _ in range(2000):
        deep = [deep]
    assert KnownTools().get(deep) is deep


JSON = st.recursive(st.none() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=5)
PADDING = {"function": {"name": "long", "description": "é" * 3000}}


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4), st.lists(JSON, max_size=3), st.data())
def test_bodies_parse_as_they_would_at_once(body, tools, data) -> None:
    """Whole, with white space, or broken anywhere; a key that stands twice is refused."""
    raw = json.dumps(
        body | {"tools": [*tools, PADDING]}, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1]))
    )
    raw = raw.encode("utf-8", "surrogatepass")
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw = raw[:at] + data.draw(st.sampled_from([b"", b"\xff", b'"tools":1,', b"}", b"\\ud800"])) + raw[at:]
    try:
        want = orjson.loads(raw)
    except orjson.JSONDecodeError:
        want = None
    try:
        got = loads(raw, KnownTools())[0]
    except Refusal as refusal:
        assert want is None or not isinstance(want, dict) or _some_key_twice(raw), refusal.text
    else:
        assert want is None or (got == want and list(got) == list(want))  # None: half an emoji, which was mended


def _some_key_twice(raw: bytes) -> bool:
    names: list[str] = []
    json.loads(raw, object_pairs_hook=lambda pairs: names.__setitem__(slice(None), [k for k, _ in pairs]))
    return len(names) > len(set(names))


def test_tools_that_came_before_are_not_parsed_again() -> None:
    raw = orjson.dumps({"model": "m", "messages": [], "tools": [PADDING, {"function": {"name": "apart"}}]})
    known = KnownTools()
    first, again = loads(raw, known)[0], loads(raw, known)[0]
    assert isinstance(first["tools"], Tools) and first["tools"] is again["tools"] and first == orjson.loads(raw)
    assert loads(raw, KnownTools())[0]["tools"] is not first["tools"]  # another gateway's


async def test_two_gateways_in_one_process_share_no_tools() -> None:
    config = parse({"records": {"path": ""}}, "test", {})
    one, two = build(config), build(config)
    stages = {stage.__self__ for p in (one, two) for stage in p.before if isinstance(getattr(stage, "__self__", 0), KnownTools)}
    known = {dialect._known for p in (one, two) for dialect in p.dialects.values()}
    assert known == stages and len(known) == 2
    for pipeline in (one, two):
        await pipeline.close()
