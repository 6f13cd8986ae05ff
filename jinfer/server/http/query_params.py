"""Query parameters: the table of all, with functions that read and check them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from jinfer.server.http.http_errors import invalid_request

MAX_LISTED = 10_000
QUERY_PARAMETERS: Mapping[str, dict[str, Any]] = {
    "model": {
        "schema": {"type": "string"},
        "description": "name of a model; default: the first",
    },
    "action": {
        "schema": {"type": "string", "enum": ["save", "restore", "erase"]},
        "description": "action on the cache of a slot",
    },
    "model_or_all": {
        "name": "model",
        "schema": {"type": "string"},
        "description": "name of a model; default: all",
    },
    "level": {
        "schema": {"type": "string", "enum": ["1", "2"]},
        "description": "1: free the KV cache; 2: also the weights",
    },
    "reload": {
        "schema": {"type": "string", "enum": ["true", "1", "false", "0"]},
        "description": "true or 1: look for new and removed models",
    },
    "after": {"schema": {"type": "string"}, "description": "id before the first item of the page"},
    "limit": {
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED},
        "description": "maximum number of items",
    },
    "order": {
        "schema": {"type": "string", "enum": ["asc", "desc"]},
        "description": "by time of creation",
    },
    "purpose": {"schema": {"type": "string"}, "description": "only files of this purpose"},
    "stream": {
        "schema": {"type": "boolean"},
        "description": "true: stream the events of the answer",
    },
    "starting_after": {
        "schema": {"type": "integer", "minimum": 0},
        "description": "number of the event before the first streamed event",
    },
    "conv_id": {
        "schema": {"type": "string"},
        "required": True,
        "description": "id of the conversation, as in X-Conversation-Id",
    },
    "from": {
        "schema": {"type": "integer", "minimum": 0},
        "description": "first byte of the stream; alternatively the header Last-Event-ID",
    },
}
PAGE = ("after", "limit", "order")


def query_value(request: Request, name: str, default: Any = None) -> Any:
    """Return a converted query parameter. Raises `ApiError` for values that its schema forbids."""
    text = request.query_params.get(name)
    if text is None:
        return default
    schema = QUERY_PARAMETERS[name]["schema"]
    match schema["type"]:
        case "boolean":
            if text not in ("true", "false"):
                raise invalid_request("it must be true or false", name, "invalid_type")
            return text == "true"
        case "integer":
            minimum, maximum = schema["minimum"], schema.get("maximum", 2**53)
            plain = text.isascii() and text.isdecimal() and len(text) < 17
            if not plain or not minimum <= int(text) <= maximum:
                raise invalid_request(
                    f"it must be a whole number from {minimum} to {maximum}", name, "invalid_type"
                )
            return int(text)
    if text not in schema.get("enum", (text,)):
        raise invalid_request(
            f"it must be one of {', '.join(schema['enum'])}", name, "invalid_type"
        )
    return text


def last_event_id(request: Request) -> int | None:
    """Return the number of the last event that a client has seen (Last-Event-ID).

    Raises:
        ApiError: not a number.
    """
    text = request.headers.get("last-event-id")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise invalid_request("it must be the number of an event", "Last-Event-ID", "invalid_type")
    return int(text)


def listed_page(
    request: Request, items: Sequence[dict[str, Any]], limit: int = 20
) -> dict[str, Any]:
    """Return a page of a list, by `after`, `limit` and `order` (default: newest first).

    Args:
        items: objects with an `id`, oldest first.
        limit: default number of items.

    Raises:
        ApiError: an invalid parameter, or an `after` that is not in the list.
    """
    after, order = query_value(request, "after"), query_value(request, "order", "desc")
    limit = query_value(request, "limit", limit)
    items = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise invalid_request(f"no item in the list has the id {after[:80]!r}", "after")
        items = items[place + 1 :]
    shown = items[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }
