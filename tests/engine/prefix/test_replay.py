"""The replay bench against a server that remembers prefixes by the rules: what it sends, counts and refuses to trust."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ops.bench import agent_replay, agent_requests


class Server(ThreadingHTTPServer):
    """Counts characters as tokens and reuses the longest common prefix with any earlier request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[bytes] = []
        self.seen: list[str] = []
        self.cheats = False  # claims a hit where there can be none
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    deltas = ({"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "x"})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.append(raw)
        text = "".join(m["content"] for m in json.loads(raw)["messages"])
        cached = max((_lcp(text, s) for s in self.server.seen), default=0)
        cached = len(text) if self.server.cheats else cached
        self.server.seen.append(text)
        usage = {"prompt_tokens": len(text), "prompt_tokens_details": {"cached_tokens": cached}, "moorage": {"lost": 1}}
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        for event in [*({"choices": [{"delta": d}]} for d in self.deltas), {"choices": [], "usage": usage}]:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def _lcp(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.fixture
def server():
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def never() -> None:
    raise AssertionError("only the control `disk` restarts the server")


@pytest.fixture
def lines() -> list[bytes]:
    talk = [message("system", "s" * 50), message("user", "hello")]
    bodies = [{"messages": list(talk)}]
    for n in range(3):
        talk += [message("assistant", f"call {n}"), message("tool", f"result {n}")]
        bodies.append({"messages": list(talk)})
    edited = [*talk[:3], message("tool", "[removed]"), *talk[4:], message("user", "go on")]
    bodies.append({"messages": edited})
    return [json.dumps(b, indent=None, separators=(", ", ":")).encode() for b in bodies]  # odd spacing: must arrive as it is


def test_live_sends_the_bytes_of_the_file_and_names_each_turn(server, lines) -> None:
    turns = agent_replay.replay(lines, server.url, "live", never, "k", 10)
    assert server.bodies == lines
    assert [t.kind for t in turns] == ["first", "tool", "tool", "tool", "edit"]
    figures = agent_replay.summary(turns, 1 << 30)
    assert 0 < figures["hit_rate_tokens"] < 1 and figures["lost_tokens"] == 5 and figures["written_gib"] == 1
    assert set(figures["classes"]) == {"first", "tool", "edit"} and figures["tool_over_other"] > 0


def test_cold_and_negative_share_nothing_and_hot_shares_all(server, lines) -> None:
    cold = agent_replay.replay(lines, server.url, "cold", never, "k", 10)
    negative = agent_replay.replay(lines, server.url, "negative", never, "k", 10)
    assert max(t.cached for t in (*cold, *negative)) <= 4  # random salts share a digit or two
    hot = agent_replay.replay(lines, server.url, "hot", never, "k", 10)
    assert [t.cached for t in hot] == [t.prompt for t in hot]


def test_a_server_that_claims_hits_on_salted_requests_is_not_believed(server, lines, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "r.jsonl").write_bytes(b"\n".join(lines))
    arguments = ["agent_replay", str(tmp_path / "r.jsonl"), "--url", server.url, "--control", "negative"]
    monkeypatch.setattr(sys, "argv", arguments)
    agent_replay.main()
    assert f"sha256 {hashlib.sha256((tmp_path / 'r.jsonl').read_bytes()).hexdigest()}" in capsys.readouterr().out
    server.cheats = True
    with pytest.raises(SystemExit, match="negative control"):
        agent_replay.main()


def test_a_refusal_ends_the_replay_in_one_line(lines) -> None:
    with pytest.raises(agent_replay.ReplayError, match="127.0.0.1"):
        agent_replay.replay(lines, "http://127.0.0.1:9", "live", never, "k", 2)


@pytest.mark.parametrize("channel", agent_replay.CHANNELS)
def test_the_first_token_counts_on_every_channel(server, lines, channel: str, monkeypatch) -> None:
    """An answer without a token that counts is as late as its end."""
    monkeypatch.setattr(Handler, "deltas", ({"role": "assistant", "content": ""}, {channel: "x"}))
    (turn,) = agent_replay.replay(lines[:1], server.url, "live", never, "k", 10)
    assert turn.ttft_s < turn.total_s
    monkeypatch.setattr(Handler, "deltas", ({"role": "assistant", "content": ""},))
    (turn,) = agent_replay.replay(lines[:1], server.url, "live", never, "k", 10)
    assert turn.ttft_s == turn.total_s


def test_llama_servers_timings_count_as_usage() -> None:
    assert agent_replay.usage_of({"timings": {"cache_n": 40, "prompt_n": 2}}) == {"prompt": 42, "cached": 40}


def test_the_control_disk_restarts_between_turns(server, lines) -> None:
    restarts: list[int] = []
    turns = agent_replay.replay(lines, server.url, "disk", lambda: restarts.append(len(server.bodies)), "k", 10)
    assert restarts == [1, 2, 3, 4] and [t.kind for t in turns] == ["first"] + ["restart"] * 4


def test_a_recorded_session_becomes_growing_requests_with_an_edit_in_the_middle(tmp_path, monkeypatch) -> None:
    def said(role: str, *parts: dict, **more: object) -> dict:
        return {"type": "message", "message": {"role": role, "content": list(parts), **more}}

    entries: list[dict] = [{"type": "session"}, said("user", {"type": "text", "text": "Fix the bug. " * 20})]
    for n in range(20):
        call = {"type": "toolCall", "id": f"c{n}", "name": "read", "arguments": {"path": f"f{n}.py"}}
        entries.append(said("assistant", {"type": "text", "text": f"I read {n}."}, call))
        if n != 3:  # aborted: the call was never answered
            entries.append(said("toolResult", {"type": "text", "text": f"line {n}\n" * 30}, toolCallId=f"c{n}"))
        else:
            entries.append(said("user", {"type": "text", "text": "Stop. Go on otherwise."}))
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    monkeypatch.setattr(sys, "argv", ["agent_requests", str(tmp_path / "s.jsonl"), str(tmp_path / "out"), "--tokens", "1500"])
    agent_requests.main()
    bodies = [json.loads(line) for line in (tmp_path / "out.live.jsonl").read_bytes().splitlines()]
    kinds = agent_replay.classify(bodies)
    assert kinds[0] == "first" and kinds[-2:] == ["edit", "tool"] and set(kinds[1:-2]) == {"tool"}
    before, after = bodies[-3]["messages"], bodies[-2]["messages"]
    changed = [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    half = agent_requests.size(before) / 2
    assert len(changed) == 1 and abs(agent_requests.size(before[: changed[0]]) - half) < half / 4
    for body in bodies:
        calls = [c["id"] for m in body["messages"] for c in m.get("tool_calls", ())]
        assert calls == [m["tool_call_id"] for m in body["messages"] if m["role"] == "tool"] and "c3" not in calls
