"""What a service says of itself."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import RootModel

from jinfer.server.schemas.schema_base import Answer


class Health(Answer):
    """It answers requests."""

    status: Literal["ok"]


class Version(Answer):
    """Which versions it is made of."""

    version: str
    jax: str


class Description(Answer):
    """OpenAPI's description of a service."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]


class Model(Answer):
    """One of the models; sizes are known while it is in memory."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None = None
    max_model_len: int | None = None
    meta: dict[str, int] | None = None


class Models(Answer):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


class Props(Answer):
    """What llama.cpp's clients want to know."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    modalities: dict[str, bool]
    build_info: str


class Slot(Answer):
    """One place for a sequence that runs."""

    id: int
    n_ctx: int
    is_processing: bool


class Slots(RootModel[list[Slot]]):
    """All of them."""
