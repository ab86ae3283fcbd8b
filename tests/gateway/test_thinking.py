"""Off means off: every spelling in, one meaning, one spelling out; and the answer is checked."""

import asyncio
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import Deployment, ThinkingRule
from gateway.config_file import parse
from gateway.edits import apply
from gateway.policy.thinking import form_of, read, resolve, spell
from gateway.policy.thinking_watch import Inline
from gateway.turn import Thinking
from tests.support.fake_upstream import FakeUpstream, Stream, Whole, content, finish, message, reasoning, tool_call, usage
from tests.support.gateway import Gateway, ask, settings

OFF = [
    {"reasoning_effort": "none"},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"max_tokens": 0}},
    {"output_config": {"effort": "off"}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False, "other": 1}},
    {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    {"extra_body": {"enable_thinking": False}},
    {"enable_thinking": False},
    {"think": False},
    {"think": "none"},
    {"thinking": {"type": "disabled"}},
    {"thinking": False},
    {"thinking": {"type": "enabled", "budget_tokens": 0}},
    {"thinking_budget": 0},
    {"messages": [{"role": "user", "content": "add them /no_think"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "/no_think add them"}]}]},
    {"messages": [{"role": "system", "content": "Be brief. /no_think"}, {"role": "user", "content": "add"}]},
    {"reasoning_effort": "high", "enable_thinking": False},
]
ON = [
    ({"reasoning_effort": "low"}, "low"),
    ({"reasoning": {"effort": "high"}}, "high"),
    ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"}}, "medium"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, None),
    ({"think": True}, None),
    ({"think": "high"}, "high"),
    ({"messages": [{"role": "user", "content": "why? /think"}]}, None),
]
BUDGET = [{"thinking": {"type": "enabled", "budget_tokens": 512}}, {"reasoning": {"max_tokens": 512}}, {"thinking_budget": 512}]
SILENT = [
    {},
    {"reasoning_effort": None},
    {"messages": [{"role": "user", "content": "what does cmd/no_think do, and /no_think/x?"}]},
    {
        "messages": [
            {"role": "user", "content": "old /no_think"},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": "new"},
        ]
    },
]
BASE = {"model": "m", "messages": [{"role": "user", "content": "add"}]}


def edited(body, decisions):
    return apply(body, [e for d in decisions for e in d.edits])


@pytest.mark.parametrize("said", OFF)
def test_every_off_is_off_and_survives_to_the_engine(said) -> None:
    body = BASE | said
    assert read(body).mode == "off"
    sent = edited(body, spell(body, read(body), "template"))
    assert sent["chat_template_kwargs"]["enable_thinking"] is False
    left = {k: v for k, v in sent.items() if k not in ("chat_template_kwargs", "messages", "model")}
    assert left == {}  # no other spelling is left that could say something else
    assert sent["chat_template_kwargs"].keys() <= {"enable_thinking", "other"}
    assert read(sent).mode == "off" and spell(sent, read(sent), "template") == ()


@pytest.mark.parametrize(("said", "effort"), ON)
def test_on_keeps_its_effort(said, effort) -> None:
    thinking = read(BASE | said)
    assert (thinking.mode, thinking.effort) == ("on", effort)
    assert read(edited(BASE | said, spell(BASE | said, thinking, "template"))).effort == effort


@pytest.mark.parametrize("said", BUDGET)
def test_budgets(said) -> None:
    thinking = read(BASE | said)
    assert (thinking.mode, thinking.budget) == ("budget", 512)
    sent = edited(BASE | said, spell(BASE | said, thinking, "template"))
    assert sent == BASE | {"thinking": {"type": "enabled", "budget_tokens": 512}}


@pytest.mark.parametrize("said", SILENT)
def test_nothing_said_changes_nothing(said) -> None:
    assert read(BASE | said).mode is None and spell(BASE | said, read(BASE | said), "template") == ()


@pytest.mark.parametrize("said", [s for s, _ in ON] + BUDGET)
@pytest.mark.parametrize("form", ["template", "plain", "effort", "openai"])
def test_a_forced_off_overrides_every_spelling_in_any_place(said, form) -> None:
    body = BASE | said
    thinking, notes = resolve(read(body), ThinkingRule(force=False))
    sent = edited(body, spell(body, thinking, form))
    assert thinking.mode == "off" and notes[0].rule == "force" and read(sent).mode == "off"
    want = {"chat_template_kwargs": {"enable_thinking": False}} if form in ("template", "plain") else {"reasoning_effort": "none"}
    assert {k: v for k, v in sent.items() if k not in BASE} == want
    assert "/think" not in json.dumps(sent)


RULES = [
    ({"force": False}, Thinking(mode="on"), "off", None),
    ({"force": "off"}, Thinking(), "off", None),
    ({"force": True}, Thinking(mode="off"), "on", None),
    ({"force": 300}, Thinking(mode="on"), "budget", 300),
    ({"force": 0}, Thinking(mode="on"), "off", None),
    ({"force": 1}, Thinking(mode="on"), "budget", 1),
    ({"default": False}, Thinking(), "off", None),
    ({"default": False}, Thinking(mode="on"), "on", None),
    ({"max_budget": 100}, Thinking(mode="budget", budget=500), "budget", 100),
    ({"max_budget": 100}, Thinking(mode="on"), "budget", 100),
    ({"max_budget": 100}, Thinking(mode="off"), "off", None),
    ({}, Thinking(), None, None),
]


@pytest.mark.parametrize(("rule", "said", "mode", "budget"), RULES)
def test_rules(rule, said, mode, budget) -> None:
    now, _ = resolve(said, msgspec.convert(rule, ThinkingRule))
    assert (now.mode, now.budget) == (mode, budget)


def test_hosted_apis_take_effort() -> None:
    def at(kind: str, base: str = "") -> Deployment:
        return Deployment(name="d", serves="m", kind=kind, model="m", api_base=base)

    assert form_of(at("engine", "http://e")) == "template" and form_of(at("openai", "http://vllm/v1")) == "plain"
    assert form_of(at("openai", "https://api.openai.com/v1")) == "openai" and form_of(at("provider")) == "effort"


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "xhigh", "max"])
def test_plain_servers_get_one_of_the_three_efforts_they_know(effort) -> None:
    for said in ({"reasoning_effort": effort}, {"output_config": {"effort": effort}, "thinking": {"type": "adaptive"}}):
        body = BASE | said
        sent = edited(body, spell(body, read(body), "plain"))
        assert sent["reasoning_effort"] in ("low", "medium", "high") and sent["chat_template_kwargs"] == {"enable_thinking": True}
        assert sent["reasoning_effort"] == effort or effort in ("minimal", "xhigh", "max")
        assert edited(body, spell(body, read(body), "template"))["reasoning_effort"] == effort


@pytest.mark.parametrize(("budget", "effort"), [(1, "low"), (2048, "low"), (2049, "medium"), (8192, "medium"), (31999, "high")])
def test_a_budget_is_an_effort_where_there_are_no_budgets(budget, effort) -> None:
    body = BASE | {"thinking": {"type": "enabled", "budget_tokens": budget}}
    assert edited(body, spell(body, read(body), "openai")) == BASE | {"reasoning_effort": effort}


def test_a_deployment_may_say_which_form_it_takes() -> None:
    entry = {"model_name": "m", "litellm_params": {"model": "openai/m", "api_base": "http://ollama:11434/v1"}}
    (ollama,) = parse({"model_list": [entry | {"model_info": {"thinking": "effort"}}]}, "test", {}).deployments
    body = {"messages": [{"role": "user", "content": "hi"}], "think": False}
    (said,) = spell(body, read(body), form_of(ollama))
    assert apply(body, said.edits) == {"messages": body["messages"], "reasoning_effort": "none"}


# --- the answer


@given(st.text(alphabet="ab \n<>/think", max_size=30), st.text(alphabet="ab <>/", max_size=20), st.booleans(), st.data())
def test_inline_thoughts_come_out_whole_however_they_are_cut(thought, rest, closed, data) -> None:
    thought = thought.replace("</think>", "")
    text = "<think>" + thought + ("</think>" + rest if closed else "")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    inline, got = Inline(), ["", ""]
    for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
        moved, plain = inline.feed(text[a:b])
        got[0], got[1] = got[0] + moved, got[1] + plain
    moved, plain = inline.flush()
    whole, _, behind = (thought + "</think>" + rest).partition("</think>") if closed else (thought, "", "")
    assert got[0] + moved == whole.lstrip() and got[1] + plain == behind.lstrip()


@given(st.text(max_size=20).filter(lambda t: not t.lstrip().startswith("<think>")), st.data())
def test_plain_content_is_never_taken_for_a_thought(text, data) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    inline = Inline()
    parts = [inline.feed(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)] + [inline.flush()]
    assert "".join(p[0] for p in parts) == "" and "".join(p[1] for p in parts) == text


@pytest.fixture
async def up():
    async with FakeUpstream() as fake:
        yield fake


THOUGHT = [reasoning("hm"), reasoning(" hm"), content("5"), finish(), usage(3, 3)]


@pytest.mark.parametrize("stream", [True, False])
async def test_violations_are_stripped_and_counted(up, tmp_path, stream) -> None:
    up.script(Stream(THOUGHT) if stream else Whole(message("5", reasoning_content="hm hm")))
    async with Gateway(settings(up.base, policies=[{"thinking": {"force": False}}]), tmp_path) as gw:
        got = await gw.post(ask(stream=stream))
        (record,) = await gw.records()
        metrics = await gw.get("/metrics")
    assert b"hm" not in got.body and (got.text() if stream else got.json["choices"][0]["message"]["content"]) == "5"
    assert up.requests[0].json["chat_template_kwargs"] == {"enable_thinking": False}
    assert record["answer"]["channels"]["reasoning_content"]["text"] == "hm hm"  # the record says what really came
    assert [d["rule"] for d in record["decisions"]].count("violation.strip") == 1
    assert b'moorage_decisions_total{rule="violation.strip",stage="thinking"} 1.0' in metrics.body


@pytest.mark.parametrize("stream", [True, False])
async def test_violations_can_be_errors(up, tmp_path, stream) -> None:
    up.script(Stream(THOUGHT) if stream else Whole(message("5", reasoning_content="hm")))
    rule = {"thinking": {"force": False, "on_violation": "error"}}
    async with Gateway(settings(up.base, policies=[rule]), tmp_path) as gw:
        got = await gw.post(ask(stream=stream))
    assert got.status == 502 and got.json["error"]["code"] == "thinking_violation"


@pytest.mark.parametrize("stream", [True, False])
async def test_violations_can_be_logged_and_pass(up, tmp_path, stream, caplog) -> None:
    up.script(Stream(THOUGHT) if stream else Whole(message("5", reasoning_content="hm hm")))
    rule = {"thinking": {"force": False, "on_violation": "log"}}
    async with Gateway(settings(up.base, policies=[rule]), tmp_path) as gw:
        got = await gw.post(ask(stream=stream))
        (record,), metrics = await gw.records(), await gw.get("/metrics")
    assert b"hm" in got.body and (got.text() if stream else got.json["choices"][0]["message"]["content"]) == "5"
    assert [d["rule"] for d in record["decisions"]].count("violation.log") == 1
    assert b'moorage_decisions_total{rule="violation.log",stage="thinking"} 1.0' in metrics.body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_streamed_violation_ends_at_its_first_token_and_the_upstream_is_cancelled(up, tmp_path, path) -> None:
    up.script(Stream([reasoning("hm"), 300.0, content("5"), finish()]))
    rule = {"thinking": {"force": False, "on_violation": "error"}}
    body = ask(stream=True, max_tokens=9) if "responses" not in path else {"model": "m", "input": "hi", "stream": True}
    async with Gateway(settings(up.base, policies=[rule]), tmp_path) as gw:
        got = await asyncio.wait_for(gw.post(body, path), 60)  # the upstream itself would take five minutes
        (record,) = await gw.records()
        await gone(up)
    assert b"hm" not in got.body and record["error"]["code"] == "thinking_violation" and len(record["attempts"]) == 1


async def gone(up: FakeUpstream) -> None:
    """Until the upstream has seen its client leave."""
    for _ in range(3000):
        if up.cancelled:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the upstream was not cancelled")


async def test_a_violation_is_asked_once_more_in_stricter_form(up, tmp_path) -> None:
    up.script(Stream([reasoning("hm"), 20.0]), Stream([content("5"), finish(), usage(3, 1)]))
    async with Gateway(settings(up.base, policies=[{"thinking": {"force": False, "retry": True}}]), tmp_path) as gw:
        got = await gw.post(ask(stream=True))
        (record,) = await gw.records()
    assert got.text() == "5" and b"hm" not in got.body and up.cancelled == 1
    assert up.requests[1].json["messages"][-1]["content"] == "hello /no_think"
    assert len(record["attempts"]) == 2 and record["outcome"] == "ok"


async def test_a_second_violation_is_stripped(up, tmp_path) -> None:
    up.script(Stream(THOUGHT))
    async with Gateway(settings(up.base, policies=[{"thinking": {"force": False, "retry": True}}]), tmp_path) as gw:
        got = await gw.post(ask(stream=True))
    assert got.text() == "5" and b"hm" not in got.body and len(up.requests) == 2


async def test_an_empty_thought_never_reaches_content(up, tmp_path) -> None:
    up.script(Stream([content("<think>"), content("\n\n"), content("</think>\n\n"), content("5"), content(" <think>"), finish()]))
    async with Gateway(settings(up.base), tmp_path) as gw:
        got = await gw.post(ask(stream=True))
        (record,) = await gw.records()
    assert got.text() == "5 <think>" and got.text("reasoning_content") == ""
    assert "empty_thought" in [d["rule"] for d in record["decisions"]]


async def test_an_unclosed_thought_stays_reasoning(up, tmp_path) -> None:
    up.script(
        Stream([content("<think>so I"), content(" wonder"), finish("length")]), Whole(message("<think>so I wonder", "length"))
    )
    async with Gateway(settings(up.base), tmp_path) as gw:
        got, whole = await gw.post(ask(stream=True)), await gw.post(ask())
    assert (got.text(), got.text("reasoning_content")) == ("", "so I wonder")
    assert whole.json["choices"][0]["message"]["reasoning_content"] == "so I wonder"
    assert whole.json["choices"][0]["message"]["content"] == ""


async def test_delta_reasoning_is_mapped_and_kept(up, tmp_path) -> None:
    up.script(Stream([reasoning("a", "reasoning"), content("x"), reasoning("b", "reasoning"), finish()]))
    async with Gateway(settings(up.base), tmp_path) as gw:
        got = await gw.post(ask(stream=True))
        (record,) = await gw.records()
    assert got.text("reasoning_content") == "ab" == got.text("reasoning") and got.text() == "x"
    assert record["answer"]["channels"]["reasoning_content"]["text"] == "ab"


async def test_thinking_that_eats_all_tokens_is_flagged(up, tmp_path) -> None:
    up.script(Stream([reasoning("long"), finish("length")]))
    async with Gateway(settings(up.base), tmp_path) as gw:
        await gw.post(ask(stream=True))
        (record,) = await gw.records()
    assert [d["rule"] for d in record["decisions"]] == ["usage", "ate_output"]


async def test_a_call_right_behind_an_inline_thought(up, tmp_path) -> None:
    up.script(Stream([content("<think>x</think>\n"), tool_call(0, "{}", "c", "run"), finish("tool_calls")]))
    async with Gateway(settings(up.base), tmp_path) as gw:
        got = await gw.post(ask(stream=True))
    deltas = [e["choices"][0]["delta"] for e in got.events if isinstance(e, dict) and e["choices"]]
    assert deltas == [
        {"reasoning_content": "x"},
        {"tool_calls": tool_call(0, "{}", "c", "run")["choices"][0]["delta"]["tool_calls"]},
        {},
    ]


@pytest.mark.parametrize(("used", "flagged"), [(512, False), (513, True)])
@pytest.mark.parametrize("stream", [True, False])
async def test_thinking_beyond_its_budget_is_flagged(tmp_path, used, flagged, stream) -> None:
    counts = usage(10, 600, completion_tokens_details={"reasoning_tokens": used})
    async with FakeUpstream() as up, Gateway(settings(up.base, "openai"), tmp_path) as gw:
        whole = message("Hi") | {"usage": counts["usage"]}
        up.script(Stream([reasoning("hm"), content("Hi"), finish(), counts]) if stream else Whole(whole))
        await gw.post(ask(stream=stream, thinking={"type": "enabled", "budget_tokens": 512}))
        (record,) = await gw.records()
    assert ("over_budget" in [d["rule"] for d in record["decisions"]]) == flagged
