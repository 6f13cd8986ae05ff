"""Model state: routes that load and unload LoRA adapters and let models sleep (vLLM)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from jinfer.api.user_errors import USER_ERRORS
from jinfer.engine.requests import RequestError
from jinfer.server.core.endpoint import Routes
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import (
    ApiError,
    as_api_error,
    invalid_request,
    unsupported_field,
)
from jinfer.server.http.http_responses import HttpResponse
from jinfer.server.http.schema_base import RequestModel, ResponseModel
from jinfer.server.models.served_model import ServedModel

routes = Routes(tag="vLLM")


class LoadAdapter(RequestModel):
    """A request to load an adapter (vLLM)."""

    lora_name: str = Field(description="name of the adapter, used as the model of requests")
    lora_path: str = Field(description="a PEFT folder or a GGUF file on the server")
    model: str | None = Field(None, description="name of the base model; default: the first")


class UnloadAdapter(RequestModel):
    """A request to unload an adapter (vLLM)."""

    lora_name: str


class AdapterChange(ResponseModel):
    """The result."""

    status: str


@routes.add("POST /v1/load_lora_adapter", AdapterChange, tag="OpenAI")
async def load_adapter(request: RequestContext[LoadAdapter]) -> HttpResponse:
    """Load a LoRA adapter."""
    _check_allowed(request)
    name, models = request.body.lora_name, request.service.models
    if any(name in (model.name, model.source.path) for model in models.models):
        raise invalid_request(f"{name[:200]!r} is a model's name", "lora_name")
    async with models.use(request.body.model) as model:
        try:
            load = model.llm.load_adapter
            await request.service.in_engine_thread(load, name, Path(request.body.lora_path))
        except USER_ERRORS as error:
            raise as_api_error(error, param="lora_path") from error
    return HttpResponse({"status": f"loaded the adapter {name}"})


@routes.add("POST /v1/unload_lora_adapter", AdapterChange, tag="OpenAI")
async def unload_adapter(request: RequestContext[UnloadAdapter]) -> HttpResponse:
    """Unload a LoRA adapter."""
    _check_allowed(request)
    name = request.body.lora_name
    async with request.service.models.use(name) as model:
        try:
            await request.service.in_engine_thread(model.llm.unload_adapter, name)
        except RequestError as error:
            raise ApiError(404, str(error), param="lora_name", code="adapter_not_found") from error
    return HttpResponse({"status": f"unloaded the adapter {name}"})


def _check_allowed(request: RequestContext[Any]) -> None:
    if not request.service.settings.runtime_adapters:
        reason = "the server does not load adapters over HTTP; serve with --runtime-adapters"
        raise ApiError(403, reason, code="not_allowed")


class SleepState(ResponseModel):
    """Whether a model sleeps (vLLM)."""

    is_sleeping: bool


_TEXT = "text/plain; charset=utf-8"


@routes.add("POST /sleep", media_type="text/plain", query=("model_or_all", "level"))
async def sleep(request: RequestContext[Any]) -> HttpResponse:
    """Let models sleep once their requests have ended."""
    level = request.http.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise invalid_request(f"{level[:80]!r} is not a level of sleep; allowed: 1, 2", "level")
    mode = request.http.query_params.get("mode", "wait")
    if mode != "wait":
        raise unsupported_field(
            "running requests are always completed: only mode=wait is supported", "mode"
        )
    for model in _models_of(request, "loaded"):
        await request.service.models.sleep(model, int(level))
    return HttpResponse(b"", media_type=_TEXT)


@routes.add("POST /wake_up", media_type="text/plain", query=("model_or_all",))
async def wake_up(request: RequestContext[Any]) -> HttpResponse:
    """Wake models."""
    if "tags" in request.http.query_params:
        raise unsupported_field("models can only be woken completely", "tags")
    for model in _models_of(request, "sleeping"):
        await request.service.models.load(model.name)
    return HttpResponse(b"", media_type=_TEXT)


@routes.add("GET /is_sleeping", SleepState, query=("model_or_all",))
async def is_sleeping(request: RequestContext[Any]) -> HttpResponse:
    """Whether a model sleeps, or all models in memory."""
    models = [model for model in _models_of(request, "loaded", "sleeping") if model.open]
    asleep = bool(models) and all(item.state == "sleeping" for item in models)
    return HttpResponse({"is_sleeping": asleep})


def _models_of(request: RequestContext[Any], *states: str) -> list[ServedModel]:
    """Return the model of a request, or all models in given states."""
    models, name = request.service.models, request.http.query_params.get("model")
    if name is not None:
        return [models.by_name(name)]
    return [model for model in models.models if model.state in states]
