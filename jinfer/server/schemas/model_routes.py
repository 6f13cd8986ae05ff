"""Schemas of the routes that load, unload, and let models sleep."""

from __future__ import annotations

from pydantic import Field

from jinfer.server.schemas.schema_base import RequestModel, ResponseModel


class ModelChoice(RequestModel):
    """A request to load or unload a model (llama.cpp)."""

    model: str = Field(description="one of the models")


class Success(ResponseModel):
    """It was done."""

    success: bool


class SleepState(ResponseModel):
    """Whether a model sleeps (vLLM)."""

    is_sleeping: bool
