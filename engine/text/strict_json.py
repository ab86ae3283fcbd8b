"""JSON whose every string can be written as UTF-8: escapes like `\\ud800` alone are legal JSON but no text."""

from __future__ import annotations

import json
from typing import Any


def loads(text: str) -> Any:
    """Like `json.loads`. Raises ValueError also for values that hold half a surrogate pair."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value
