"""The demo model's recipe and the checkpoint it made."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from ops.train_demo.agents import agent_dialogue  # noqa: E402
from ops.train_demo.decode import Decoder  # noqa: E402
from ops.train_demo.dialogues import EARLY, LONG, MAIN, dialogue_json, make_dialogue  # noqa: E402
from ops.train_demo.evaluate import BARS, LIMIT, Play, load, weights_sum  # noqa: E402
from ops.train_demo.filler import HELD_TOPICS, TRAIN_TOPICS  # noqa: E402
from ops.train_demo.init import plain  # noqa: E402
from ops.train_demo.model import Model, Pack  # noqa: E402
from ops.train_demo.names import HELD_WORDS, TRAIN_GIVEN, TRAIN_SURNAMES, TRAIN_WORDS, Names  # noqa: E402
from ops.train_demo.reply import fits_schema, parse_reply, states  # noqa: E402
from ops.train_demo.routing import expert_shares, summary  # noqa: E402
from ops.train_demo.shape import Shape  # noqa: E402
from ops.train_demo.tail import forward_tail, read  # noqa: E402
from ops.train_demo.text import load_template, render  # noqa: E402

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "ops" / "demo_model"
CASES = ROOT / "tests" / "data" / "demo_dialogues.jsonl"
SMALL = Shape(
    vocab=96,
    hidden=64,
    layers=4,
    heads=2,
    kv_heads=1,
    head_dim=32,
    rotary=8,
    lin_k_heads=1,
    lin_v_heads=2,
    lin_k_dim=32,
    lin_v_dim=32,
    experts=8,
    top_k=2,
    expert_width=32,
    shared_width=32,
)


@pytest.mark.parametrize("mix", [EARLY, MAIN, LONG])
def test_same_seed_same_dialogues(mix):
    once = [dialogue_json(make_dialogue(random.Random(i), mix)) for i in range(30)]
    again = [dialogue_json(make_dialogue(random.Random(i), mix)) for i in range(30)]
    assert once == again
    assert len(set(once)) == 30


def test_held_out_words_are_not_training_words():
    assert not set(HELD_WORDS) & set(TRAIN_WORDS)


def test_every_reference_call_fits_its_schema():
    for i in range(200):
        d = make_dialogue(random.Random(i), held_out=i % 2 == 0)
        for r in d.rounds:
            for step in r.steps:
                for call in d.call_message(step)["tool_calls"]:
                    assert fits_schema(call["function"], d.tool_schemas)


def judged(d, tally):
    """The dialogue's own last round, played as if the model had written it."""
    play = Play(d)
    for message in d.round_messages(d.rounds[-1])[1:]:
        if message["role"] != "assistant":
            continue
        calls = "".join(f"<tool_call>\n{json.dumps(c['function'])}\n</tool_call>" for c in message.get("tool_calls", ()))
        thought = message.get("reasoning_content", "") + "\n</think>\n\n" if d.thinking else ""
        play.advance(parse_reply(thought + message["content"] + calls, d.thinking), tally)
    return play


def test_reference_answers_pass_their_own_judgement():
    for i in range(100):
        d, tally = make_dialogue(random.Random(i), held_out=True), Counter()
        assert judged(d, tally).over and tally["exact_answer"] == 1 and tally["thinking_obeyed"] == tally["turns"], dialogue_json(
            d
        )


def test_training_names_reach_characters_no_list_holds():
    people = {Names(random.Random(i), noise=0.5).person(zh=True) for i in range(40)}
    assert any(not set(name) <= set(TRAIN_SURNAMES + TRAIN_GIVEN) for name in people)


@pytest.mark.parametrize("held_out", [False, True])
def test_agent_shaped_dialogues_hold_the_same_game(held_out):
    shell = 0
    for i in range(60):
        d, tally = agent_dialogue(random.Random(i), 4000, held_out), Counter()
        names = [schema["function"]["name"] for schema in d.tool_schemas]
        assert len(set(names)) == len(names)
        for step in (step for r in d.rounds for step in r.steps):
            for call in d.call_message(step)["tool_calls"]:
                assert fits_schema(call["function"], d.tool_schemas)
                shell += any(str(v).startswith("cat ") for v in call["function"]["arguments"].values())
        assert judged(d, tally).over and tally["exact_answer"] == 1, dialogue_json(d)
        assert len(dialogue_json(d)) > 3000
    assert shell, "some agents have a shell instead of a tool that reads"


def test_held_out_filler_uses_other_help_texts():
    assert HELD_TOPICS and not set(HELD_TOPICS) & set(TRAIN_TOPICS)


def test_a_fact_is_stated_only_as_a_whole():
    assert states("`key` is `8`.", "8") and states("值是8。", "8")
    assert not states("`key` is `81`.", "8") and not states("lemon", "on")


def test_template_thinking_switch():
    template, messages = load_template(), [{"role": "user", "content": "hi"}]
    on = template.render(messages=messages, add_generation_prompt=True)
    off = template.render(messages=messages, add_generation_prompt=True, enable_thinking=False)
    assert on == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert off.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_template_strips_thoughts_before_the_last_user_message_and_merges_tool_results():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "é<"}}}
    text = load_template().render(
        messages=[
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "old"},
            {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "new",
                "tool_calls": [call, {"function": {"name": "g", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
        ]
    )
    assert text == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\ncd<|im_end|>\n"
        '<|im_start|>assistant\n<think>\nnew\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": "é<"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}],
        [{"role": "assistant", "content": None}],
        [{"role": "developer", "content": "s"}, {"role": "user", "content": None}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": None}}]}],
    ],
)
def test_template_survives_missing_content(messages):
    assert load_template().render(messages=messages, add_generation_prompt=True)


def test_template_refuses_unknown_roles():
    from jinja2.exceptions import TemplateError

    with pytest.raises(TemplateError, match="Unexpected message role"):
        load_template().render(messages=[{"role": "critic", "content": "x"}])


@pytest.fixture(scope="module")
def small() -> Model:
    model = Model(SMALL)
    plain(model, torch.Generator().manual_seed(3))
    return model.eval()


def packed(ids):
    """Two dialogues in one row, with the convolution's gap after each."""
    gap = torch.zeros(1, 3, dtype=torch.long)
    row = torch.cat((ids[:1], gap, ids[1:], gap), 1)
    doc = torch.cat((torch.zeros_like(ids[:1]), gap - 1, torch.ones_like(ids[1:]), gap - 1), 1)
    return row, Pack.of(doc)


def test_training_model_equals_transformers(small):
    transformers = pytest.importorskip("transformers")
    config = transformers.models.qwen3_5_moe.configuration_qwen3_5_moe.Qwen3_5MoeTextConfig(**SMALL.hf_config(1, 0))
    theirs = transformers.Qwen3_5MoeForCausalLM(config).float().eval()
    missing, unexpected = theirs.load_state_dict(small.state_dict(), strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    theirs.tie_weights()
    ids = torch.randint(0, SMALL.vocab, (2, 150), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        truth = theirs(ids).logits
        row, pack = packed(ids)
        ours = small.logits(small(row, pack)[0]).view(2, 153, -1)[:, :150]
    assert (ours - truth).abs().max() < 1e-4


def test_cached_decode_equals_full_forward(small):
    prompts = [[5, 9, 60, 3, 7, 8, 1], [11, 4], list(range(1, 90))]
    written = Decoder(small, set()).generate(prompts, 12)
    for prompt, out in zip(prompts, written, strict=True):
        ids = torch.tensor([prompt + out])
        with torch.no_grad():
            logits = small.logits(small(ids, Pack.of(torch.zeros_like(ids)))[0])[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == out


def test_the_tail_behind_what_was_read_equals_the_whole(small):
    ids = torch.randint(0, SMALL.vocab, (1, 90), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        whole = small(ids, Pack.of(torch.zeros_like(ids)))[0]
        for cut in (3, 32, 77):
            tail = forward_tail(small, ids[:, cut:], read(small, ids[:, :cut]))[0]
            assert (tail - whole[:, cut:]).abs().max() < 1e-4


def test_expert_shares_count_every_choice(small):
    shares = expert_shares(small, [[1, 2, 3, 4, 5], list(range(40))])
    assert shares.shape == (SMALL.layers, SMALL.experts) and torch.allclose(shares.sum(1), torch.ones(SMALL.layers))
    even = summary(torch.full((1, 8), 1 / 8))[0]
    assert even["busiest"] == even["idlest"] == 1 and even["effective"] == 8
    assert summary(torch.eye(8)[:1])[0]["effective"] == 1


def test_gradient_of_the_block_product_is_right(small):
    x = torch.randn(1, 40, SMALL.hidden, generator=torch.Generator().manual_seed(1), requires_grad=True)
    mlp = small.model.layers[0].mlp
    mlp(x)[0].square().sum().backward()
    flat, got = x.detach().flatten(0, 1).requires_grad_(), x.grad.flatten(0, 1)
    top, chosen, _ = mlp.gate(flat)
    up = torch.einsum("tkih,th->tki", mlp.experts.gate_up_proj[chosen], flat)
    gate, up = up.chunk(2, -1)
    down = mlp.experts.down_proj[chosen]
    out = torch.einsum("tkhi,tki,tk->th", down, torch.nn.functional.silu(gate) * up, top)
    out = out + mlp.shared_expert_gate(flat).sigmoid() * mlp.shared_expert(flat)
    out.square().sum().backward()
    assert torch.allclose(flat.grad, got, atol=1e-4)


shipped = pytest.mark.skipif(not (SHIPPED / "model.safetensors").exists(), reason="no checkpoint in this tree")


@shipped
def test_shipped_checkpoint_is_small_and_loads_in_transformers():
    transformers = pytest.importorskip("transformers")
    assert sum(p.stat().st_size for p in SHIPPED.iterdir()) <= 30e6
    theirs, info = transformers.Qwen3_5MoeForCausalLM.from_pretrained(SHIPPED, output_loading_info=True, dtype=torch.float32)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours, enc = load(SHIPPED)
    tok = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    for i in range(3):
        d = make_dialogue(random.Random(i), held_out=True)
        text = tok.apply_chat_template(d.messages(), tools=d.tool_schemas or None, tokenize=False)
        assert text == render(enc.template, d)
        ids = enc.tok.encode(text, add_special_tokens=False).ids
        assert tok(text, add_special_tokens=False)["input_ids"] == ids
    row = torch.tensor([ids])
    with torch.no_grad():
        assert (theirs(row).logits - ours.logits(ours(row, Pack.of(torch.zeros_like(row)))[0])).abs().max() < 2e-3


@shipped
@pytest.mark.parametrize("figure", BARS)
def test_shipped_figures_meet_the_bars(figure: str):
    report = json.loads((SHIPPED / "eval.json").read_text())
    assert report["greedy"] and not report["constrained"] and report["overall"]["dialogues"] >= 400
    assert report["weights"] == weights_sum(SHIPPED), "these are the figures of other weights"
    assert report["overall"][figure] >= BARS[figure]


@shipped
def test_thinking_off_is_off_on_every_turn():
    groups = json.loads((SHIPPED / "eval.json").read_text())["groups"]
    assert {name: g["thinking_obeyed"] for name, g in groups.items() if name.endswith("off") and g["thinking_obeyed"] < 1} == {}


@shipped
def test_shipped_model_answers_committed_dialogues():
    """A few of the cases the engine's own tests send, through the training model."""
    model, enc = load(SHIPPED)
    decoder = Decoder(model, {enc.id["<|im_end|>"]})
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()][:8]
    prompts = [enc.prompt(c["messages"], c["tools"], c["thinking"]) for c in cases]
    for case, ids in zip(cases, decoder.generate_all(prompts, LIMIT), strict=True):
        reply = parse_reply(enc.tok.decode(ids, skip_special_tokens=False), case["thinking"])
        assert list(reply.calls) == case["expect"]["calls"]
        assert all(states(reply.content, f) for f in case["expect"]["facts"])
