"""Thoughts that leave the gateway and come back: a signature for Messages, a sealed copy for Responses.

Neither is a secret, the thought is the client's own. The signature says that a thought is unchanged and from here; the sealed
copy lets agents that keep only `encrypted_content` of a reasoning item give the thought back whole.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

SIGNED = "moorage1."
SEALED = "moorage1:"


def sign(thought: str) -> str:
    return SIGNED + hashlib.blake2b(thought.encode("utf-8", "replace"), digest_size=16).hexdigest()


def is_ours(signature: str) -> bool:
    return signature.startswith(SIGNED)


def seal(thought: str) -> str:
    return SEALED + base64.b64encode(thought.encode("utf-8", "replace")).decode()


def unseal(sealed: str) -> str | None:
    """The thought; None when it was not sealed here."""
    if not sealed.startswith(SEALED):
        return None
    try:
        return base64.b64decode(sealed[len(SEALED) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
