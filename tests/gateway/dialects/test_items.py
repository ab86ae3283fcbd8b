"""Fragments in any order become items in order: nothing lost, nothing mixed, whatever the network's grouping."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.items import Items
from gateway.errors import UpstreamError
from tests.support.fake_upstream import chunk, content, finish, reasoning, tool_call

ARGUMENTS = st.dictionaries(st.text("ab}{\"\\'", max_size=4), st.text('x}{"\\ é', max_size=6), max_size=3)


def events(chunks: list[dict[str, Any]]) -> list[tuple[str, int, str]]:
    items = Items()
    out = [(verb, item.number, text) for c in chunks for verb, item, text in items.feed(c)]
    return out + [(verb, item.number, text) for verb, item, text in items.finish()]


def told(chunks: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """(kind, name, text) of each item, after checking that each one is begun, said and ended before the next begins."""
    items, out, open_item = Items(), [], None
    for verb, item, text in [e for c in chunks for e in items.feed(c)] + list(items.finish()):
        if verb == "begin":
            assert open_item is None and item.number == len(out)
            open_item = item
            out.append([item.kind, item.name, ""])
        assert item is open_item
        out[-1][2] += text
        if verb == "end":
            assert out[-1][2] == item.text
            open_item = None
    assert open_item is None
    return [tuple(o) for o in out]


@given(st.lists(ARGUMENTS, min_size=1, max_size=4), st.data())
def test_interleaved_parallel_calls_become_contiguous_and_ordered(given_arguments, data) -> None:
    texts = [json.dumps(a) for a in given_arguments]
    rests, chunks = [], []
    for i, text in enumerate(texts):
        cut = data.draw(st.integers(0, len(text)))
        chunks.append(tool_call(i, text[:cut], f"c{i}", f"f{i}"))
        rests.append(text[cut:])
    while any(rests):
        i = data.draw(st.sampled_from([i for i, r in enumerate(rests) if r]))
        size = data.draw(st.integers(1, len(rests[i])))
        chunks.append(tool_call(i, rests[i][:size]))
        rests[i] = rests[i][size:]
    assert told([*chunks, finish("tool_calls")]) == [("call", f"f{i}", text) for i, text in enumerate(texts)]


@given(st.lists(st.sampled_from([content("a"), reasoning("t"), reasoning("u", "reasoning"), tool_call(0, "{}", "c", "f")])))
def test_no_fragment_is_lost_and_neighbours_of_a_kind_are_one_item(chunks) -> None:
    calls = [c for c in chunks if "tool_calls" in c["choices"][0]["delta"]]
    if len(calls) > 1:
        chunks = [c for c in chunks if c not in calls] + calls[:1]
    said = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    items = told(chunks)
    assert "".join(text for kind, _, text in items if kind == "text") == said
    assert all(a[0] != b[0] for a, b in zip(items, items[1:], strict=False))


def test_a_second_call_begins_as_soon_as_the_first_is_complete() -> None:
    chunks = [tool_call(0, '{"a": "}"', "c0", "f"), tool_call(0, "}"), tool_call(1, "{", "c1", "g")]
    assert events(chunks)[:6] == [
        ("begin", 0, ""),
        ("say", 0, '{"a": "}"'),
        ("say", 0, "}"),
        ("end", 0, ""),
        ("begin", 1, ""),
        ("say", 1, "{"),
    ]


@pytest.mark.parametrize("index", [{"index": 0}, {}])
def test_calls_that_share_an_index_or_have_none_are_told_apart(index) -> None:
    def whole(call_id: str, name: str) -> dict[str, Any]:
        call = index | ({"id": call_id} if call_id else {}) | {"function": {"name": name, "arguments": '{"x":"' + name + '"}'}}
        return chunk({"tool_calls": [call]})

    for ids in (("a", "b"), ("", "")):
        assert told([whole(ids[0], "f"), whole(ids[1], "g")]) == [("call", "f", '{"x":"f"}'), ("call", "g", '{"x":"g"}')]


def test_fragments_without_an_id_belong_to_the_newest_call_at_their_index() -> None:
    chunks = [tool_call(0, '{"a":1}', "c0", "f"), tool_call(0, '{"b":', "c1", "g"), tool_call(0, "2}")]
    assert told(chunks) == [("call", "f", '{"a":1}'), ("call", "g", '{"b":2}')]


def test_text_after_an_unfinished_call_waits_for_it() -> None:
    chunks = [tool_call(0, '{"a"', "c0", "f"), content("so"), tool_call(0, ":1}"), content("!")]
    assert told(chunks) == [("call", "f", '{"a":1}'), ("text", "", "so!")]


def test_a_name_that_comes_late_is_waited_for() -> None:
    late = chunk({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]})
    assert told([chunk({"tool_calls": [{"index": 0, "id": "c"}]}), late]) == [("call", "f", "{}")]


def test_a_complete_call_that_goes_on_is_an_error_and_not_silently_cut() -> None:
    items = Items()
    for c in (tool_call(0, "{}", "c0", "f"), tool_call(1, "{", "c1", "g")):
        list(items.feed(c))
    list(items.feed(tool_call(0, " \n")))
    with pytest.raises(UpstreamError):
        list(items.feed(tool_call(0, "x")))


def test_a_cut_off_call_ends_with_the_answer() -> None:
    assert told([content("a"), tool_call(0, '{"a": "b', "c0", "f"), finish("length")])[1] == ("call", "f", '{"a": "b')


def test_arguments_sent_as_an_object_are_arguments() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": {"a": 1}}}
    assert told([chunk({"tool_calls": [call]})]) == [("call", "f", '{"a":1}')]
