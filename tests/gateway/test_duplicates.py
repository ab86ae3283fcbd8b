"""A key that stands twice means something else to every parser: refused where a policy reads, passed on as it came elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.base import loads
from gateway.errors import Refusal
from gateway.tools import KnownTools
from tests.support.fake_upstream import FakeUpstream, Whole, message
from tests.support.gateway import Gateway, settings

MESSAGES = '"messages":[{"role":"user","content":"hi"}]'
PATHS = {
    "/v1/chat/completions": MESSAGES,
    "/v1/messages": MESSAGES + ',"max_tokens":9',
    "/v1/responses": '"input":"hi"',
    "/v1/completions": '"prompt":"hi"',
    "/v1/embeddings": '"input":"hi"',
}


@pytest.mark.parametrize("path", PATHS)
async def test_a_key_twice_is_refused_in_every_dialect(tmp_path, path) -> None:
    async with FakeUpstream() as up, Gateway(settings(up.base, "openai"), tmp_path) as gw:
        got = await gw.post(f'{{"model":"m",{PATHS[path]},"top_k":1, "top_k" : 2}}'.encode(), path)
        (record,) = await gw.records()
    assert got.status == 400 and "stands twice in the request body" in got.body.decode() and not up.requests
    assert record["outcome"] == "refused"


NESTED = [
    ('"thinking":{"type":"disabled","type":"enabled"}', "thinking"),
    ('"chat_template_kwargs":{"enable_thinking":false, "enable_thinking":true}', "chat_template_kwargs"),
    ('"extra_body":{"chat_template_kwargs":{"enable_thinking":false,"enable\\u005fthinking":true}}', "extra_body"),
    ('"stream_options":{"include_usage":true,"include_usage":false}', "stream_options"),
]


@pytest.mark.parametrize(("field", "name"), NESTED)
async def test_no_policy_is_passed_by_with_a_key_twice(tmp_path, field, name) -> None:
    policies = [{"thinking": {"force": "off"}}]
    async with FakeUpstream() as up, Gateway(settings(up.base, "openai", policies=policies), tmp_path) as gw:
        got = await gw.post(f'{{"model":"m",{MESSAGES},{field}}}'.encode())
    assert got.status == 400 and name in got.json["error"]["message"] and not up.requests


async def test_a_key_twice_inside_a_message_passes_as_it_came(tmp_path) -> None:
    raw = b'{"model":"m","messages":[{"role":"user","content":"a","content":"b"}]}'
    async with FakeUpstream() as up, Gateway(settings(up.base, "openai"), tmp_path) as gw:
        up.script(Whole(message()))
        assert (await gw.post(raw)).status == 200
    assert up.requests[0].body == raw


# Texts that look like the syntax around them.
TEXT = st.text(st.sampled_from(list('a"\\,:{} \n')) | st.characters(codec="utf-8"), max_size=8)
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.lists(TEXT, max_size=2)
)
PAIRS = st.lists(st.tuples(TEXT, VALUES | st.dictionaries(TEXT, VALUES, max_size=3)), max_size=6)
SPACE = st.sampled_from(["", "", " ", "\n\t "])


@given(PAIRS, st.data())
def test_found_exactly_when_there_is_one(pairs: list[tuple[str, Any]], data: st.DataObject) -> None:
    escape = data.draw(st.booleans())

    def spaced(part: str) -> str:
        return data.draw(SPACE) + part + data.draw(SPACE)

    texts = (spaced(json.dumps(k, ensure_ascii=escape)) + ":" + spaced(json.dumps(v, ensure_ascii=False)) for k, v in pairs)
    raw = spaced("{" + (",".join(texts) or data.draw(SPACE)) + "}").encode()
    names = [k for k, _ in pairs]
    try:
        body = loads(raw, KnownTools())[0]
    except Refusal as refusal:
        assert len(set(names)) < len(names) and "twice" in refusal.message
    else:
        assert len(set(names)) == len(names) and body == dict(pairs)


@pytest.mark.parametrize(
    "first, second", [("a/b", r"a\/b"), ("seed", r"\u0073eed"), ("seed", "seed"), ("größe", r"gr\u00f6\u00dfe")]
)
@pytest.mark.parametrize("length", [0, 9000])
def test_a_key_that_stands_twice_in_two_spellings_is_found_in_short_and_in_long_bodies(first, second, length) -> None:
    def body(key: str) -> bytes:
        return f'{{"model":"seed","{first}":1,"x":"{"y" * length}","{key}":2}}'.encode()

    loads(body(second + "_"), KnownTools())
    with pytest.raises(Refusal, match="stands twice"):
        loads(body(second), KnownTools())
