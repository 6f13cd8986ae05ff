"""HTTP errors: error responses in the format of OpenAI or of a route's dialect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from jinfer.api.user_errors import USER_ERRORS
from jinfer.engine.requests import (
    ClosedError,
    DeadlineError,
    EngineError,
    NotFiniteError,
    QueueFullError,
)
from jinfer.server.http.schema_base import ErrorResponse

ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """An error response, as an exception.

    Attributes:
        status: HTTP status code.
        message: what is wrong, and how to fix it.
        param: the request field at fault.
        code: a machine-readable error code.
        headers: extra response headers.
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
        """Return the JSON body of the response."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class RunsElsewhereError(Exception):
    """Signals that the model's own process has to answer the request.

    Attributes:
        model: the `ServedModel`.
        awake: whether to wake the model first.
        begun: whether the client has received the response's status.
    """

    def __init__(self, model: Any, *, awake: bool = True) -> None:
        super().__init__(f"{model.name} runs in its own process")
        self.model, self.awake, self.begun = model, awake, False


@dataclass(frozen=True)
class ErrorFormat:
    """The error format of a dialect.

    Attributes:
        body: the JSON body.
        schema: its schema.
        status: the HTTP status.
        more: additional statuses and their meanings.
    """

    body: Callable[[ApiError], dict[str, Any]]
    schema: type[BaseModel]
    status: Callable[[ApiError], int]
    more: tuple[tuple[str, str], ...] = ()


OPENAI_ERRORS = ErrorFormat(ApiError.body, ErrorResponse, lambda error: error.status)


def invalid_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Create an error for a bad request (400)."""
    return ApiError(400, message, param=param, code=code)


def context_exceeded(what: str, count: int, limit: int, advice: str, param: str) -> ApiError:
    """Create the error for a prompt that exceeds the context.

    Clients recognize it by OpenAI's wording: LiteLLM by the first sentence, LangChain by the
    second.

    Args:
        what: the text that is too long, such as "the prompt".
        count, limit: its number of tokens, and the context's size.
        advice: how to fix it.
    """
    return invalid_request(
        f"This model's maximum context length is {limit} tokens, but {what} has {count}. "
        f"Input tokens exceed the configured limit; {advice}.",
        param,
        "context_length_exceeded",
    )


def unsupported_field(message: str, param: str | None = None) -> ApiError:
    """Create the error for a field with an unsupported feature.

    Not status 501: clients retry a request that fails with a 5xx status.
    """
    return invalid_request(message, param, "not_supported")


def as_api_error(error: BaseException, retry_after: int = 1, param: str | None = None) -> ApiError:
    """Convert an exception to an error response.

    Args:
        param: the request field at fault, if the exception does not name one.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RunsElsewhereError):  # a background response
        return _not_elsewhere(error)
    if isinstance(error, QueueFullError):
        why = "too many requests wait already; try again later"
        return _retry(429, why, "queue_full", retry_after)
    if isinstance(error, ClosedError):
        return shutting_down(retry_after)
    if isinstance(error, DeadlineError):
        message = "the answer was not complete within the server's time limit"
        return ApiError(503, message, code="deadline_exceeded")
    if isinstance(error, USER_ERRORS) and not isinstance(error, EngineError):
        return invalid_request(" ".join(str(error).split()), param)
    if isinstance(error, NotFiniteError):
        return ApiError(500, str(error), code="not_finite")
    return ApiError(500, "the server failed; see its log", code="internal")


def _not_elsewhere(error: RunsElsewhereError) -> ApiError:
    """Create the error for a feature of the server's own process."""
    reason = f"{error}, which does not answer in the background"
    return unsupported_field(f"{reason}; serve with --no-model-processes", "model")


def _retry(status: int, message: str, code: str, seconds: int) -> ApiError:
    """Create an error with Retry-After."""
    return ApiError(status, message, code=code, headers={"retry-after": str(seconds)})


def cancel_reason(cancelled: asyncio.CancelledError) -> ApiError | None:
    """Return why the server cancelled a request; None if the client disconnected."""
    reason = cancelled.args[0] if cancelled.args else None
    return reason if isinstance(reason, ApiError) else None


def process_lost(reason: str) -> ApiError:
    """Create the error for the death of a process of a distributed job."""
    return ApiError(503, reason, code="process_lost")


def process_unresponsive(reason: str, retry_after: int = 1) -> ApiError:
    """Create the error for a process of a distributed job that does not respond."""
    return _retry(503, f"{reason}; try again later", "process_silent", retry_after)


def shutting_down(retry_after: int = 1) -> ApiError:
    """Create the error for a shutdown; another replica, or the next start, may answer."""
    return _retry(503, "the service is closing; try again later", "closing", retry_after)


def model_loading() -> ApiError:
    """Create the error for a model that is still loading."""
    return _retry(503, "Loading model", "loading", 1)


def model_not_loaded(name: str) -> ApiError:
    """Create the error for a model that requests do not load."""
    return invalid_request(
        f"{name} is not loaded; load it with POST /models/load", "model", "model_not_loaded"
    )


def load_failed(name: str, reason: str) -> ApiError:
    """Create the error for a failed load; the next request tries again."""
    return ApiError(503, f"{name} could not be loaded: {reason}", code="load_failed")


def no_room(name: str, max_models: int, retry_after: int) -> ApiError:
    """Create the error for a model that cannot be loaded because others are in use."""
    why = (
        f"there is no room for {name}: {max_models} of --max-loaded {max_models} models are in use"
    )
    return _retry(503, f"{why}; try again later", "no_room", retry_after)


def unknown_model(name: str, served: list[str]) -> ApiError:
    """Create the error for an unknown model name."""
    names = ", ".join(served) or "none"
    message = f"there is no model {name[:200]!r}; there is: {names}"
    return ApiError(404, message, param="model", code="model_not_found")


def repeated(error: ApiError) -> ApiError:
    """Copy an error for another request."""
    known: dict[str, Any] = {"param": error.param, "code": error.code, "headers": error.headers}
    return ApiError(error.status, error.message, **known)
