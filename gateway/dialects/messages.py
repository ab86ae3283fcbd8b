"""Anthropic Messages: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import orjson

from gateway.dialects.base import loads
from gateway.dialects.messages_read import read
from gateway.dialects.messages_write import MessagesWriter, error
from gateway.errors import Refusal
from gateway.tools import KnownTools
from gateway.turn import Turn


class Messages:
    """POST /v1/messages."""

    name = "messages"
    upstream_path = "/v1/chat/completions"

    def __init__(self, known: KnownTools | None = None) -> None:
        self._known = known or KnownTools()

    def read(self, turn: Turn) -> Turn:
        body, _, notes = loads(turn.received.body, self._known)
        chat, breakpoints, said = read(body)
        turn = turn.start(orjson.dumps(chat), chat, chat["model"], "stream" in chat, *notes, *said)
        return turn.but(breakpoints=breakpoints)

    def writer(self, turn: Turn) -> MessagesWriter:
        return MessagesWriter(turn)

    def refusal(self, refusal: Refusal) -> bytes:
        return orjson.dumps(error(refusal))


class CountTokens(Messages):
    """POST /v1/messages/count_tokens: the same request, but only its length is asked for (`gateway.counting`)."""

    name = "count_tokens"

    def read(self, turn: Turn) -> Turn:
        turn = super().read(turn)
        return turn.but(stream=False)
