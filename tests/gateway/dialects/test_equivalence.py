"""One conversation, three dialects, one meaning; one answer, any network, the same events."""

import json
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects import thoughts
from gateway.dialects.base import Writer
from gateway.dialects.chat import Chat
from gateway.dialects.messages import Messages
from gateway.dialects.responses import Responses
from gateway.sse import Splitter, event, parse
from gateway.turn import Received, Turn
from tests.support.fake_upstream import chunk, content, finish, message, reasoning, tool_call, usage

TEXT = st.text('ab é\n<"{', min_size=1, max_size=8).map(lambda t: f"x{t}x")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda v: st.lists(v, max_size=2) | st.dictionaries(TEXT, v, max_size=2),
)
CALL = st.tuples(st.sampled_from(["run", "read"]), st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3))
# (thought, text, [(tool, arguments)], order of results, text that comes before the results, text that comes behind them)
ANSWER = st.tuples(st.none() | TEXT, st.none() | TEXT, st.lists(CALL, max_size=3), st.randoms(), st.none() | TEXT, TEXT)
ANSWER = ANSWER.filter(lambda a: a[1] or a[2])
CONVERSATION = st.tuples(st.none() | TEXT, TEXT, st.lists(ANSWER, max_size=4))
SCHEMA = {"type": "object", "properties": {"a": {}}}


def dumped(value: Any) -> str:
    return orjson.dumps(value).decode()


class Conversation:
    """The same turns written three ways."""

    def __init__(self, system: str | None, user: str, answers: list[tuple[Any, ...]]) -> None:
        self.chat: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.chat.append({"role": "user", "content": user})
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": user}]
        self.items: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "input_text", "text": user}]}]
        self.system = system
        for n, answer in enumerate(answers):
            self.answer(n, *answer)

    def answer(self, n: int, thought: Any, text: Any, calls: list[Any], order: Any, before: Any, behind: str) -> None:
        ids = [f"call_{n}_{k}" for k in range(len(calls))]
        self._assistant(thought, text, list(zip(ids, calls, strict=True)))
        order.shuffle(ids)
        results = [(i, f"result of {i}") for i in ids]
        texts = [t for t in (before if calls else None, behind) if t]
        self.chat += [{"role": "tool", "tool_call_id": i, "content": t} for i, t in results]
        self.chat.append({"role": "user", "content": "\n\n".join(texts)})
        blocks: list[dict[str, Any]] = [{"type": "tool_result", "tool_use_id": i, "content": t} for i, t in results]
        lead = [{"type": "text", "text": t} for t in texts[:-1]]
        self.messages.append({"role": "user", "content": [*lead, *blocks, {"type": "text", "text": behind}]})
        self.items += [{"role": "user", "content": t} for t in texts[:-1]]
        self.items += [{"type": "function_call_output", "call_id": i, "output": t} for i, t in results]
        self.items.append({"role": "user", "content": behind})

    def _assistant(self, thought: Any, text: Any, calls: list[Any]) -> None:
        said: dict[str, Any] = {"role": "assistant", "content": text or ""}
        blocks: list[dict[str, Any]] = []
        if thought:
            said["reasoning_content"] = thought
            blocks.append({"type": "thinking", "thinking": thought, "signature": thoughts.sign(thought)})
            self.items.append({"type": "reasoning", "summary": [], "encrypted_content": thoughts.seal(thought)})
        if text:
            blocks.append({"type": "text", "text": text})
            self.items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]})
        for call_id, (name, arguments) in calls:
            function = {"name": name, "arguments": dumped(arguments)}
            said.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
            blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": arguments})
            self.items.append({"type": "function_call", "call_id": call_id, **function})
        self.chat.append(said)
        self.messages.append({"role": "assistant", "content": blocks})

    def bodies(self) -> dict[str, tuple[Any, dict[str, Any]]]:
        named = [{"name": n, "description": f"to {n}"} for n in ("run", "read")]
        functions = [{"type": "function", "function": f | {"parameters": SCHEMA}} for f in named]
        system = {"system": self.system} if self.system else {}
        instructions = {"instructions": self.system} if self.system else {}
        return {
            "chat": (Chat(), {"messages": self.chat, "tools": functions}),
            "messages": (
                Messages(),
                system | {"messages": self.messages, "tools": [f | {"input_schema": SCHEMA} for f in named]},
            ),
            "responses": (
                Responses(),
                instructions | {"input": self.items, "tools": [{"type": "function", **f, "parameters": SCHEMA} for f in named]},
            ),
        }


def turn_of(dialect: Any, body: dict[str, Any], **more: Any) -> Turn:
    received = Received(route="/", headers={}, body=orjson.dumps({"model": "m", "temperature": 0.5} | body | more), at=7.0)
    return dialect.read(Turn(id="req_1", received=received, dialect=dialect))


@given(CONVERSATION)
def test_the_same_conversation_means_the_same_chat_body_in_every_dialect(conversation) -> None:
    told = Conversation(*conversation)
    bodies = {name: turn_of(dialect, body).body for name, (dialect, body) in told.bodies().items()}
    for name in ("messages", "responses"):
        assert bodies[name] == bodies["chat"], name
        assert dumped(bodies[name]["messages"]) == dumped(bodies["chat"]["messages"]), "the same bytes, so the same prefix"


@given(CONVERSATION, st.integers(0, 3))
def test_a_conversation_that_grows_only_grows(conversation, cut) -> None:
    system, user, answers = conversation
    for name, (dialect, body) in Conversation(system, user, answers).bodies().items():
        shorter = Conversation(system, user, answers[:cut]).bodies()[name][1]
        head = turn_of(dialect, shorter).body["messages"]
        # A shuffled order of results is drawn anew for the shorter one; only the roles of it are certain.
        whole = turn_of(dialect, body).body["messages"][: len(head)]
        assert [m["role"] for m in whole] == [m["role"] for m in head]
        assert [m for m in whole if m["role"] != "tool"] == [m for m in head if m["role"] != "tool"]


PIECE = st.one_of(
    TEXT.map(content),
    TEXT.map(reasoning),
    TEXT.map(lambda t: chunk({"refusal": t})),
    st.just(chunk({"role": "assistant", "content": ""})),
)


@st.composite
def answers(draw) -> list[dict[str, Any]]:
    """The chunks of an answer: texts, thoughts, and calls whose fragments may interleave with one another."""
    parts = draw(st.lists(PIECE, max_size=5))
    rests = {i: dumped(draw(CALL)[1]) for i in range(draw(st.integers(0, 3)))}
    parts += [tool_call(i, "", f"c{i}", draw(st.sampled_from(["run", "read", "patch"]))) for i in rests]
    while any(rests.values()):
        i = draw(st.sampled_from([i for i, r in rests.items() if r]))
        size = draw(st.integers(1, len(rests[i])))
        parts.append(tool_call(i, rests[i][:size]))
        rests[i] = rests[i][size:]
    ends = draw(st.sampled_from(["stop", "tool_calls", "length"]))
    return [*parts, finish(ends), usage(9, 3, 4)]


def writer(name: str) -> Writer:
    dialect = {"messages": Messages(), "responses": Responses()}[name]
    body = {"messages": [{"role": "user", "content": "q"}]} if name == "messages" else {"input": "q"}
    return dialect.writer(turn_of(dialect, body, stream=True))


@given(st.sampled_from(["messages", "responses"]), answers(), st.data())
def test_any_cutting_of_the_upstreams_bytes_gives_the_same_events(name, chunks, data) -> None:
    wire = b"".join(map(event, chunks))
    one = writer(name)
    expected = one.feed(parse(wire)) + one.finish()
    borders = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    other, splitter, got = writer(name), Splitter(), b""
    for start, end in zip([0, *borders], [*borders, len(wire)], strict=True):
        if (block := splitter.feed(wire[start:end])) and (events := [c for c in parse(block) if not c.done]):
            got += other.feed(events)
    assert got + other.finish() == expected


def events_of(wire: bytes) -> list[dict[str, Any]]:
    parts = [p.split(b"\ndata: ", 1) for p in wire.split(b"\n\n") if p]
    events = [json.loads(data) for _, data in parts]
    assert [head for head, _ in parts] == [f"event: {e['type']}".encode() for e in events]
    return events


@given(answers())
def test_streamed_messages_have_contiguous_blocks_that_say_everything(chunks) -> None:
    one = writer("messages")
    events = events_of(one.feed(parse(b"".join(map(event, chunks)))) + one.finish())
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    assert [e["index"] for e in events if e["type"] == "content_block_start"] == list(
        range(sum("content_block" in e for e in events))
    )
    opened, said = None, {"text": "", "thinking": "", "partial_json": ""}
    for e in events:
        if e["type"] == "content_block_start":
            assert opened is None
            opened = e["index"]
        elif e["type"] in ("content_block_delta", "content_block_stop"):
            assert e["index"] == opened
            opened = None if e["type"] == "content_block_stop" else opened
        for field in said:
            said[field] += e.get("delta", {}).get(field) or ""
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    assert said["thinking"] == "".join(d.get("reasoning_content", "") for d in deltas)
    assert said["text"] == "".join(d.get("content", "") + d.get("refusal", "") for d in deltas)
    assert len(said["partial_json"]) == sum(len(d["tool_calls"][0]["function"]["arguments"]) for d in deltas if "tool_calls" in d)
    assert events[-2]["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
    }


@given(answers())
def test_streamed_responses_add_up_to_their_last_event(chunks) -> None:
    one = writer("responses")
    events = events_of(one.feed(parse(b"".join(map(event, chunks)))) + one.finish())
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    final = events[-1]["response"]
    assert final["output"] == [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert [e["output_index"] for e in events if e["type"] == "response.output_item.added"] == list(range(len(final["output"])))
    for index, item in enumerate(final["output"]):
        said = "".join(e["delta"] for e in events if e["type"].endswith(".delta") and e["output_index"] == index)
        told = item["arguments"] if item["type"] == "function_call" else item["content"][0]
        assert said == (told if isinstance(told, str) else told.get("text", told.get("refusal")))


@given(answers())
def test_whole_and_streamed_answers_say_the_same(chunks) -> None:
    """A whole answer has its channels in one order; the stream of that very order must come to the same blocks."""
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    fields = {f: "".join(d.get(f, "") for d in deltas) for f in ("reasoning_content", "content")}
    calls: dict[int, dict[str, Any]] = {}
    for d in deltas:
        for c in d.get("tool_calls", ()):
            call = calls.setdefault(
                c["index"], {"id": c.get("id"), "type": "function", "function": {"arguments": ""} | c["function"]}
            )
            call["function"]["arguments"] += c["function"]["arguments"] if c.get("id") is None else ""
    parts = [chunk({k: v}) for k, v in fields.items() if v]
    parts += [tool_call(i, c["function"]["arguments"], c["id"], c["function"]["name"]) for i, c in calls.items()]
    reason = chunks[-2]["choices"][0]["finish_reason"]
    answer = message(fields["content"], reason, reasoning_content=fields["reasoning_content"], tool_calls=list(calls.values()))
    one = writer("responses")
    streamed = events_of(one.feed(parse(b"".join(map(event, [*parts, finish(reason)])))) + one.finish())[-1]["response"]
    whole = json.loads(writer("responses").whole(answer))
    assert (whole["output"], whole["status"]) == (streamed["output"], streamed["status"])
