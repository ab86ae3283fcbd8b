"""The small pure rooms: anchors, sessions, the memory store, the command line."""

import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.anchors import MAX_ANCHORS, derive
from gateway.dialects.chat import breakpoints
from gateway.sessions import identify, turn_class
from gateway.store import MemoryStore


def m(role: str, content="x", **more) -> dict:
    return {"role": role, "content": content} | more


def placed(anchors) -> set:
    return {(a.message, a.edge, a.kind) for a in anchors}


def test_the_anchors_of_a_tool_turn() -> None:
    call = m("assistant", None, tool_calls=[{}], reasoning_content="hm")
    body = {"tools": [{}], "messages": [m("system"), m("user"), call, m("tool"), m("assistant"), m("user")]}
    assert placed(derive(body)) == {
        (-1, "end", "tools"),
        (0, "end", "system"),
        (1, "end", "turn"),
        (2, "start", "thinking"),
        (2, "end", "turn"),
        (3, "end", "tool_result"),
        (4, "end", "turn"),
        (5, "start", "user"),
        (5, "end", "turn"),
    }


def test_client_breakpoints_are_anchors() -> None:
    marked = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    body = {"tools": [{"cache_control": {}}], "messages": [m("system", marked), m("user"), m("user", "b", cache_control={})]}
    assert [b.message for b in breakpoints(body)] == [-1, 0, 2]
    assert (2, "end", "client_breakpoint") in placed(derive(body, breakpoints(body)))


@given(st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=300), st.booleans())
def test_anchors_are_bounded_ordered_distinct_and_in_range(roles, tools) -> None:
    body = {"tools": [{}] if tools else [], "messages": [m(r, reasoning_content="t") for r in roles]}
    found = derive(body)
    assert len(found) <= MAX_ANCHORS and len(placed(found)) == len(found)
    assert all(-1 <= a.message < len(roles) and 0 <= a.weight <= 1 for a in found)
    assert [a.message for a in found] == sorted(a.message for a in found)


SESSIONS = [
    ({"x-claude-code-session-id": "u"}, {}, "u", "header:x-claude-code-session-id"),
    ({"session_id": "c"}, {"prompt_cache_key": "p"}, "c", "header:session_id"),
    ({}, {"prompt_cache_key": "p"}, "p", "body:prompt_cache_key"),
    (
        {},
        {"metadata": {"user_id": "user_x_account__session_" + "a" * 8 + "b" * 28}},
        "a" * 8 + "b" * 28,
        "body:metadata.user_id",
    ),
    ({}, {"moorage": {"session": "s"}}, "s", "body:moorage.session"),
]


@pytest.mark.parametrize(("headers", "body", "id", "source"), SESSIONS)
def test_explicit_sessions(headers, body, id, source) -> None:
    session = identify(headers, {"messages": [m("user")]} | body)
    assert (session.id, session.source) == (id, source)


def test_a_conversation_is_its_own_identity_as_it_grows() -> None:
    start = [m("system", "s"), m("user", [{"type": "text", "text": "q", "cache_control": {}}])]
    grown = [m("system", "s"), m("user", [{"type": "text", "text": "q"}]), m("assistant"), m("tool")]
    other = [m("system", "s"), m("user", "another")]
    first = identify({"user-agent": "codex_cli/1"}, {"messages": start})
    assert first.id == identify({}, {"messages": grown}).id != identify({}, {"messages": other}).id
    assert first.agent == "codex" and first.source == "conversation"


@pytest.mark.parametrize(
    "volatile",
    [
        ("Today is Sunday, Nov 29 2026.", "Today is Monday, Nov 30 2026."),
        ("<env>\ntime: 10:15:01\n</env>", "<env>\ntime: 10:15:44\n</env>"),
        ("x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;", "x-anthropic-billing-header: cc_version=2.1; cch=00fff;"),
        ("<total_tokens>1000 left</total_tokens>", "<total_tokens>990 left</total_tokens>"),
    ],
)
def test_a_clock_in_the_system_prompt_does_not_begin_another_session(volatile) -> None:
    def session(line: str, rules: str = "Be kind.", question: str = "q") -> str:
        parts = [{"type": "text", "text": line}, {"type": "text", "text": rules}]
        one = identify({}, {"messages": [m("system", f"{line}\n{rules}"), m("user", question)]})
        return one.id + identify({}, {"messages": [m("system", parts), m("user", question)]}).id

    first, second = volatile
    assert session(first) == session(second)
    assert len({session(first), session(first, rules="Be brief."), session(first, question="another at 10:15")}) == 3


def test_a_long_system_prompt_is_identity_up_to_a_point() -> None:
    """8,192 characters: what an agent appends to a long prompt of its own (a listing, a memory) begins no other session."""

    def session(changed: int) -> str:
        rules = "".join("b" if at == changed else "\n" if at % 100 == 99 else "a" for at in range(9000))
        return identify({}, {"messages": [m("system", rules), m("user", "q")]}).id

    plain = session(-1)
    assert [session(at) == plain for at in (0, 8190, 8191, 8192, 8193, 8999)] == [False, False, False, True, True, True]


def test_kinds_of_turns() -> None:
    tools = {"tools": [{}]}
    assert turn_class({"messages": [m("user")]} | tools) == "first"
    assert turn_class({"messages": [m("user")]}) == "side"
    assert turn_class({"messages": [m("user"), m("assistant"), m("user")]} | tools) == "user"
    assert turn_class({"messages": [m("user"), m("assistant"), m("tool")]} | tools) == "tool_result"


async def test_the_memory_store_books_in_windows_and_stays_bounded() -> None:
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0], max_entries=3)
    grants = [await store.take("k", 4, 10, 60) for _ in range(3)]
    assert [g.ok for g in grants] == [True, True, False] and grants[2].wait == 60 and grants[2].remaining == 2
    await store.take("k", -4, 10, 60)
    assert (await store.take("k", 4, 10, 60)).ok
    now[0] = 61
    assert (await store.take("k", 10, 10, 60)).ok
    for i in range(5):
        await store.put(f"v{i}", b"x", 10)
    assert await store.get("v0") is None and await store.get("v4") == b"x"
    now[0] = 72
    assert await store.get("v4") is None


def cli(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "gateway", *args], capture_output=True, text=True, timeout=60)


def test_help_teaches() -> None:
    out = cli("--help")
    assert out.returncode == 0 and "moorage serve" in out.stdout and ":8100" in out.stdout


WRONG = [
    (["serve", "--config", "/nonexistent.yaml"], "cannot be read"),
    (["serve", "--engine", "nowhere"], "is no http(s) URL"),
    (["serve", "--log-level", "loud"], "--log-level loud"),
    (["serve", "--port", "99999"], "cannot listen on"),
]


@pytest.mark.parametrize(("args", "want"), WRONG)
def test_mistakes_are_one_line_and_a_non_zero_exit(args, want) -> None:
    out = cli(*args)
    assert out.returncode != 0 and want in out.stderr and "Traceback" not in out.stderr


def test_a_port_in_use_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        out = cli("serve", "--port", str(s.getsockname()[1]))
    assert out.returncode == 1 and "cannot listen" in out.stderr and len(out.stderr.splitlines()) == 1
