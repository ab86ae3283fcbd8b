"""The policy table: which rows hold for which model, key and route, and that header, record and upstream show what they do."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config import Config
from gateway.config_file import parse
from tests.support.fake_upstream import FakeUpstream, Whole, message
from tests.support.gateway import Gateway, ask, settings

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ROWS: list[dict[str, Any]] = [
    {"clamp": {"temperature": {"max": 1}, "top_k": {"max": 50}}, "thinking": {"force": False, "retry": True}},
    {"model": "big-*", "clamp": {"temperature": {"max": 0.8}}},
    {"key": "desk", "clamp": {"temperature": {"max": 2}}, "tools": {"retries": 3}},
    {"route": MESSAGES, "thinking": {"on_violation": "log"}, "unknown": "drop"},
    {"model": "big-*", "key": "night*", "route": RESPONSES, "thinking": {"force": 4096}, "tools": {"check": False}},
    {"key": "night*", "clamp": {"temperature": {"force": 0}}},
]


def table(rows: list[dict[str, Any]] = ROWS) -> Config:
    return parse({"policies": rows}, "test", {})


# (model, key, route) -> what holds, as (path into the policy, value)
CASES = [
    # the model's row wins over the common one
    ("small", "anonymous", CHAT, {"clamp.temperature.max": 1, "clamp.top_k.max": 50, "thinking.force": False}),
    ("big-1", "anonymous", CHAT, {"clamp.temperature.max": 0.8, "clamp.top_k.max": 50}),
    # a key's row stands later than the model's, so the key's holds
    ("big-1", "desk", CHAT, {"clamp.temperature.max": 2, "tools.retries": 3, "tools.repair": True}),
    ("small", "desk", CHAT, {"clamp.temperature.max": 2, "unknown": "pass"}),
    # a route's row changes what it names and nothing else: thinking stays forced off
    ("small", "anonymous", MESSAGES, {"thinking.on_violation": "log", "thinking.force": False, "thinking.retry": True}),
    ("small", "anonymous", MESSAGES, {"unknown": "drop", "clamp.temperature.max": 1}),
    # all three patterns must fit
    ("big-1", "nightly", RESPONSES, {"thinking.force": 4096, "tools.check": False, "clamp.temperature.force": 0}),
    ("big-1", "nightly", CHAT, {"thinking.force": False, "tools.check": True}),
    ("big-1", "desk", RESPONSES, {"thinking.force": False, "tools.check": True}),
    ("small", "night-2", RESPONSES, {"thinking.force": False, "clamp.temperature.force": 0}),
    # patterns are whole names: no prefix match without a star, case counts
    ("big", "desktop", CHAT, {"clamp.temperature.max": 1, "tools.retries": 1}),
    ("BIG-1", "Desk", CHAT, {"clamp.temperature.max": 1}),
]


def look(policy: Any, path: str) -> Any:
    for step in path.split("."):
        policy = policy[step] if isinstance(policy, dict) else getattr(policy, step)
    return policy


@pytest.mark.parametrize(("model", "key", "route", "holds"), CASES)
def test_the_rows_that_hold(model: str, key: str, route: str, holds: dict[str, Any]) -> None:
    policy = table().policy(model, key, route)
    assert {path: look(policy, path) for path in holds} == holds


@pytest.mark.parametrize("section", ["thinking", "tools", "normalise"])
def test_a_later_row_leaves_alone_what_it_does_not_name(section: str) -> None:
    changes = {
        "thinking": [{"force": False}, {"retry": True}, {"on_violation": "error"}, {"max_budget": 10}],
        "tools": [{"check": False}, {"repair": False}, {"retries": 5}, {"otherwise": "pass"}, {"max_kb": 1}],
        "normalise": [{"clock": "move"}, {"tool_order": False}, {"billing_header": "keep"}, {"pin_thinking": True}],
    }[section]
    merged = getattr(table([{section: change} for change in changes]).policy("m", "k", CHAT), section)
    assert all(getattr(merged, name) == value for change in changes for name, value in change.items())


def test_a_later_row_may_set_a_setting_back_to_its_default() -> None:
    rows = [{"thinking": {"retry": True, "force": False}}, {"model": "m", "thinking": {"retry": False, "force": None}}]
    assert table(rows).policy("m", "k", CHAT).thinking == table([]).policy("m", "k", CHAT).thinking
    assert table(rows).policy("other", "k", CHAT).thinking.retry is True


def test_order_is_the_only_precedence() -> None:
    rows = [{"key": "k", "unknown": "refuse"}, {"model": "m", "unknown": "drop"}, {"route": CHAT, "unknown": "pass"}]
    assert table(rows).policy("m", "k", CHAT).unknown == "pass"
    assert table(rows[::-1]).policy("m", "k", CHAT).unknown == "refuse"
    assert table([]).policy("m", "k", CHAT) == table([{"model": "x", "unknown": "drop"}]).policy("m", "k", CHAT)


KEYS = [{"name": "desk", "key": "sk-desk"}, {"name": "nightly", "key": "sk-night"}]
# (key, route) -> what the upstream gets of a temperature of 1.5, and the rules named
SEEN = [
    ("sk-desk", CHAT, 1.5, []),
    ("sk-desk", MESSAGES, 1.5, ["clamp.unknown.drop"]),
    ("sk-night", CHAT, 0, ["clamp.temperature.force"]),
    ("sk-night", RESPONSES, 0, ["clamp.temperature.force"]),
]


@pytest.mark.parametrize(("key", "route", "temperature", "rules"), SEEN)
async def test_what_holds_is_what_is_sent_and_said(tmp_path, key, route, temperature, rules) -> None:
    body = {"model": "m", "temperature": 1.5, "frobnicate": 1}
    body |= {"input": "hi"} if route == RESPONSES else ask() | {"max_tokens": 10}
    async with FakeUpstream() as up:
        up.script(Whole(message()))
        async with Gateway(settings(up.base, keys=KEYS, policies=ROWS), tmp_path) as gw:
            got = await gw.post(body, route, authorization=f"Bearer {key}")
            (record,) = await gw.records()
    sent = up.requests[0].json
    assert got.status == 200 and sent["temperature"] == temperature
    assert ("frobnicate" in sent) == (route != MESSAGES) and sent["chat_template_kwargs"]["enable_thinking"] is False
    recorded = [f"{d['stage']}.{d['rule']}" for d in record["decisions"]]
    named = got.headers["x-moorage-decisions"].split(",")
    assert [r for r in recorded if r.startswith("clamp.")] == rules and "thinking.force" in recorded
    assert set(recorded) == set(named)
    changed = {e["path"]: (e.get("before"), e.get("after")) for d in record["decisions"] for e in d.get("edits", ())}
    assert changed.get("temperature") == ((1.5, 0) if "clamp.temperature.force" in rules else None)
