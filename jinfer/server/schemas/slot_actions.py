"""Schemas of llama.cpp's actions on slots."""

from __future__ import annotations

from pydantic import Field

from jinfer.server.schemas.schema_base import RequestModel, ResponseModel


class SlotAction(RequestModel):
    """The body of an action; an erasure needs none."""

    filename: str | None = Field(None, description="in the folder of --slot-save-path")


class SlotChange(ResponseModel):
    """What was done: tokens that were saved, restored or erased, and bytes of the file."""

    id_slot: int
    filename: str | None = None
    n_saved: int | None = None
    n_written: int | None = None
    n_restored: int | None = None
    n_read: int | None = None
    n_erased: int | None = None
    timings: dict[str, float] | None = None
