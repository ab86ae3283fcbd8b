"""Each sampling parameter over HTTP against its definition. The real engine's own log-probabilities say what it may choose."""

from __future__ import annotations

import math

import pytest

from tests.support.engine_process import serving
from tests.support.text import write_tokenizer
from tests.support.tiny import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [5, 99, 300, 17, 650, 3]
MANY = 64  # answers of one token: enough that one outside the allowed set would show


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_tiny("qwen3_5_moe_text", path, vocab_size=700, max_position_embeddings=1024)
    with serving(write_tokenizer(path, "plain"), path / "log") as running:
        running.wait_ready()
        yield running


def ask(server, **body) -> list[dict]:
    """The choices of a completion, each with `ids`, `best` ([(id, logprob)] a token, best first) and `scores`."""
    body = {"prompt": PROMPT, "max_tokens": 1, "logprobs": 100, "ignore_eos": True} | body
    reply = server.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    choices = reply.json()["choices"]
    for choice in choices:
        scored = choice["logprobs"]
        choice |= {"ids": scored["token_ids"], "best": scored["top_token_ids"], "scores": scored["token_logprobs"]}
    return choices


def drawn(server, **body) -> set[int]:
    """What MANY answers of one token begin with."""
    choices = ask(server, n=MANY, **body)
    assert [c["index"] for c in choices] == list(range(MANY))
    return {c["ids"][0] for c in choices}


@pytest.fixture(scope="module")
def best(server) -> list[tuple[int, float]]:
    """The likeliest first tokens and their log-probabilities."""
    return [tuple(pair) for pair in ask(server, temperature=0)[0]["best"][0]]


def test_temperature_spreads_the_answers(server, best) -> None:
    cold, hot = drawn(server, temperature=0), drawn(server, temperature=2, seed=1)
    assert cold == drawn(server, temperature=1e-4) == {best[0][0]}
    assert len(hot) > 40, "of 700 tokens, nearly all alike"


def test_top_k(server, best) -> None:
    assert drawn(server, top_k=3, temperature=5) == {token for token, _ in best[:3]}
    assert drawn(server, top_k=1, temperature=5) == {best[0][0]}


def test_top_p(server, best) -> None:
    inside = sum(math.exp(logprob) for _, logprob in best[:4])
    assert drawn(server, top_p=inside - 1e-4) == {token for token, _ in best[:4]}
    assert drawn(server, top_p=1e-6) == {best[0][0]}


def test_min_p(server, best) -> None:
    least = math.exp(best[4][1] - best[0][1])
    assert drawn(server, min_p=least * 0.999) == {token for token, _ in best[:5]}
    assert drawn(server, min_p=1) == {best[0][0]}


def test_a_seed_and_n(server) -> None:
    one, again, other = (ask(server, n=3, max_tokens=8, seed=seed) for seed in (7, 7, 70))
    assert [c["ids"] for c in one] == [c["ids"] for c in again] != [c["ids"] for c in other]
    assert len({tuple(c["ids"]) for c in one}) == 3, "each answer draws for itself"
    assert ask(server, n=1, max_tokens=8, seed=7)[0]["ids"] == one[0]["ids"]
    assert len({tuple(c["ids"]) for c in ask(server, n=3, max_tokens=8)}) == 3


@pytest.mark.parametrize("presence, frequency", [(2, 0), (0, 0.5), (0, 2), (1, 1)])
def test_presence_and_frequency_penalties(server, presence, frequency) -> None:
    """At every step the answer is the best of what the raw log-probabilities leave after the penalties of what was sampled."""
    plain = ask(server, temperature=0, max_tokens=40)[0]
    got = ask(server, temperature=0, max_tokens=40, presence_penalty=presence, frequency_penalty=frequency)[0]
    for at, token in enumerate(got["ids"]):
        before = got["ids"][:at]

        def left(pair, before=before) -> float:
            return pair[1] - presence * (pair[0] in before) - frequency * before.count(pair[0])

        first, second, *_ = sorted(map(left, got["best"][at]), reverse=True)
        chosen = next(pair for pair in got["best"][at] if pair[0] == token)
        assert left(chosen) == pytest.approx(first, abs=1e-4) or first - second < 1e-4
    assert got["ids"] != plain["ids"], "greedy text of a random model goes in circles; penalties end that"


def test_repetition_penalty(server) -> None:
    plain = ask(server, temperature=0, max_tokens=40)[0]["ids"]
    once = ask(server, temperature=0, max_tokens=40, repetition_penalty=50)[0]["ids"]
    assert len(set(plain)) < 40, "this model repeats itself when it may"
    assert len(set(once)) == 40 and not set(once) & set(PROMPT)


def test_logit_bias_and_min_tokens(server, best) -> None:
    assert drawn(server, logit_bias={str(best[30][0]): 100}) == {best[30][0]}
    eos = server.http.post("/v1/tokenize", json={"prompt": "<|im_end|>"}).json()["tokens"][0]
    likely = {"logit_bias": {str(eos): 100}, "ignore_eos": False, "max_tokens": 9, "temperature": 0}
    short, longer = ask(server, **likely)[0], ask(server, **likely, min_tokens=5)[0]
    assert (short["finish_reason"], short["text"]) == ("stop", "")
    assert longer["finish_reason"] == "stop" and len(longer["ids"]) == 5 and eos not in longer["ids"]


def test_stop(server) -> None:
    whole = ask(server, temperature=0, max_tokens=40)[0]
    text = whole["text"]
    stop = next(text[i : i + 3] for i in range(len(text) // 2, len(text)) if "\ufffd" not in text[i : i + 3])
    cut = ask(server, temperature=0, max_tokens=40, stop=["nowhere in it", stop])[0]
    assert (cut["text"], cut["finish_reason"], cut["stop_reason"]) == (text[: text.index(stop)], "stop", stop)
    assert (whole["finish_reason"], whole["stop_reason"]) == ("length", None)


@pytest.mark.parametrize("top", [0, 1, 5, 100])
def test_logprobs(server, best, top) -> None:
    (choice,) = ask(server, temperature=0, max_tokens=3, logprobs=top)
    assert [len(row) for row in choice["best"]] == [top] * 3 and all(score <= 0 for score in choice["scores"])
    assert choice["scores"][0] == pytest.approx(best[0][1], abs=1e-6)
    assert [tuple(pair) for pair in choice["best"][0]] == best[:top]
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    made = server.http.post("/v1/chat/completions", json=chat | {"logprobs": True, "top_logprobs": top}).json()
    entries = made["choices"][0]["logprobs"]["content"]
    assert [len(e["top_logprobs"]) for e in entries] == [top] * 3
    assert all(e["logprob"] == max(t["logprob"] for t in e["top_logprobs"]) for e in entries if top)


def test_text_and_token_prompts_lists_n_and_echo(server) -> None:
    words = "The quick brown fox"
    tokens = server.http.post("/v1/tokenize", json={"prompt": words}).json()["tokens"]
    text, ids = (ask(server, prompt=prompt, temperature=0, max_tokens=6, echo=True)[0] for prompt in (words, tokens))
    assert text["text"] == ids["text"] and text["text"].startswith(words)
    assert text["ids"][: len(tokens)] == tokens and text["scores"] == ids["scores"] and text["scores"][0] is None
    many = ask(server, prompt=[words, words + "!"], n=2, temperature=0, max_tokens=6, echo=True)
    assert [c["index"] for c in many] == [0, 1, 2, 3]
    assert [c["text"] for c in many[:2]] == [text["text"]] * 2 and many[2]["text"] == many[3]["text"]
    assert many[2]["text"].startswith(words + "!")
    mixed = ask(server, prompt=[tokens, [*tokens, 7]], temperature=0, max_tokens=6)
    assert [c["ids"] for c in mixed][0] == text["ids"][len(tokens) :]
