"""Tool-call checks: the pure core, then the filter through a real gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answer import Answer
from gateway.config import Policy, ToolRule
from gateway.dialects.chat import Chat
from gateway.sse import event, parse
from gateway.toolcheck import MAX_SCHEMA_BYTES, Toolbox, Validators, outline
from gateway.toolcheck_text import CLOSE, OPEN, Spoken, read_call
from gateway.toolcheck_watch import ToolCheck
from gateway.turn import Received, Turn
from tests.support.fake_upstream import FakeUpstream, Stream, Whole, chunk, content, finish, message, reasoning, tool_call, usage
from tests.support.gateway import Gateway, ask, settings

READ = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}, "all": {"type": "boolean"}},
            "required": ["path"],
            "additionalProperties": False,
        },
    },
}
FREE = {"type": "function", "function": {"name": "now"}}


def box(*tools: dict, **rule: object) -> Toolbox:
    return Toolbox(list(tools or (READ, FREE)), ToolRule(**rule), Validators())


@pytest.mark.parametrize(
    ("name", "arguments", "want_name", "want_arguments"),
    [
        ("read", '{"path": "a"}', "read", '{"path": "a"}'),  # good calls keep their bytes
        ("read", '{ "path" :"{\\"}\\"}" }', "read", '{ "path" :"{\\"}\\"}" }'),  # braces and quotes inside
        ("READ", '{"path":"a"}', "read", '{"path":"a"}'),
        ("functions.read", '{"path":"a"}', "read", '{"path":"a"}'),
        ("read", '{"path": "a",}', "read", '{"path":"a"}'),
        ("read", "{'path': 'a'}", "read", '{"path":"a"}'),
        ("read", '{"path":"a","limit":"20","all":"true"}', "read", '{"path":"a","limit":20,"all":true}'),
        ("now", "", "now", "{}"),
        ("now", '{"anything": [1]}', "now", '{"anything": [1]}'),
    ],
)
def test_good_and_repairable_calls(name: str, arguments: str, want_name: str, want_arguments: str) -> None:
    verdict = box().check(name, arguments)
    assert (verdict.problem, verdict.name, verdict.arguments) == ("", want_name, want_arguments)
    assert bool(verdict.repairs) == ((name, arguments) != (want_name, want_arguments))


SCHEMAS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["object", ["object", "null"], "string"]),
        "required": st.lists(st.sampled_from("abc"), unique=True),
        "additionalProperties": st.booleans() | st.just({"type": "string"}),
        "patternProperties": st.just({"^b": {}}),
        "minProperties": st.integers(0, 2),
        "not": st.just({"required": ["c"]}),
        "properties": st.dictionaries(
            st.sampled_from("abc"),
            st.booleans()
            | st.fixed_dictionaries(
                {},
                optional={
                    "type": st.sampled_from(["string", "integer", "object", ["integer", "null"]]),
                    "enum": st.just([1, "x"]),
                    "properties": st.just({"z": False}),
                },
            ),
        ),
    },
)
VALUES = st.dictionaries(st.sampled_from("abcd"), st.none() | st.integers(0, 2) | st.sampled_from(["x", "y"]) | st.just({"z": 1}))


@given(SCHEMAS, VALUES)
def test_the_outline_of_a_schema_refuses_nothing_that_the_schema_accepts(schema, value) -> None:
    whole, short = (jsonschema_rs.validator_for(s) for s in (schema, outline(schema)))
    assert short.is_valid(value) or not whole.is_valid(value)


def test_large_schemas_are_checked_in_outline_and_huge_ones_not_at_all(caplog) -> None:
    details = {"type": "object", "description": "d" * 200, "properties": {"q": {"type": "integer"}}}
    large = {
        "type": "object",
        "properties": {f"p{i}": details for i in range(300)},
        "required": ["p0"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "large", "parameters": large}}
    assert len(json.dumps(large)) > MAX_SCHEMA_BYTES and "large tool schema" not in caplog.text
    tools = box(tool)
    assert not tools.check("large", '{"p0":{}}').problem
    assert "large tool schema" in caplog.text
    for arguments, says in (("{}", "p0"), ('{"p0":{},"p1":3}', "object"), ('{"p0":{},"x":1}', "x")):
        assert says in tools.check("large", arguments).problem
    huge = {"type": "object", "properties": {f"p{i:09}": {"type": "string"} for i in range(3000)}}
    assert Validators().get(huge) is None


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("write", "{}", "no tool 'write'; the tools are read, now"),
        ("read", "{}", "path"),
        ("read", '{"path": 5}', "path"),
        ("read", '{"path": "a", "other": 1}', "other"),
        ("read", '["a"]', "not a JSON object"),
        ("read", "please read a", "not valid JSON"),
        ("now", '{"a":' * 70 + "1" + "}" * 70, "nested deeper"),
        ("now", '{"a": "' + "x" * 1100 * 1024 + '"}', "limit is 1024"),
    ],
)
def test_bad_calls_say_why(name: str, arguments: str, says: str) -> None:
    verdict = box().check(name, arguments)
    assert says in verdict.problem and len(verdict.problem) < 1000


def test_without_repair_only_valid_calls_pass() -> None:
    strict = box(repair=False)
    assert strict.check("read", '{"path": "a"}').problem == ""
    for name, arguments in (("READ", '{"path":"a"}'), ("read", '{"path": "a",}'), ("read", '{"path":"a","limit":"2"}')):
        assert strict.check(name, arguments).problem


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
        lambda c: st.lists(c) | st.dictionaries(st.text(), c),
    ),
    st.text(),
)
def test_no_arguments_ever_raise(value: object, noise: str) -> None:
    for text in (json.dumps(value), noise, json.dumps(value)[:-1], json.dumps({"path": value})):
        verdict = box().check("read", text)
        assert verdict.problem or box(repair=False).check("read", verdict.arguments).problem == ""


@pytest.mark.parametrize(
    "schema", [{"$ref": "http://127.0.0.1:9/x"}, {"type": "nonsense"}, {"pattern": "("}, "text", {"x": "y" * 300_000}, None, 7]
)
def test_unusable_schemas_check_only_the_json(schema: object) -> None:
    tools = box({"type": "function", "function": {"name": "t", "parameters": schema}})
    assert tools.check("t", '{"a": 1}').problem == ""
    assert tools.check("t", "[1]").problem


def test_validators_are_bounded() -> None:
    validators = Validators(keep=2)
    for i in range(5):
        assert validators.get({"maximum": i}) is not None
    assert len(validators._known) == 2 and validators.get({"maximum": 4}) is validators.get({"maximum": 4})


@given(st.lists(st.sampled_from(["a", "<", "<tool", OPEN, CLOSE, '{"name":"x"}', "_call>"]), max_size=12), st.integers(1, 9))
def test_spoken_calls_do_not_depend_on_how_the_text_was_cut(parts: list[str], step: int) -> None:
    def run(pieces: list[str]) -> tuple[str, list[str], tuple[str, str]]:
        spoken, text, calls = Spoken(), "", []
        for piece in pieces:
            out, found = spoken.feed(piece)
            text, calls = text + out, calls + found
        return text, calls, spoken.flush()

    whole = "".join(parts)
    cut, uncut = run([whole[i : i + step] for i in range(0, len(whole), step)]), run([whole])
    assert (cut[0] + cut[2][0], cut[1], cut[2][1]) == (uncut[0] + uncut[2][0], uncut[1], uncut[2][1])


def test_both_spellings_are_read() -> None:
    assert read_call('\n{"name": "read", "arguments": {"path": "a"}}\n') == ("read", '{"path":"a"}')
    assert read_call('{"name": "read", "parameters": "{}"}') == ("read", "{}")
    name, arguments = read_call("<function=read>\n<parameter=path>\na\nb\n</parameter>\n</function>")
    assert (name, json.loads(arguments)) == ("read", {"path": "a\nb"})
    assert read_call("no call") is None


# --- through the gateway


@pytest.fixture
async def up() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as up:
        yield up


def calls_of(events: list) -> list[tuple[str, str, str]]:
    found = [t for e in events if isinstance(e, dict) for c in e.get("choices", []) for t in c["delta"].get("tool_calls") or ()]
    return [(t["id"], t["function"]["name"], t["function"]["arguments"]) for t in found]


def finish_of(events: list) -> list[str]:
    found = [c.get("finish_reason") for e in events if isinstance(e, dict) for c in e.get("choices", [])]
    return [f for f in found if f]


def call(arguments: str, *cuts: int, index: int = 0, id: str = "call_1", name: str = "read") -> list[dict]:
    """A streamed call, its arguments cut at `cuts`."""
    cuts = (0, *cuts, len(arguments))
    pieces = [arguments[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    return [tool_call(index, "", id, name), *(tool_call(index, p) for p in pieces)]


GOOD = '{"path": "a.py"}'


async def streamed(up: FakeUpstream, tmp: Path, items: list, again: list | None = None, rule: dict | None = None, **body: object):
    up.script(Stream(items), *([Stream(again)] if again else []))
    policies = [{"tools": rule}] if rule else []
    async with Gateway(settings(up.base, policies=policies), tmp) as gw:
        got = await gw.post(ask(**({"stream": True, "tools": [READ, FREE]} | body)))
        (record,) = await gw.records()
    return got, [f"{d['stage']}.{d['rule']}" for d in record["decisions"] if d["stage"] == "toolcheck"]


async def test_a_good_call_goes_on_whole_and_content_before_it_flows(up: FakeUpstream, tmp_path: Path) -> None:
    items = [content("Look: "), *call(GOOD, 3, 9), finish("tool_calls"), usage(5, 2)]
    got, rules = await streamed(up, tmp_path, items)
    assert got.text() == "Look: " and calls_of(got.events) == [("call_1", "read", GOOD)]
    assert finish_of(got.events) == ["tool_calls"] and got.events[-1] == "[DONE]" and rules == []


async def test_parallel_calls_with_equal_or_missing_indexes_stay_apart(up: FakeUpstream, tmp_path: Path) -> None:
    two = '{"path": "b"}'
    equal = [*call(GOOD, 4), *call(two, 4, id="call_2")]
    missing = [{**c, "choices": [_without_index(c["choices"][0])]} for c in equal]
    interleaved = [*call(GOOD)[:1], *call(two, index=1, id="call_2")[:1], *call(GOOD)[1:], *call(two, index=1)[1:]]
    in_one = [
        chunk(
            {
                "tool_calls": [
                    {"index": i, "id": f"call_{i + 1}", "function": {"name": "read", "arguments": a}}
                    for i, a in enumerate((GOOD, two))
                ]
            }
        )
    ]
    for items in (equal, missing, interleaved, in_one):
        got, _ = await streamed(up, tmp_path / str(id(items)), [*items, finish("tool_calls")])
        assert calls_of(got.events) == [("call_1", "read", GOOD), ("call_2", "read", two)]
        indexes = [t["index"] for e in got.events[:-1] for c in e["choices"] for t in c["delta"].get("tool_calls") or ()]
        assert indexes == [0, 1]


def _without_index(choice: dict) -> dict:
    calls = [{k: v for k, v in t.items() if k != "index"} for t in choice["delta"]["tool_calls"]]
    return choice | {"delta": {"tool_calls": calls}}


async def test_a_repairable_call_is_repaired_and_said(up: FakeUpstream, tmp_path: Path) -> None:
    got, rules = await streamed(up, tmp_path, [*call('{"path": "a.py",}'), finish("stop")])
    assert calls_of(got.events) == [("call_1", "read", '{"path":"a.py"}')]
    assert finish_of(got.events) == ["tool_calls"] and rules == ["toolcheck.repaired", "toolcheck.finish_reason"]


@pytest.mark.parametrize(("pause", "want"), [([], "Sorry. "), ([0.05], "Let me. "), ([0.05, content("Then ")], "Let me. Then ")])
async def test_a_bad_call_is_asked_for_again_with_its_error(up: FakeUpstream, tmp_path: Path, pause: list, want: str) -> None:
    bad = [content("Let me. "), *pause, *call('{"limit": 3}'), finish("tool_calls")]
    good = [content("Sorry. "), *call(GOOD, id="call_9"), finish("tool_calls")]
    got, rules = await streamed(up, tmp_path, bad, good)
    assert calls_of(got.events) == [("call_9", "read", GOOD)] and finish_of(got.events) == ["tool_calls"]
    assert got.text() == want  # what the client has is not said twice, and nothing of it is lost
    first, second = (r.json["messages"] for r in up.requests)
    assert second[:1] == first and second[1]["tool_calls"][0]["function"]["name"] == "read"
    assert second[2]["role"] == "tool" and "path" in second[2]["content"] and second[2]["tool_call_id"] == "call_1"
    assert rules == ["toolcheck.retry.invalid"]


async def test_a_call_that_stays_bad_ends_in_an_error(up: FakeUpstream, tmp_path: Path) -> None:
    got, rules = await streamed(up, tmp_path, [*call("{}"), finish("tool_calls")])
    assert len(up.requests) == 2 and rules == ["toolcheck.retry.invalid", "toolcheck.invalid"]
    error = got.json["error"] if got.status != 200 else got.events[-1]["error"]
    assert error["code"] == "invalid_tool_call" and "path" in error["message"] and b"[DONE]" not in got.body


async def test_pass_lets_the_bad_call_through_flagged(up: FakeUpstream, tmp_path: Path) -> None:
    rule = {"retries": 0, "otherwise": "pass", "repair": False}
    got, rules = await streamed(up, tmp_path, [*call("{}", name="write"), finish("tool_calls")], rule=rule)
    assert calls_of(got.events) == [("call_1", "write", "{}")] and rules == ["toolcheck.invalid"]


@pytest.mark.parametrize("rule", [None, {"retries": 0, "otherwise": "pass"}])
async def test_a_truncated_call_is_never_passed_as_complete(up: FakeUpstream, tmp_path: Path, rule: dict | None) -> None:
    items = [content("Hm"), *call(GOOD), *call('{"path": "/etc/hos', index=1, id="call_2"), finish("length")]
    got, rules = await streamed(up, tmp_path, items, rule=rule)
    assert calls_of(got.events) == [("call_1", "read", GOOD)] and finish_of(got.events) == ["length"]
    assert rules == ["toolcheck.truncated"] and len(up.requests) == 1


async def test_calls_left_as_text_become_calls(up: FakeUpstream, tmp_path: Path) -> None:
    text = f'Reading.\n{OPEN}\n{{"name": "read", "arguments": {{"path": "a.py"}}}}\n{CLOSE}'
    got, rules = await streamed(up, tmp_path / "content", [content(text[i : i + 5]) for i in range(0, len(text), 5)] + [finish()])
    assert [c[1:] for c in calls_of(got.events)] == [("read", '{"path":"a.py"}')] and got.text() == "Reading.\n"
    assert finish_of(got.events) == ["tool_calls"] and "toolcheck.rescued" in rules
    got, rules = await streamed(up, tmp_path / "thought", [reasoning("I will. " + text), finish()])
    assert [c[1:] for c in calls_of(got.events)] == [("read", '{"path":"a.py"}')] and "toolcheck.rescued" in rules


async def test_text_that_is_no_call_stays_text(up: FakeUpstream, tmp_path: Path) -> None:
    text = f"The tags are {OPEN} and {CLOSE}, a < b, {OPEN}unfinished"
    got, rules = await streamed(up, tmp_path, [*(content(c) for c in text), finish()])
    assert got.text() == text and calls_of(got.events) == [] and rules == []


async def test_a_demanded_call_that_does_not_come_is_noticed(up: FakeUpstream, tmp_path: Path) -> None:
    prose, good = [content("I would rather talk."), finish()], [*call(GOOD), finish("tool_calls")]
    got, rules = await streamed(up, tmp_path / "1", prose, good, tool_choice="required")
    assert calls_of(got.events) == [("call_1", "read", GOOD)] and got.text() == ""
    assert rules == ["toolcheck.retry.not_called"]
    named = {"type": "function", "function": {"name": "now"}}
    got, _ = await streamed(up, tmp_path / "2", good, tool_choice=named)
    assert b"invalid_tool_call" in got.body
    got, rules = await streamed(up, tmp_path / "3", prose, rule={"retries": 0, "otherwise": "pass"}, tool_choice="required")
    assert got.text() == "I would rather talk." and rules == ["toolcheck.not_called"]


async def test_usage_survives_in_the_last_chunk_of_calls(up: FakeUpstream, tmp_path: Path) -> None:
    last = finish("tool_calls") | {"usage": usage(7, 3)["usage"]}
    got, _ = await streamed(up, tmp_path, [*call(GOOD), last], stream_options={"include_usage": True})
    assert [e["usage"]["prompt_tokens"] for e in got.events[:-1] if e.get("usage")] == [7]


@pytest.mark.parametrize(
    ("fields", "want", "reason"),
    [
        ({"tool_calls": [{"id": "c", "type": "function", "function": {"name": "read", "arguments": GOOD}}]}, GOOD, "tool_calls"),
        (
            {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "Read", "arguments": '{"path":"a.py"'}}]},
            '{"path":"a.py"}',
            "tool_calls",
        ),
        (
            {"tool_calls": [{"id": "c", "function": {"name": "read", "arguments": {"path": "a.py"}}}]},
            '{"path":"a.py"}',
            "tool_calls",
        ),
    ],
)
async def test_whole_answers_are_checked_too(up: FakeUpstream, tmp_path: Path, fields: dict, want: str, reason: str) -> None:
    up.script(Whole(message(None, "stop", **fields)))
    async with Gateway(settings(up.base), tmp_path) as gw:
        got = (await gw.post(ask(tools=[READ]))).json["choices"][0]
    assert [(c["id"], c["function"]["arguments"]) for c in got["message"]["tool_calls"]] == [("c", want)]
    assert got["finish_reason"] == reason


async def test_a_right_whole_answer_keeps_its_bytes(up: FakeUpstream, tmp_path: Path) -> None:
    calls = [{"id": "c", "type": "function", "vendor": 1, "function": {"name": "read", "arguments": GOOD}}]
    body = json.dumps(message(None, "tool_calls", tool_calls=calls), indent=1).encode()
    up.script(Whole(body))
    async with Gateway(settings(up.base), tmp_path) as gw:
        assert (await gw.post(ask(tools=[READ]))).body == body


async def test_history_is_put_right_or_refused(up: FakeUpstream, tmp_path: Path) -> None:
    def conversation(function: object) -> dict:
        past = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
        return {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}, past, {"role": "tool", "tool_call_id": "c", "content": "y"}],
        }

    up.script(Whole(message()))
    async with Gateway(settings(up.base), tmp_path) as gw:
        for arguments, want in (
            ({"b": 1, "a": 2}, '{"b":1,"a":2}'),
            ('{"path": "a"', '{"path":"a"}'),
            (None, "{}"),
            (GOOD, GOOD),
        ):
            assert (await gw.post(conversation({"name": "read", "arguments": arguments}))).status == 200
            assert up.requests[-1].json["messages"][1]["tool_calls"][0]["function"]["arguments"] == want
        for function in ({"arguments": "{}"}, {"name": "read", "arguments": "hello"}, "read", {"name": "read", "arguments": [1]}):
            got = await gw.post(conversation(function))
            assert got.status == 400 and "messages[1].tool_calls[0]" in got.json["error"]["message"]


PIECES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "content": st.sampled_from([None, "", "Hi ", "<b>"]),
            "role": st.just("assistant"),
            "vendor": st.just(1),
            "reasoning_content": st.just("so"),
            "tool_calls": st.lists(st.sampled_from("ab"), min_size=1, max_size=2),
        },
    ),
    max_size=8,
)


@given(PIECES, st.integers(1, 5), st.booleans())
def test_calls_held_unparsed_are_the_calls_that_were_sent(pieces: list[dict], step: int, ended: bool) -> None:
    """Fragments are taken from a glance where that shows all of them; the client gets the same as when everything is parsed."""
    sent = {"a": ["", '{"path"', ': "x"', "}"], "b": ["", "{}"]}
    events = []
    for piece in pieces:
        calls = [
            {"index": "ab".index(name), "id": f"call_{name}", "function": {"name": "read", "arguments": sent[name].pop(0)}}
            for name in piece.get("tool_calls", ())
            if sent[name]
        ]
        delta = {k: v for k, v in piece.items() if k != "tool_calls"} | ({"tool_calls": calls} if calls else {})
        events.append(event({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}))
    if ended:
        events.append(event({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}))
    blocks = [b"".join(events[i : i + step]) for i in range(0, len(events), step)]
    assert through(blocks, glanced=True) == through(blocks, glanced=False)


def through(blocks: list[bytes], glanced: bool) -> tuple:
    """(text, thought, vendor fields, calls, finish reasons, decisions) behind the filter."""
    body = {"model": "m", "messages": [{"role": "user", "content": "q"}], "tools": [READ]}
    fresh = Turn(id="r", received=Received(route="/", headers={}, body=b""), dialect=Chat()).start(b"", body, "m", True)
    answer = Answer(0.0)
    tools = ToolRule(otherwise="pass", retries=0)
    watch = ToolCheck().watch(fresh.but(policy=Policy(tools=tools)), answer)
    out = []
    for block in blocks:
        seen, chunks = answer.glance(block, 1.0), parse(block)
        if glanced:
            for chunk, what in zip(chunks, seen or (), strict=False):
                chunk.seen = what
        watch.wants(block)
        out += watch.feed(chunks)
    out += watch.finish()
    choices = [c for chunk in out for c in chunk.data["choices"]]
    deltas = [c["delta"] for c in choices]
    calls = [call["function"] for d in deltas for call in d.get("tool_calls") or ()]
    text, thought = ("".join(d.get(k) or "" for d in deltas) for k in ("content", "reasoning_content"))
    reasons = [c["finish_reason"] for c in choices if c.get("finish_reason")]
    return text, thought, sum("vendor" in d for d in deltas), calls, reasons, [str(d) for d in answer.decisions]


async def test_custom_tools_pass_unchecked_and_said(up: FakeUpstream, tmp_path: Path) -> None:
    made = [{"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}]
    up.script(Whole(message(None, "tool_calls", tool_calls=made)))
    async with Gateway(settings(up.base, "openai"), tmp_path) as gw:
        got = await gw.post(ask(tools=[{"type": "custom", "custom": {"name": "patch"}}, READ]))
    assert got.json["choices"][0]["message"]["tool_calls"] == made and "toolcheck.custom" in got.headers["x-moorage-decisions"]


@pytest.mark.parametrize("word", ["nan", "NaN", "inf", "-Infinity", "1e999"])
def test_a_word_that_is_no_json_number_is_not_put_right_into_null(word: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "number"}}}}}
    verdict = box(tool).check("f", json.dumps({"n": word}))
    assert verdict.problem and word in verdict.arguments


@pytest.mark.parametrize(
    ("given", "sent"),
    [("null", {}), ('"{\\"a\\": 1}"', {"a": 1}), ("[1]", {"value": [1]}), ('"x"', {"value": "x"}), ("3", {"value": 3})],
)
async def test_past_arguments_that_are_no_object_become_one(up: FakeUpstream, tmp_path: Path, given: str, sent: dict) -> None:
    up.script(Whole(message()))
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": given}}
    said = [*ask()["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]
    async with Gateway(settings(up.base, "openai"), tmp_path) as gw:
        got = await gw.post(ask() | {"messages": said})
    assert json.loads(up.requests[0].json["messages"][1]["tool_calls"][0]["function"]["arguments"]) == sent
    assert "toolcheck.history.repaired" in got.headers["x-moorage-decisions"]
