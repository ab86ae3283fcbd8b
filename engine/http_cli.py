"""One control request to a running engine, for the command line's verbs."""

from __future__ import annotations

import json
from typing import Any

import typer

from engine.user import UserError

URL = typer.Option(help="Address of a running engine.")


def call(method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One control request to a running engine; its JSON answer. Raises UserError."""
    import urllib.error
    import urllib.request

    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        raise UserError(_message(e)) from None
    except (OSError, ValueError) as e:
        raise UserError(
            f"no engine answers at {url} ({getattr(e, 'reason', e)}); start one with `serve`, or give its --url"
        ) from None


def _message(error: Any) -> str:
    try:
        return json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{error.url} answered {error.code} {error.reason}; is this the address of a Moorage engine?"
