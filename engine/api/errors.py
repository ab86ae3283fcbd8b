"""Errors as OpenAI's clients expect them: `{"error": {message, type, code, param}}` with the right status."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
RETRY_AFTER_S = 2  # a small model loads in seconds; clients back off by themselves after that


class ApiError(Exception):
    """Raise anywhere in a request; becomes the HTTP answer, or the last event of a stream that already began."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "code": self.code, "param": self.param}}

    def response(self) -> Response:
        headers = {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 502, 503) else None
        return json_response(self.body(), self.status, headers)


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code, param)


def bug() -> ApiError:
    """For an exception nobody expected; the log has its traceback."""
    return ApiError(500, "the server met a bug in itself while answering; its log has the details", "internal_error")


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
