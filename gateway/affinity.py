"""Who has the prefix: which deployment answered the longest beginning of this conversation last.

A conversation is a chain of hashes, one link per message, the first one over tools and system head. Remembering a turn stores its
whole chain, so a fork, a rewind or a new session with the same system prompt still finds the deployment that knows most of it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import orjson

from gateway.turn import Turn

KEEP_LINKS = 200_000  # 1,000 conversations of 200 messages, ~30 MB
# Messages hashed per turn, from the beginning: a conversation that shares this many belongs where they were answered.
MAX_LINKS = 512


class Affinity:
    def __init__(self, keep: int = KEEP_LINKS) -> None:
        self._keep = keep
        self._links: OrderedDict[bytes, str] = OrderedDict()

    def best(self, turn: Turn, names: Collection[str]) -> str | None:
        """The deployment among `names` that knows the longest prefix of this turn, None if none knows any."""
        for link in reversed(chain(turn.body)):
            name = self._links.get(link)
            if name in names:
                return name
        return None

    def remember(self, turn: Turn, name: str) -> None:
        for link in chain(turn.body):
            self._links[link] = name
            self._links.move_to_end(link)
        while len(self._links) > self._keep:
            self._links.popitem(last=False)


def chain(body: Any) -> list[bytes]:
    """The links of a chat body; thoughts are left out, because clients drop them."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return []
    state = hashlib.blake2b(orjson.dumps(body.get("tools")), digest_size=12)
    links = []
    for message in messages[:MAX_LINKS]:
        said = [message.get("role"), message.get("content"), message.get("tool_calls"), message.get("tool_call_id")]
        state.update(orjson.dumps(said))
        links.append(state.digest())
    return links
