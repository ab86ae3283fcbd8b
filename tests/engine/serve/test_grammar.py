"""Text under a grammar, from a decoder that knows nothing of it: whatever it wants, what comes out is in the grammar."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar import Grammars, Vocabulary
from engine.ipc import Done, Grammar, RequestError, Sampling, Thinking
from engine.text.grammar import check
from tests.engine.serve.fake import VOCAB
from tests.engine.serve.harness import GREEDY, FakeEngine, generate

END = VOCAB - 1  # the special token that ends an answer
CLOSE = VOCAB - 2  # the one that ends a thought
TOKENS = [bytes([32 + i]) for i in range(VOCAB - 2)] + [b"</think>", b"<end>"]  # printable ASCII, one character a token
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["list", "read"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": "[ ]{0,2}"},
}
JSON = f"start: %json {json.dumps(SCHEMA)}"


def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENS, (END, CLOSE), END, lambda text: [b - 32 for b in text.encode()])


def engine(**more) -> FakeEngine:
    return FakeEngine(grammars=Grammars(vocabulary), **more)


def text(tokens: list[int]) -> str:
    return b"".join(TOKENS[t] for t in tokens).decode()


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=70), min_size=1, max_size=4),
    st.sampled_from([GREEDY, Sampling(temperature=1.5, seed=1), Sampling(temperature=0.9, top_k=3, top_p=0.8, seed=2)]),
    st.sampled_from([(), (END,)]),
)
def test_whatever_the_model_wants_the_answer_is_valid(prompts, sampling, stop_ids) -> None:
    served = engine(pages=9)
    for n, prompt in enumerate(prompts):
        grammar = Grammar(lark=JSON)
        served.submit(generate(str(n), prompt, 100, sampling=sampling, stop_ids=stop_ids, grammar=grammar))
    served.drain()
    for n in range(len(prompts)):
        end = served.end(str(n))
        assert isinstance(end, Done) and end.reason == "stop"
        answer = json.loads(text(served.tokens(str(n))))
        assert answer["name"] in ("list", "read") and 0 <= answer["count"] <= 99 and len(answer) == 2


def test_the_answer_may_end_only_where_the_grammar_may() -> None:
    grammar = Grammar(lark="start: /[a-c]{3}/ /[x]{0,4}/")
    for n in range(20):
        served = engine()
        served.run(generate("a", [n], 30, stop_ids=(END,), grammar=grammar))
        answer = text(served.tokens("a"))
        assert len(answer) >= 3 and set(answer[:3]) <= set("abc") and set(answer[3:]) <= {"x"} and len(answer) <= 7


def test_a_grammar_may_begin_after_the_thought() -> None:
    served = engine()
    thinking = Thinking(close=(CLOSE,), open_at_start=True, budget=5)
    served.run(generate("a", [1, 2, 3], 60, thinking=thinking, grammar=Grammar(lark=JSON, after=CLOSE)))
    tokens = served.tokens("a")
    close = tokens.index(CLOSE)
    assert close <= 5 and json.loads(text(tokens[close + 1 :]))["name"] in ("list", "read")


def test_preemption_keeps_the_place_in_the_grammar() -> None:
    grammar = Grammar(lark="start: /([a-c][x-z]){60}/")
    served = engine(pages=4, slots=2, prefill_chunk=64)
    served.run(*(generate(id, [n] * 60, 130, grammar=grammar) for n, id in enumerate(("old", "young"))))
    assert served.scheduler.counters["preempted"] > 0
    for id in ("old", "young"):
        answer = text(served.tokens(id))
        assert len(answer) == 120 and set(answer[::2]) <= set("abc") and set(answer[1::2]) <= set("xyz")


@pytest.mark.parametrize("lark", ["start: nothing_here", 'start: %json {"type": "objec"}'])
def test_a_bad_grammar_is_refused_in_one_line(lark) -> None:
    served = engine()
    served.run(generate("a", [1], 5, grammar=Grammar(lark=lark)), generate("b", [1], 1))
    end = served.end("a")
    assert isinstance(end, RequestError) and end.status == 400 and "\n" not in end.message
    assert check(lark) and "\n" not in check(lark)
    assert isinstance(served.end("b"), Done)
    assert check(JSON) == ""


def test_without_a_tokenizer_a_grammar_is_refused_not_ignored() -> None:
    served = FakeEngine()
    served.run(generate("a", [1], 5, grammar=Grammar(lark=JSON)))
    assert served.end("a").status == 400
