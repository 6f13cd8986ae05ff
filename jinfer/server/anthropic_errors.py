"""Anthropic's error format: types and status codes of the Messages API."""

from __future__ import annotations

from typing import Any

from jinfer.server.http_errors import ApiError, ErrorFormat
from jinfer.server.schemas.messages import MessageErrorResponse

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def _status(error: ApiError) -> int:
    if error.code == "deadline_exceeded":
        return 504
    return {501: 400, 503: 529}.get(error.status, error.status)


def _body(error: ApiError) -> dict[str, Any]:
    """The JSON body; the message names the field, for which the format has no place."""
    message, field = error.message, error.param
    if field is not None and not message.startswith(f"{field}:"):
        message = f"{field}: {message}"
    kind = _TYPES.get(_status(error), "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


ANTHROPIC_ERRORS = ErrorFormat(
    _body,
    MessageErrorResponse,
    _status,
    (("504", "the answer took too long"), ("529", "not yet, or no longer")),
)
