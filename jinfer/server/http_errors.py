"""Every error that a client sees, in OpenAI's form: one place."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from jinfer.api.user_errors import USER_ERRORS
from jinfer.engine.requests import ClosedError, DeadlineError, EngineError, QueueFullError

TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        message: what is wrong, and what to do.
        param: the field that is wrong.
        code: a word for programs.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.code = param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be answered as it is."""
    return ApiError(400, message, param=param, code=code)


def too_long(what: str, count: int, most: int, advice: str, param: str) -> ApiError:
    """A text that a model's context has no room for.

    Clients know it by words of OpenAI's: LiteLLM by the first sentence, LangChain by the second.

    Args:
        what: the text, such as "the prompt".
        count, most: its tokens, and those of the context.
        advice: what to do.
    """
    return invalid(
        f"This model's maximum context length is {most} tokens, but {what} has {count}. "
        f"Input tokens exceed the configured limit; {advice}.",
        param,
        "context_length_exceeded",
    )


def unsupported(message: str, param: str | None = None) -> ApiError:
    """A field that asks for something that there is not.

    No 501: clients send a request again that fails with one.
    """
    return invalid(message, param, "not_supported")


def as_api_error(error: BaseException, retry_after: int = 1, param: str | None = None) -> ApiError:
    """What a client is told of an exception.

    Args:
        param: the field that it is about, where it does not say.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return busy(retry_after)
    if isinstance(error, ClosedError):
        return closing(retry_after)
    if isinstance(error, DeadlineError):
        message = "the answer was not done in the time that the service allows"
        return ApiError(503, message, code="deadline_exceeded")
    if isinstance(error, USER_ERRORS) and not isinstance(error, EngineError):
        return invalid(" ".join(str(error).split()), param)
    return ApiError(500, "the server failed at this request; its log says why", code="internal")


def busy(retry_after: int) -> ApiError:
    """More requests wait than are allowed to."""
    return ApiError(
        429,
        "too many requests wait already; try again later",
        code="queue_full",
        headers={"retry-after": str(retry_after)},
    )


def ended_by(cancelled: asyncio.CancelledError) -> ApiError | None:
    """Why the service has ended an answer, as its client is told; None: the client has."""
    reason = cancelled.args[0] if cancelled.args else None
    return reason if isinstance(reason, ApiError) else None


def lost(reason: str) -> ApiError:
    """The service ends at once: a process of its job is lost."""
    return ApiError(503, reason, code="process_lost")


def silent(reason: str, retry_after: int = 1) -> ApiError:
    """A process of the job does not answer, and no request is answered until it does."""
    return ApiError(
        503,
        f"{reason}; try again later",
        code="process_silent",
        headers={"retry-after": str(retry_after)},
    )


def closing(retry_after: int = 1) -> ApiError:
    """The service ends: another one may answer, or the next one here."""
    return ApiError(
        503,
        "the service is closing; try again later",
        code="closing",
        headers={"retry-after": str(retry_after)},
    )


def loading() -> ApiError:
    """A model that is not there yet."""
    return ApiError(503, "Loading model", code="loading", headers={"retry-after": "1"})


def unknown_model(name: str, known: list[str]) -> ApiError:
    """A model that nobody serves."""
    names = ", ".join(known)
    message = f"there is no model {name[:200]!r}; there is: {names}"
    return ApiError(404, message, param="model", code="model_not_found")
