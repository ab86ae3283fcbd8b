"""Event streams survive being cut anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import glance
from gateway.answer import Answer, Channel
from gateway.sse import Splitter, event, parse

EVENTS = st.lists(
    st.builds(lambda t: event({"t": t}), st.text())
    | st.sampled_from(
        [b": ping\n\n", b"data: [DONE]\n\n", b"event: x\r\ndata: {}\r\n\r\n", b"data: {\ndata: }\n\n", b"data: junk\n\n"]
    ),
    max_size=8,
)


@given(EVENTS, st.data())
def test_any_cut_gives_the_same_whole_events(events, data) -> None:
    wire = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=10)))
    splitter, blocks = Splitter(), []
    for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        blocks.append(splitter.feed(wire[a:b]))
    assert b"".join(blocks) == wire and splitter.rest() == b""
    whole = [(c.data, c.done, c.malformed) for c in parse(wire)]
    assert [(c.data, c.done, c.malformed) for block in blocks for c in parse(block)] == whole
    assert len(whole) == len(events)


@given(st.binary())
def test_garbage_never_raises(garbage) -> None:
    splitter, answer = Splitter(), Answer(0.0)
    answer.observe(parse(splitter.feed(garbage) + splitter.rest()), 1.0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "delta", "message", "tool_calls", "index", "id", "function", "arguments", "usage", "content"]
            ),
            inner,
            max_size=5,
        )
    ),
)


@given(st.dictionaries(st.sampled_from(["choices", "usage", "id", "error"]), JSON))
def test_answers_of_any_shape_are_observed_without_an_error(data) -> None:
    answer = Answer(0.0)
    answer.observe(parse(event(data)), 1.0)
    answer.observe_whole(data, 1.0)


DELTAS = st.fixed_dictionaries(
    {},
    optional={
        "role": st.just("assistant"),
        "content": st.none() | st.text(max_size=5),
        "reasoning_content": st.text(max_size=3),
        "reasoning": st.text(max_size=3),
        "tool_calls": st.none()
        | st.lists(st.fixed_dictionaries({"index": st.integers(0, 2), "id": st.sampled_from(["a", "b"])})),
    },
)
CHOICES = st.fixed_dictionaries(
    {"index": st.integers(0, 1)},
    optional={
        "delta": DELTAS | JSON,
        "text": st.text(max_size=3),
        "finish_reason": st.none() | st.sampled_from(["stop", "length"]),
    },
)
CHUNKS = st.fixed_dictionaries(
    {"id": st.text(max_size=3), "choices": st.lists(CHOICES, max_size=2)}, optional={"usage": st.none() | JSON, "error": JSON}
)


@given(st.lists(st.builds(event, CHUNKS) | EVENTS.map(b"".join), max_size=6), st.booleans())
def test_a_glance_sees_what_a_full_parse_sees(events, done) -> None:
    block = b"".join(events) + (b"data: [DONE]\n\n" if done else b"")
    seen, parsed = Answer(0.0), Answer(0.0)
    for at in (1.0, 2.0):
        seen.glance(block, at)
        parsed.observe(parse(block), at)
        assert seen == parsed


def test_channels_stand_in_the_order_in_which_they_began() -> None:
    choices = [{"index": i, "delta": {"content": str(i)}, "finish_reason": None} for i in (0, 1)]
    seen = Answer(0.0)
    seen.glance(event({"id": "x", "choices": choices}) + event({"id": "x", "choices": choices}), 1.0)
    assert [(at, c.text) for at, c in seen.channels.items()] == [((0, "content"), "00"), ((1, "content"), "11")]


def test_of_a_channel_beyond_its_bound_nothing_more_is_kept(monkeypatch) -> None:
    monkeypatch.setattr("gateway.answer.MAX_CHANNEL_CHARS", 5)
    one, many, texts = Channel(), Channel(), ["ab", "cd", "ef", "gh"]
    for text in texts * 2:
        one.add(text, 1.0)
    for _ in range(2):
        many.extend(texts, 1.0)
    assert one == many and one.text == "abcdef" and one.chars == 16


def test_a_glance_knows_events_and_deltas_as_a_full_parse_does() -> None:
    two_lines = b'data: {"choices":[],\n\n"id":"x"}\n\n'  # a blank line ends an event, whatever JSON makes of it
    assert glance.events(two_lines) is None
    assert glance.events(b'data: {"usage":{"a":' + b"[" * 5000 + b"]" * 5000 + b"}}\n\n") is None
    vendor = event({"choices": [{"index": 0, "delta": {"content": "x", "vendor": 1}, "logprobs": None}], "vendor": 2})
    assert glance.events(vendor) is None  # so that whoever sees a delta knows all of it
    assert glance.events(vendor.replace(b',"vendor":1', b""))[0].choices[0].delta == glance.Delta(content="x")


def test_what_engines_send_needs_no_full_parse() -> None:
    chunk = {
        "id": "x",
        "object": "chat.completion.chunk",
        "created": 1,
        "choices": [{"index": 0, "delta": {"content": "a\n\ndata: "}}],
    }
    block = event(chunk) + event(chunk | {"choices": [], "usage": {"prompt_tokens": 3}})
    found = glance.events(block)
    assert [e.id for e in found] == ["x", "x"] and found[0].choices[0].delta.content == "a\n\ndata: "
    assert glance.events(block + b": keep-alive\n\n") is None


@pytest.mark.parametrize("names", [["reasoning"], ["reasoning_content"], ["reasoning", "reasoning_content"]])
def test_a_thought_sent_under_two_names_is_one_thought(names) -> None:
    block = b"".join(event({"choices": [{"index": 0, "delta": dict.fromkeys(names, t)}]}) for t in ("I ", "see"))
    for look in (Answer.glance, lambda answer, raw, at: answer.observe(parse(raw), at)):
        answer = Answer(0.0)
        look(answer, block, 1.0)
        assert {key: c.text for key, c in answer.channels.items()} == {(0, "reasoning_content"): "I see"}
