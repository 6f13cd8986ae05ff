"""HTTP errors: every error response, in OpenAI's format or in the one of a route's API."""

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
        """The JSON body of the response."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class RunsElsewhereError(Exception):
    """No error: the model of a request is in a process of its own, which is to answer.

    Attributes:
        model: the `ServedModel`.
        awake: whether it has to be woken for the answer.
        begun: whether the client has a response's status already.
    """

    def __init__(self, model: Any, *, awake: bool = True) -> None:
        super().__init__(f"{model.name} runs in a process of its own")
        self.model, self.awake, self.begun = model, awake, False


@dataclass(frozen=True)
class ErrorFormat:
    """How the routes of an API write errors.

    Attributes:
        body: the JSON body.
        schema: its schema.
        status: the HTTP status.
        more: statuses that other APIs do not have, and what they mean.
    """

    body: Callable[[ApiError], dict[str, Any]]
    schema: type[BaseModel]
    status: Callable[[ApiError], int]
    more: tuple[tuple[str, str], ...] = ()


OPENAI_ERRORS = ErrorFormat(ApiError.body, ErrorResponse, lambda error: error.status)


def invalid_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A bad request (400)."""
    return ApiError(400, message, param=param, code=code)


def context_exceeded(what: str, count: int, limit: int, advice: str, param: str) -> ApiError:
    """A prompt that exceeds the model's context.

    Clients recognize it by OpenAI's wording: LiteLLM by the first sentence, LangChain by the
    second.

    Args:
        what: what is too long, such as "the prompt".
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
    """A field that asks for an unsupported feature.

    Not status 501: clients retry a request that fails with a 5xx status.
    """
    return invalid_request(message, param, "not_supported")


def as_api_error(error: BaseException, retry_after: int = 1, param: str | None = None) -> ApiError:
    """The error response for an exception.

    Args:
        param: the request field at fault, if the exception does not name one.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RunsElsewhereError):  # an answer in the background
        return _not_elsewhere(error)
    if isinstance(error, QueueFullError):
        why = "too many requests wait already; try again later"
        return _retry(429, why, "queue_full", retry_after)
    if isinstance(error, ClosedError):
        return shutting_down(retry_after)
    if isinstance(error, DeadlineError):
        message = "the answer was not done in the time that the service allows"
        return ApiError(503, message, code="deadline_exceeded")
    if isinstance(error, USER_ERRORS) and not isinstance(error, EngineError):
        return invalid_request(" ".join(str(error).split()), param)
    if isinstance(error, NotFiniteError):
        return ApiError(500, str(error), code="not_finite")
    return ApiError(500, "the server failed at this request; its log says why", code="internal")


def _not_elsewhere(error: RunsElsewhereError) -> ApiError:
    """What only the server's own process does."""
    reason = f"{error}, which answers nothing in the background"
    return unsupported_field(f"{reason}; serve with --no-model-processes", "model")


def _retry(status: int, message: str, code: str, seconds: int) -> ApiError:
    """A refusal with Retry-After."""
    return ApiError(status, message, code=code, headers={"retry-after": str(seconds)})


def cancel_reason(cancelled: asyncio.CancelledError) -> ApiError | None:
    """Why the server cancelled a request; None if the client did."""
    reason = cancelled.args[0] if cancelled.args else None
    return reason if isinstance(reason, ApiError) else None


def process_lost(reason: str) -> ApiError:
    """The server exits: a process of a distributed job has died."""
    return ApiError(503, reason, code="process_lost")


def process_unresponsive(reason: str, retry_after: int = 1) -> ApiError:
    """A process of a distributed job does not respond; requests are refused until it does."""
    return _retry(503, f"{reason}; try again later", "process_silent", retry_after)


def shutting_down(retry_after: int = 1) -> ApiError:
    """The server is shutting down; another replica, or the next start, may answer."""
    return _retry(503, "the service is closing; try again later", "closing", retry_after)


def model_loading() -> ApiError:
    """The model is still loading."""
    return _retry(503, "Loading model", "loading", 1)


def model_not_loaded(name: str) -> ApiError:
    """The model is offered, but requests do not load it."""
    return invalid_request(
        f"{name} is not loaded; load it with POST /models/load", "model", "model_not_loaded"
    )


def load_failed(name: str, reason: str) -> ApiError:
    """The model could not be loaded; the next request tries again: its files may be repaired."""
    return ApiError(503, f"{name} could not be loaded: {reason}", code="load_failed")


def no_room(name: str, max_models: int, retry_after: int) -> ApiError:
    """Other models are in use, so that this one cannot be loaded."""
    why = (
        f"there is no room for {name}: {max_models} of --max-loaded {max_models} models are in use"
    )
    return _retry(503, f"{why}; try again later", "no_room", retry_after)


def unknown_model(name: str, served: list[str]) -> ApiError:
    """No model of that name is served."""
    names = ", ".join(served) or "none"
    message = f"there is no model {name[:200]!r}; there is: {names}"
    return ApiError(404, message, param="model", code="model_not_found")


def repeated(error: ApiError) -> ApiError:
    """The same error for another request."""
    known: dict[str, Any] = {"param": error.param, "code": error.code, "headers": error.headers}
    return ApiError(error.status, error.message, **known)
