"""Raw completions: prompts of every form, logprobs, echo, so that logits can be compared from outside."""

import json

import pytest

from tests.support.fake_engine import answer, api


async def test_text_and_token_prompts_mean_the_same(dirs):
    async with api(dirs["plain"], answer(" Paris.")) as server:
        text = await server.openai.completions.create(model="tiny", prompt="The capital of France is<|im_end|>")
        tokens = server.service.text.tokenizer.encode("The capital of France is<|im_end|>")
        ids = await server.openai.completions.create(model="tiny", prompt=tokens)
    assert text.choices[0].text == ids.choices[0].text == " Paris."
    assert [list(r.tokens) for r in server.engine.requests] == [tokens, tokens]
    assert server.engine.requests[0].max_new == 16
    assert text.usage.prompt_tokens == len(tokens) and text.usage.model_dump()["moorage"]["prompt"] == len(tokens)


async def test_lists_of_prompts_times_n(dirs):
    async with api(dirs["plain"], answer("x")) as server:
        made = await server.openai.completions.create(model="tiny", prompt=["a", "b c"], n=2)
        many = await server.openai.completions.create(model="tiny", prompt=[[1, 2], [3]])
    assert [c.index for c in made.choices] == [0, 1, 2, 3] and [c.index for c in many.choices] == [0, 1]
    encode = server.engine.encode
    assert [list(r.tokens) for r in server.engine.requests] == [
        encode("a"),
        encode("a"),
        encode("b c"),
        encode("b c"),
        [1, 2],
        [3],
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_and_echo(dirs, stream):
    async with api(dirs["plain"], answer(" fox 🚀")) as server:
        reply = await server.post("/v1/completions", prompt="The quick", logprobs=1, echo=True, stream=stream)
        encode = server.engine.encode
    if stream:
        parts = [json.loads(x[6:])["choices"][0] for x in reply.text.splitlines() if x.startswith("data: {")]
    else:
        parts = reply.json()["choices"]
    assert "".join(p["text"] for p in parts) == "The quick fox 🚀"
    scored = {k: [v for p in parts for v in p["logprobs"][k]] for k in parts[0]["logprobs"]}
    tokens = [*encode("The quick"), *encode(" fox 🚀")]
    assert scored["token_ids"] == tokens
    assert scored["token_logprobs"] == [None, *[-1.0] * (len(encode("The quick")) - 1), *[-0.5] * len(encode(" fox 🚀"))]
    assert scored["top_token_ids"][1] == [[tokens[1], -1.0]] and len(scored["text_offset"]) == len(tokens)
    assert scored["text_offset"][:2] == [0, len(scored["tokens"][0])]
    assert any(t.startswith("bytes:\\x") for t in scored["tokens"]) or "🚀" in "".join(scored["tokens"])
    assert server.engine.requests[0].prompt_logprobs == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("said", [" fox 🚀 naïve 中文🚀", "🚀🚀🚀 fo", "<|endoftext|>a<think>é", "x"])
async def test_text_offsets_are_places_in_the_text(dirs, stream, echo, said):
    """Also where a character is cut over tokens, a special token is hidden, and text is held back for a stop string."""
    prompt = "ï🚀 The<|im_end|>"
    async with api(dirs["plain"], answer(said)) as server:
        reply = await server.post("/v1/completions", prompt=prompt, logprobs=0, echo=echo, stream=stream, stop="fox jumps")
        pieces = server.service.text.tokenizer.token_bytes
    choices = [json.loads(x[6:])["choices"] for x in reply.text.splitlines() if x.startswith("data: {")]
    parts = [c for cs in choices for c in cs] if stream else reply.json()["choices"]
    text = "".join(p["text"] for p in parts)
    scored = {k: [v for p in parts for v in p["logprobs"][k]] for k in ("token_ids", "text_offset")}
    ends = [*scored["text_offset"][1:], len(text)]
    assert text == (prompt if echo else "") + said.replace("<|endoftext|>", "")
    assert scored["text_offset"][0] == 0
    held = b""
    for token, begin, end in zip(scored["token_ids"], scored["text_offset"], ends, strict=True):
        own = pieces(token)
        if own == b"<|endoftext|>":
            assert begin == end
            continue
        held += own
        if begin == end:
            continue  # its character is not complete
        assert text[begin:end].encode() == held
        held = b""
    assert held == b""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stop, reason", [(["zzz", "ck br"], "ck br"), ("brown fox", "brown fox"), ("zzz", None), (None, None)])
async def test_the_stop_string_that_ended_an_answer_is_told(dirs, stream, path, stop, reason):
    ask = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    async with api(dirs["plain"], answer("The quick brown fox")) as server:
        reply = await server.post(path, **ask, stop=stop, stream=stream)
    lines = [json.loads(x[6:]) for x in reply.text.splitlines() if x.startswith("data: {")] if stream else [reply.json()]
    last = [line["choices"][0] for line in lines][-1]
    assert last["finish_reason"] == "stop" and last["stop_reason"] == reason


async def test_scoring_a_prompt_samples_nothing(dirs):
    async with api(dirs["plain"], answer("unused", end="length")) as server:
        made = await server.openai.completions.create(model="tiny", prompt="The quick", logprobs=0, echo=True, max_tokens=0)
    assert server.engine.requests[0].max_new == 0 and made.choices[0].text == "The quick"
    assert made.choices[0].finish_reason == "length" and made.usage.completion_tokens == 0


async def test_raw_text_is_not_parsed(dirs):
    async with api(dirs["json_calls"], answer("<think>a</think><tool_call>")) as server:
        made = await server.openai.completions.create(model="tiny", prompt="x")
        stopped = await server.openai.completions.create(model="tiny", prompt="x", stop="</think>")
    assert made.choices[0].text == "<think>a</think><tool_call>"
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("<think>a", "stop")


async def test_a_stream_ends_with_usage_and_done(dirs):
    async with api(dirs["plain"], answer("ab")) as server:
        stream = await server.openai.completions.create(
            model="tiny", prompt=["x", "y"], stream=True, stream_options={"include_usage": True}
        )
        chunks = [c async for c in stream]
    assert {c.object for c in chunks} == {"text_completion"} and chunks[-1].choices == [] and chunks[-1].usage.total_tokens > 4
    ends = [c.choices[0] for c in chunks[:-1] if c.choices[0].finish_reason]
    assert sorted(c.index for c in ends) == [0, 1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], 5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 4}, "best_of"),
        ({"prompt": "x", "logprobs": 101}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ],
)
async def test_bad_bodies_name_their_field(dirs, body, param):
    async with api(dirs["plain"], answer("x")) as server:
        reply = await server.post("/v1/completions", **body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param
    assert not server.engine.streams
