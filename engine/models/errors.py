"""The one exception this room shows to users."""

from __future__ import annotations


class ModelError(Exception):
    """A model that cannot be loaded. The message is one line: what is wrong and what to do about it."""
