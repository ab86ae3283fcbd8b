"""What records must not keep: key-like strings, mail addresses, whatever else a team names, or all text (hashes only).

Applied by the records thread, so it costs requests nothing. A body that was changed says so and carries the hash of the
original, by which it can still be matched.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Literal

import orjson

# Names a configuration may use instead of an expression of its own.
NAMED = {
    # Prefixes of the large providers' keys, bearer tokens, JSON web tokens, private key blocks.
    "keys": r"\b(?:sk|pk|rk|ghp|gho|ghs|glpat|xox[abprs]|AKIA|ASIA|hf|gsk)[-_]?[A-Za-z0-9_\-]{16,}\b"
    r"|(?i:bearer)\s+[A-Za-z0-9._\-]{16,}|\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----",
    "emails": r"\b[A-Za-z0-9._%+\-]+@[A-Za-z0-9.\-]+\.[A-Za-z]{2,}\b",
}

# Where a record may hold words of a conversation beside its bodies. Reasons and messages are among them: a schema error quotes
# the value that it is about, an upstream's error whatever it likes.
WORDS = {
    "answer": frozenset({"text", "arguments"}),
    "decisions": frozenset({"reason", "before", "after"}),
    "attempts": frozenset({"error"}),
    "error": frozenset({"message", "remedy"}),
}


class Redactor:
    """`rules` are names of NAMED or regular expressions. Raises ValueError, in one line, for an expression that is none."""

    def __init__(self, rules: Sequence[str], bodies: Literal["full", "hash"]) -> None:
        self._hash_all = bodies == "hash"
        self._rules = [(name if name in NAMED else "custom", _compile(NAMED.get(name, name))) for name in rules]

    def apply(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record as it may be written; the same object when there is nothing to hide."""
        if not self._rules and not self._hash_all:
            return record
        words = WORDS if self._hash_all else {}
        out = {k: v if k in ("received", "sent") else self._walk(v, k, words.get(k, frozenset())) for k, v in record.items()}
        for side in ("received", "sent"):
            if out.get(side):
                out[side] = self._side(out[side])
        return out

    def _side(self, side: dict[str, Any]) -> dict[str, Any]:
        body, rest = side["body"], {k: self._walk(v, k, frozenset()) for k, v in side.items() if k != "body"}
        digest = {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body)}
        if self._hash_all:
            return rest | {"body": b""} | digest
        text = body.decode("utf-8", "surrogateescape")
        fresh = self._clean(text)
        if "\\u" in text and (plain := _unescaped(body)) and (hidden := self._clean(plain)) != plain:
            fresh = hidden  # what stands there in escapes, as many clients write all but ASCII
        if fresh == text:
            return side | rest
        raw = fresh.encode("utf-8", "surrogateescape")
        # A custom expression may have eaten into the JSON itself; then nothing but the hash is of use.
        return rest | {"body": raw if _still_json(body, raw) else b"", "redacted": True} | digest

    def _walk(self, value: Any, key: str, words: frozenset[str]) -> Any:
        """`value` cleaned; as a hash where its `key` is one of `words`."""
        if isinstance(value, str):
            if key in words:
                return "sha256:" + hashlib.sha256(value.encode("utf-8", "replace")).hexdigest()
            return self._clean(value)
        if isinstance(value, dict):
            return {k: self._walk(v, k, words) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._walk(v, key, words) for v in value]
        return value

    def _clean(self, text: str) -> str:
        for name, pattern in self._rules:
            text = pattern.sub(f"[{name}]", text)
        return text


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.S)
    except re.error as e:
        raise ValueError(f"records.redact: {pattern!r} is no regular expression ({e})") from None


def _unescaped(body: bytes) -> str:
    """The same JSON with every character as itself; "" when it is none."""
    try:
        return orjson.dumps(orjson.loads(body)).decode()
    except (orjson.JSONDecodeError, TypeError):
        return ""


def _still_json(before: bytes, after: bytes) -> bool:
    try:
        orjson.loads(before)
    except orjson.JSONDecodeError:
        return True
    try:
        orjson.loads(after)
    except orjson.JSONDecodeError:
        return False
    return True
