"""Stream routes: read, look up and stop resumable streams (llama.cpp)."""

from __future__ import annotations

from typing import Any

from pydantic import Field, RootModel

from jinfer.server.core.endpoint import Routes
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import invalid_request
from jinfer.server.http.http_responses import SSE_MEDIA_TYPE, HttpResponse, StreamedResponse
from jinfer.server.http.query_params import last_event_id, query_value
from jinfer.server.http.schema_base import RequestModel, ResponseModel

routes = Routes(tag="llama.cpp")


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


@routes.add(
    "GET /v1/stream",
    stream=SSE_MEDIA_TYPE,
    media_type=SSE_MEDIA_TYPE.partition(";")[0],
    query=("conv_id", "from"),
)
async def resume(request: RequestContext[Any]) -> StreamedResponse:
    """Read a stream again that began with X-Conversation-Id."""
    stream = request.service.streams.find(_id(request))
    after, offset = last_event_id(request.http), query_value(request.http, "from")
    if after is None or offset is not None:
        place, skip = stream.place_of(offset or 0)
    else:
        place, skip = after + 1, 0
    return StreamedResponse(stream.read(place, skip, request.service.settings.ping))


@routes.add("POST /v1/streams/lookup", StreamStates)
async def look_up(request: RequestContext[StreamLookup]) -> HttpResponse:
    """Look up such streams."""
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


@routes.add("DELETE /v1/stream", query=("conv_id",), success=204)
async def stop(request: RequestContext[Any]) -> HttpResponse:
    """Stop such a stream."""
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
