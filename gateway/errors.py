"""What can go wrong, as values: `Refusal` is what a client is told, `UpstreamError` is what an upstream did to us.

Both name the cause and the remedy in one line. Neither ever carries a traceback, a key or a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Refusal(Exception):
    """A request this gateway answers with an error. Every stage may raise it; each dialect gives it its own JSON shape.

    `message` is the cause, `remedy` what the user can do; `headers` go out with the answer (Retry-After).
    """

    def __init__(
        self,
        status: int,
        message: str,
        remedy: str = "",
        *,
        code: str = "invalid_request",
        type: str = "",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.remedy = remedy
        self.code = code
        self.type = type or error_type(status)
        self.param = param
        self.headers = dict(headers or {})

    @property
    def text(self) -> str:
        """Cause and remedy as one line."""
        return f"{self.message.rstrip('.')}. {self.remedy}" if self.remedy else self.message

    def openai(self) -> dict[str, Any]:
        """The OpenAI error object. `remedy` is ours, clients ignore what they do not know."""
        error = {"message": self.text, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error | ({"remedy": self.remedy} if self.remedy else {})}


class UpstreamError(Refusal):
    """An upstream failed. `retryable` says whether another attempt, here or elsewhere, may go better; `elsewhere` that another
    deployment may do better although this one will not (it refuses our key, or has no such model).

    `kind`: connect (nothing was sent) | timeout | status (it answered with an error) | died (it broke off) | protocol.
    """

    def __init__(
        self, status: int, message: str, remedy: str = "", *, kind: str, retryable: bool, elsewhere: bool = False, **more: Any
    ) -> None:
        super().__init__(status, message, remedy, **({"code": f"upstream_{kind}"} | more))
        self.kind = kind
        self.retryable = retryable
        self.elsewhere = elsewhere

    def hide(self, secrets: Iterable[str]) -> None:
        """Upstreams quote back what they were sent; none of these goes on to clients, logs and records."""
        for secret in secrets:
            self.message, self.remedy = self.message.replace(secret, "***"), self.remedy.replace(secret, "***")
            self.code, self.type = self.code.replace(secret, "***"), self.type.replace(secret, "***")
            self.param = self.param and self.param.replace(secret, "***")


def error_type(status: int) -> str:
    """OpenAI's error `type` for an HTTP status."""
    known = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return known.get(status, "invalid_request_error" if status < 500 else "server_error")
