"""Routes of the Responses API."""

from __future__ import annotations

from functools import partial

from jinfer.server import stored_responses
from jinfer.server.endpoint import Endpoint
from jinfer.server.http_responses import SSE_MEDIA_TYPE
from jinfer.server.query_params import PAGE
from jinfer.server.responses import create_response
from jinfer.server.schemas import responses as schemas

_openai = partial(Endpoint, tag="OpenAI")
_ONE = "/v1/responses/{response_id}"

# `input_tokens` stands before the ids, of which it would be one.
RESPONSE_ENDPOINTS: tuple[Endpoint, ...] = (
    _openai(
        "POST /v1/responses /responses",
        create_response,
        "Answers a conversation",
        schemas.ResponseObject,
        SSE_MEDIA_TYPE,
    ),
    _openai(
        "POST /v1/responses/input_tokens",
        stored_responses.input_tokens,
        "Counts the tokens that a response would answer",
        schemas.InputTokens,
    ),
    _openai(
        f"GET {_ONE}",
        stored_responses.retrieve,
        "A stored response",
        schemas.ResponseObject,
        SSE_MEDIA_TYPE,
        query=("stream", "starting_after"),
    ),
    _openai(
        f"DELETE {_ONE}",
        stored_responses.delete,
        "Removes a stored response",
        schemas.DeletedResponse,
    ),
    _openai(
        f"POST {_ONE}/cancel",
        stored_responses.cancel,
        "Ends a response in the background",
        schemas.ResponseObject,
    ),
    _openai(
        f"GET {_ONE}/input_items",
        stored_responses.input_items,
        "What a stored response answers",
        schemas.InputItems,
        query=PAGE,
    ),
)
