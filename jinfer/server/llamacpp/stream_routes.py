"""Stream routes: read, look up and stop resumable streams (llama.cpp)."""

from __future__ import annotations

from typing import Any

from pydantic import Field, RootModel

from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import invalid_request
from jinfer.server.http.http_responses import HttpResponse, StreamedResponse
from jinfer.server.http.query_params import last_event_id, query_value
from jinfer.server.http.schema_base import RequestModel, ResponseModel


class StreamLookup(RequestModel):
    """A request for the states of streams."""

    conversation_ids: list[str] = Field(
        description="id of the conversation, as in X-Conversation-Id", max_length=1000
    )


class StreamState(ResponseModel):
    """The state of a stream."""

    conversation_id: str
    is_done: bool
    total_bytes: int
    started_at: int
    completed_at: int


class StreamStates(RootModel[list[StreamState]]):
    """The states of known streams."""


async def resume(request: RequestContext[Any]) -> StreamedResponse:
    """Read a stream again, from a byte or after an event."""
    stream = request.service.streams.find(_id(request))
    after, offset = last_event_id(request.http), query_value(request.http, "from")
    if after is None or offset is not None:
        place, skip = stream.place_of(offset or 0)
    else:
        place, skip = after + 1, 0
    return StreamedResponse(stream.read(place, skip, request.service.settings.ping))


async def look_up(request: RequestContext[StreamLookup]) -> HttpResponse:
    """Return the states of the streams of given conversations."""
    streams = request.service.streams.streams
    found = [
        stream for id in dict.fromkeys(request.body.conversation_ids) if (stream := streams.get(id))
    ]
    return HttpResponse(
        [
            {
                "conversation_id": item.id,
                "is_done": item.completed is not None,
                "total_bytes": item.total,
                "started_at": int(item.started),
                "completed_at": int(item.completed or 0),
            }
            for item in found
        ]
    )


async def stop(request: RequestContext[Any]) -> HttpResponse:
    """Stop and remove a stream; a missing stream is not an error."""
    id, streams = _id(request), request.service.streams
    if id not in streams.streams:
        streams.forward(id)
    await streams.stop(id)
    return HttpResponse(b"", 204)


def _id(request: RequestContext[Any]) -> str:
    id = query_value(request.http, "conv_id")
    if not id:
        raise invalid_request("there is no conv_id; give the id of the conversation", "conv_id")
    return str(id)
