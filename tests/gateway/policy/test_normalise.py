"""Normalising for the cache: what differs without meaning is gone, the rest keeps its bytes, and every change is a decision."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import NormaliseRule
from gateway.edits import apply, render
from gateway.policy import claude
from gateway.policy.normalise import decide
from gateway.policy.volatile import KINDS, cut, put
from tests.support.fake_upstream import FakeUpstream, Whole, message
from tests.support.gateway import Gateway, settings

NONE = NormaliseRule(tool_order=False, cache_marks=False, billing_header="keep", token_counters="keep")
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;"


def body(system: Any = "S", user: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]} | more


def done(given: dict[str, Any], **rule: Any) -> tuple[dict[str, Any], list[str]]:
    decisions = decide(given, NormaliseRule(**rule))
    return apply(given, [e for d in decisions for e in d.edits]), [d.rule for d in decisions]


def texts(given: dict[str, Any]) -> list[Any]:
    return [m["content"] for m in given["messages"]]


# --- volatile text


def test_the_billing_nonce_never_enters_the_prompt() -> None:
    for system in (
        f"{BILLING}\n\nYou are",
        f"You are\n\n{BILLING}",
        [{"type": "text", "text": BILLING}, {"type": "text", "text": "You are"}],
    ):
        after, rules = done(body(system))
        assert BILLING not in json.dumps(after) and "You are" in json.dumps(after) and rules == ["billing_header.drop"]
    mentioned = "The x-anthropic-billing-header: is a header"
    assert done(body(mentioned)) == (body(mentioned), [])


def test_token_counters_leave_no_trace_wherever_they_stand() -> None:
    counter = "<total_tokens>178231 tokens left</total_tokens>"
    for user in (f"hi\n\n{counter}", f"{counter}\nhi", f"hi\n  {counter}  "):
        after, rules = done(body("S", user))
        assert texts(after) == ["S", "hi"] and rules == ["token_counters.drop"]
    after, _ = done(body("S", f"a\n{counter}\nb"))
    assert texts(after) == ["S", "a\nb"]
    for kept in (f"what does `{counter}` mean?", counter):
        assert done(body("S", kept)) == (body("S", kept), [])
    result = {"role": "tool", "tool_call_id": "1", "content": f"x\n{counter}"}
    assert done({"messages": [result]})[0] == {"messages": [result]}


CLOCKS = [
    "Today's date is 2026-11-29.",
    "Current time: 17:05:33 UTC",
    "The current date and time is Sunday, Nov 29, 2026, 5:05 PM",
    "# now: 2026-11-29T17:05:33Z",
    "  timestamp=1.2.2026",
]
NO_CLOCKS = ["Do it in time.", "Use port 8080:80 now", "See 2026-11-29-notes.md", "The date is important", "runtime 10:20"]


@pytest.mark.parametrize("line", CLOCKS)
def test_clocks_are_found(line) -> None:
    assert cut(f"You are.\n{line}\nBe brief.", "clock") == ("You are.\nBe brief.", (f"{line}\n",))


@pytest.mark.parametrize("line", [line for line in NO_CLOCKS if "now" not in line])
def test_other_lines_are_no_clocks(line) -> None:
    assert cut(f"You are.\n{line}\nBe brief.", "clock")[1] == ()


def test_a_clock_is_moved_behind_everything_else() -> None:
    given = body("You are.\nCurrent time: 17:05\nBe brief.", "hi")
    after, rules = done(given, clock="move")
    assert texts(after) == ["You are.\nBe brief.", "hi\n\nCurrent time: 17:05"] and rules == ["clock.move"]
    listed, _ = done(body("You are.\nCurrent time: 17:05", [{"type": "text", "text": "hi"}]), clock="move")
    assert texts(listed)[1] == [{"type": "text", "text": "hi"}, {"type": "text", "text": "Current time: 17:05"}]
    given["messages"].append({"role": "assistant", "content": "The"})
    assert done(given, clock="move") == (given, []), "never into the assistant's own text"


def test_an_environment_block_is_found_whole() -> None:
    block = "<env>\nWorking directory: /x\nToday's date: 2026-11-29\n</env>"
    after, rules = done(body(f"You are.\n{block}\nBe brief."), environment="move", clock="keep")
    assert texts(after) == ["You are.\nBe brief.", f"hi\n\n{block}"] and rules == ["environment.move"]


def test_off_means_off() -> None:
    given = body(f"{BILLING}\nCurrent time: 17:05\n<env>x</env>", tools=[tool("b"), tool("a") | {"cache_control": {}}])
    assert decide(given, NONE) == ()


@given(st.sampled_from(sorted(KINDS)), st.lists(st.sampled_from(["You are.", BILLING, *CLOCKS, "<env>x</env>", "", "a <b>"])))
def test_putting_back_what_was_cut_changes_nothing(kind, lines) -> None:
    text = "\n".join(lines)
    rest, found = cut(text, kind)
    assert put(text, kind, found) == text
    assert cut(rest, kind)[1] == () or len(rest) < len(text)


# --- tools and marks


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"} | parameters}}


BYTES = '{"function": {"parameters":{ }, "name":"NAME"},"type":"function" }'


@given(st.permutations("abcd"))
def test_tools_come_in_one_order_and_keep_their_bytes(names) -> None:
    tools = ", ".join(BYTES.replace("NAME", n) for n in names)
    raw = f'{{ "messages":[{{"role":"user","content":"q"}}], "tools":[{tools}] }}'.encode()
    given = json.loads(raw)
    after, rules = done(given)
    assert [t["function"]["name"] for t in after["tools"]] == list("abcd")
    assert rules == ([] if list(names) == list("abcd") else ["tools"])
    sent = render(raw, given, after)
    assert BYTES.replace("NAME", "a").encode() in sent and json.loads(sent) == after


def shuffled(value: Any, data: st.DataObject, named: bool = False) -> Any:
    if not isinstance(value, dict):
        return value
    keys = list(value) if named else data.draw(st.permutations(list(value)))
    return {k: shuffled(value[k], data, named=k == "properties" and not named) for k in keys}


@given(st.data())
def test_shuffled_keys_become_the_same_bytes_and_properties_keep_their_order(data) -> None:
    zebra = {"type": "string", "description": "z", "enum": ["b", "a"]}
    given = tool(
        "t", properties={"zebra": zebra, "apple": {"type": "object", "properties": {"b": {}, "a": {}}}}, required=["zebra"]
    )
    plain, _ = done({"messages": [], "tools": [given]}, tool_schemas=True)
    mixed, rules = done({"messages": [], "tools": [shuffled(given, data)]}, tool_schemas=True)
    assert json.dumps(mixed) == json.dumps(plain) and set(rules) <= {"tools"}
    assert list(mixed["tools"][0]["function"]["parameters"]["properties"]) == ["zebra", "apple"]


def test_cache_marks_that_move_leave_the_same_body() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    plain = body([{"type": "text", "text": "s"}], [{"type": "text", "text": "u"}], tools=[tool("a")])
    marked = [
        body([{"type": "text", "text": "s"} | mark], [{"type": "text", "text": "u"}], tools=[tool("a") | mark]),
        body([{"type": "text", "text": "s"}], [{"type": "text", "text": "u"} | mark], tools=[tool("a")]),
    ]
    marked.append(body([{"type": "text", "text": "s"}], [{"type": "text", "text": "u"}], tools=[tool("a")]))
    marked[2]["messages"][1] |= mark
    for one in marked:
        assert done(one) == (plain, ["cache_marks"])


# --- through the gateway


@pytest.fixture
async def up():
    async with FakeUpstream() as fake:
        fake.script(Whole(message()))
        yield fake


def with_rule(up: FakeUpstream, **rule: Any) -> dict[str, Any]:
    return settings(up.base, "openai", policies=[{"normalise": rule}])


def turn(second: int, *, thinking: str = "none", system: str = "You are.") -> dict[str, Any]:
    given = body(f"{system}\nCurrent time: 17:30:{second:02}\n<env>{second}</env>", f"q{second}")
    return given | {"tools": [tool("a")], "reasoning_effort": thinking}


async def test_pinned_text_is_the_sessions_first(up, tmp_path) -> None:
    async with Gateway(with_rule(up, clock="pin", environment="pin"), tmp_path) as gw:
        for second in (1, 2):
            await gw.post(turn(second), x_moorage_session="s1")
        other = await gw.post(turn(3), x_moorage_session="s2")
        await gw.post(turn(4, system="You are a sub-agent."), x_moorage_session="s1")
        await gw.post({k: v for k, v in turn(5).items() if k != "tools"}, x_moorage_session="s1")
        records = await gw.records(5)
    seconds = [[c for c in "12345" if f":0{c}" in r.json["messages"][0]["content"]] for r in up.requests]
    assert seconds == [["1"], ["1"], ["3"], ["4"], ["5"]], "another session, prompt or a side request has its own time"
    assert up.requests[1].json["messages"][0] == up.requests[0].json["messages"][0]
    assert [d["rule"] for d in records[1]["decisions"] if d["stage"] == "normalise"] == ["clock.pin", "environment.pin"]
    assert "normalise" not in other.headers["x-moorage-decisions"]


async def test_thinking_is_pinned_only_when_asked_for_and_never_against_a_policy(up, tmp_path) -> None:
    async with Gateway(with_rule(up, pin_thinking=True), tmp_path) as gw:
        for effort in ("none", "high", "none"):
            got = await gw.post(turn(1, thinking=effort), x_moorage_session="s1")
            assert ("normalise.thinking.pin" in got.headers["x-moorage-decisions"]) == (effort == "high")
    assert [r.json["chat_template_kwargs"]["enable_thinking"] for r in up.requests] == [False] * 3
    forced = with_rule(up, pin_thinking=True)
    forced["policies"].append({"key": "anonymous", "thinking": {"force": "on"}})
    async with Gateway(forced, tmp_path) as gw:
        await gw.post(turn(1), x_moorage_session="s1")
    assert up.requests[-1].json["chat_template_kwargs"]["enable_thinking"] is True


async def test_marks_of_chat_clients_become_hints_and_are_not_sent(up, tmp_path) -> None:
    parts = [{"type": "text", "text": "u", "cache_control": {"type": "ephemeral"}}]
    async with Gateway(settings(up.base), tmp_path) as gw:
        got = await gw.post(body("S", parts))
    assert "normalise.cache_marks" in got.headers["x-moorage-decisions"] and b"cache_control" not in up.requests[0].body
    assert {"message": 1, "edge": "end", "kind": "client_breakpoint", "weight": 0.9} in up.requests[0].json["moorage"]["anchors"]


async def test_rules_differ_by_route(up, tmp_path) -> None:
    data = settings(up.base, policies=[{"route": "/v1/messages", "normalise": {"billing_header": "keep"}}])
    async with Gateway(data, tmp_path) as gw:
        await gw.post(body(f"{BILLING}\nS"))
        asked = {"model": "m", "max_tokens": 9, "system": f"{BILLING}\nS", "messages": [{"role": "user", "content": "q"}]}
        await gw.post(asked, "/v1/messages")
    assert [r.json["messages"][0]["content"] for r in up.requests] == ["S", f"{BILLING}\nS"]


def test_claude_behind_a_provider_gets_its_marks_back() -> None:
    from engine.protocol import AnchorHint

    hints = [AnchorHint(message=m, kind="client_breakpoint", weight=w) for m, w in ((-1, 0.9), (0, 1.0), (1, 0.9))]
    given = body("S", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], tools=[tool("a"), tool("b")])
    (decision,) = claude.mark(given, hints)
    after = apply(given, decision.edits)
    assert [("cache_control" in t) for t in after["tools"]] == [False, True]
    hour = {"type": "ephemeral", "ttl": "1h"}
    assert after["messages"][0]["content"] == [{"type": "text", "text": "S", "cache_control": hour}]
    assert [p.get("cache_control") for p in after["messages"][1]["content"]] == [None, {"type": "ephemeral"}]


def test_signed_blocks_go_to_providers_only() -> None:
    given = {"messages": [{"role": "assistant", "content": "a", "reasoning_content": "t", "thinking_blocks": [{}]}]}
    (decision,) = claude.unsigned(given)
    assert apply(given, decision.edits) == {"messages": [{"role": "assistant", "content": "a", "reasoning_content": "t"}]}
