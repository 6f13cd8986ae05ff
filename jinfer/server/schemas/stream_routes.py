"""Schemas of resumable streams, as llama.cpp's."""

from __future__ import annotations

from pydantic import Field, RootModel

from jinfer.server.schemas.schema_base import RequestModel, ResponseModel


class StreamLookup(RequestModel):
    """A request for what is known of some streams."""

    conversation_ids: list[str] = Field(description="what X-Conversation-Id named", max_length=1000)


class StreamState(ResponseModel):
    """A stream."""

    conversation_id: str
    is_done: bool
    total_bytes: int
    started_at: int
    completed_at: int


class StreamStates(RootModel[list[StreamState]]):
    """The streams that are known."""
