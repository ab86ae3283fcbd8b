"""OpenAI Responses: POST /v1/responses."""

from __future__ import annotations

import orjson

from gateway.dialects.base import loads
from gateway.dialects.responses_read import read
from gateway.dialects.responses_write import ResponsesWriter
from gateway.errors import Refusal
from gateway.tools import KnownTools
from gateway.turn import Turn


class Responses:
    name = "responses"
    upstream_path = "/v1/chat/completions"

    def __init__(self, known: KnownTools | None = None) -> None:
        self._known = known or KnownTools()

    def read(self, turn: Turn) -> Turn:
        body, _, notes = loads(turn.received.body, self._known)
        chat, wire, said = read(body)
        turn = turn.start(orjson.dumps(chat), chat, chat["model"], "stream" in chat, *notes, *said)
        return turn.but(wire=wire)

    def writer(self, turn: Turn) -> ResponsesWriter:
        return ResponsesWriter(turn)

    def refusal(self, refusal: Refusal) -> bytes:
        return orjson.dumps(refusal.openai())
