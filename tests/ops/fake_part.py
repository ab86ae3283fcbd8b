"""Stands in for engine or gateway in tests of ops/: `fake_part.py PORT MODE` answers /health and one scripted chat.

Standard library only. MODE: ok | slow (503 with progress first) | die (one last line, exit 3) | mute (content never comes) |
refuse (HTTP 400) | cut (no [DONE])
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, MODE = int(sys.argv[1]), sys.argv[2]
BEGAN = time.monotonic()


def scripted(messages: list[dict]) -> list[dict]:
    """The deltas of one turn: a thought and a call first, then the answer from the tool's result."""
    if MODE == "mute":
        return []
    if messages[-1]["role"] == "tool":
        value = messages[-1]["content"].split('"')[1]
        return [{"content": "listen_port is "}, {"content": value}]
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": ""}}
    parts = ['{"path": "con', 'fig.toml"}']
    return [{"reasoning_content": "I need to "}, {"reasoning_content": "read it."}, {"tool_calls": [call]}] + [
        {"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in parts
    ]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass

    def send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        fraction = (time.monotonic() - BEGAN) / 1.5
        if MODE == "slow" and fraction < 1:
            self.send(
                503, "application/json", json.dumps({"status": "loading", "fraction": fraction, "stage": "weights"}).encode()
            )
        else:
            self.send(200, "application/json", b'{"status": "ok"}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if MODE == "refuse":
            return self.send(400, "application/json", b'{"error": {"message": "no such model"}}')
        chunks: list[dict] = [{"choices": [{"index": 0, "delta": delta}]} for delta in scripted(body["messages"])]
        ours = {"prompt": 90, "common": 60, "source": "live"}
        chunks.append(
            {"choices": [], "usage": {"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 60}, "moorage": ours}}
        )
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ([] if MODE == "cut" else ["data: [DONE]\n\n"])
        print(f"kv cache hit prompt=90 common=60 new=30 messages={len(body['messages'])}", flush=True)
        self.send(200, "text/event-stream", "".join(lines).encode())


if MODE == "die":
    print("moorage: the weights are torn; copy the checkpoint again", flush=True)
    sys.exit(3)
print(f"listening on {PORT}", flush=True)
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
