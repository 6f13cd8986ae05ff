"""Schemas of health, version, models, props and slots."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import RootModel

from jinfer.server.schemas.schema_base import ResponseModel


class Health(ResponseModel):
    """The server is healthy."""

    status: Literal["ok"]


class Load(ResponseModel):
    """How much a server does (vLLM)."""

    server_load: int


class Version(ResponseModel):
    """The versions of jinfer and JAX."""

    version: str
    jax: str


class AnyAnswer(RootModel[dict[str, Any] | list[Any]]):
    """The answer of another route."""


class OpenApiDocument(ResponseModel):
    """The OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]


class ModelCard(ResponseModel):
    """A model; sizes are known once it was loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None = None
    parent: str | None = None
    status: dict[str, Any]
    aliases: list[str] | None = None
    max_model_len: int | None = None
    meta: dict[str, int] | None = None


class ModelList(ResponseModel):
    """The list of models."""

    object: Literal["list"]
    data: list[ModelCard]


class Props(ResponseModel):
    """Properties of a model, as llama.cpp's /props."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    modalities: dict[str, bool]
    is_sleeping: bool
    build_info: str


class SlotState(ResponseModel):
    """A slot for a running sequence."""

    id: int
    n_ctx: int
    is_processing: bool


class SlotStates(RootModel[list[SlotState]]):
    """The list of slots."""
