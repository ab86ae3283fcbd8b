"""A model of random weights, held to the offered tools, makes nothing but valid calls."""

import json

import pytest

from engine.build import build
from engine.config import EngineConfig
from engine.ipc import Done, Grammar, Sampling
from engine.text.grammar import CallForm, calls
from engine.text.parser import OutputParser, OutputStyle
from engine.text.stream import CallArguments, CallStart
from engine.text.tokenizer import load_tokenizer
from tests.engine.serve.harness import Engine, generate
from tests.support.text import write_tokenizer
from tests.support.tiny import make_tiny

MOVE = {
    "type": "object",
    "properties": {"to": {"enum": ["north", "south", "上"]}, "steps": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["to", "steps"],
    "additionalProperties": False,
}
REST = {"type": "object", "properties": {"long": {"type": "boolean"}}, "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in (("move", MOVE), ("rest", REST))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("calls")
    make_tiny("qwen3_5_moe_text", directory, vocab_size=720)  # more ids than the tokenizer has, as real checkpoints
    write_tokenizer(directory, "xml_calls")
    return str(directory)


@pytest.mark.parametrize("kind", ["json", "xml"])
def test_every_call_is_valid(checkpoint, kind) -> None:
    tokenizer = load_tokenizer(checkpoint)
    form = CallForm(kind, tokenizer.id_of("<tool_call>"), tokenizer.id_of("</tool_call>"))
    config = EngineConfig(model=checkpoint, kernels="reference", threads=1, kv_bytes=64 << 20)
    engine = Engine(build(config, lambda fraction, stage: None))
    required = Grammar(lark=calls(TOOLS, form).required(form))
    for n in range(3):
        sampling = Sampling(temperature=float(n), seed=n)
        engine.submit(generate(str(n), [n + 1, 2, 3], 120, sampling=sampling, grammar=required, stop_ids=tokenizer.eos_ids))
    engine.drain()
    for n in range(3):
        assert isinstance(engine.end(str(n)), Done)
        parser = OutputParser(OutputStyle(tools=kind), tools=TOOLS)
        text = tokenizer.decode(engine.tokens(str(n))).removesuffix("<|im_end|>")
        if engine.end(str(n)).reason == "length":  # it goes on calling; the last call is cut
            text = text[: text.rindex("</tool_call>") + len("</tool_call>")]
        events = parser.feed(text) + parser.finish()
        names = [e.name for e in events if isinstance(e, CallStart)]
        assert names and set(names) <= {"move", "rest"} and not parser.findings.broken and not parser.findings.malformed, text
        by_call: dict[int, str] = {}
        for event in events:
            if isinstance(event, CallArguments):
                by_call[event.index] = by_call.get(event.index, "") + event.text
        for index, arguments in by_call.items():
            values = json.loads(arguments)
            if names[index] == "move":
                assert values["to"] in ("north", "south", "上") and 1 <= values["steps"] <= 99 and len(values) == 2
            else:
                assert values in ({}, {"long": True}, {"long": False})
