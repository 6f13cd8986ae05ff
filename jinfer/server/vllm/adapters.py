"""LoRA adapters over HTTP: routes that list, load and unload them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, RootModel

from jinfer.api.user_errors import USER_ERRORS
from jinfer.engine.requests import RequestError
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import ApiError, as_api_error, invalid_request
from jinfer.server.http.http_responses import HttpResponse
from jinfer.server.http.schema_base import RequestModel, ResponseModel


class LoadAdapter(RequestModel):
    """A request to load an adapter, in vLLM's words."""

    lora_name: str = Field(description="what requests call it, as their model")
    lora_path: str = Field(description="a folder of PEFT, or a GGUF file, where the server is")
    model: str | None = Field(None, description="the model that it is for; by default the first")


class UnloadAdapter(RequestModel):
    """A request to unload an adapter, in vLLM's words."""

    lora_name: str


class AdapterChange(ResponseModel):
    """What was done."""

    status: str


class AdapterState(ResponseModel):
    """An adapter, as llama.cpp's /lora-adapters."""

    id: int
    name: str
    path: str
    scale: float


class AdapterStates(RootModel[list[AdapterState]]):
    """The list of adapters."""


async def list_adapters(call: RequestContext[Any]) -> HttpResponse:
    """The adapters of the first model, numbered as `lora` of a request does (llama.cpp)."""
    async with call.service.models.use(None) as hosted:
        adapters = hosted.session.adapters
        listed = [
            {"id": number, "name": name, "path": adapters.sources.get(name, ""), "scale": 0.0}
            for number, name in enumerate(adapters.loaded)
        ]
    return HttpResponse(listed)


async def load_adapter(call: RequestContext[LoadAdapter]) -> HttpResponse:
    """Loads an adapter (vLLM)."""
    _check_allowed(call)
    name, models = call.body.lora_name, call.service.models
    if any(name in (one.name, one.source.path) for one in models.models):
        raise invalid_request(f"{name[:200]!r} is a model's name", "lora_name")
    async with models.use(call.body.model) as hosted:
        try:
            load = hosted.llm.load_adapter
            await call.service.in_engine_thread(load, name, Path(call.body.lora_path))
        except USER_ERRORS as error:
            raise as_api_error(error, param="lora_path") from error
    return HttpResponse({"status": f"loaded the adapter {name}"})


async def unload_adapter(call: RequestContext[UnloadAdapter]) -> HttpResponse:
    """Unloads an adapter (vLLM)."""
    _check_allowed(call)
    name = call.body.lora_name
    async with call.service.models.use(name) as hosted:
        try:
            await call.service.in_engine_thread(hosted.llm.unload_adapter, name)
        except RequestError as error:
            raise ApiError(404, str(error), param="lora_name", code="adapter_not_found") from error
    return HttpResponse({"status": f"unloaded the adapter {name}"})


def _check_allowed(call: RequestContext[Any]) -> None:
    if not call.service.settings.runtime_adapters:
        reason = "adapters are not loaded over HTTP here; serve with --runtime-adapters"
        raise ApiError(403, reason, code="not_allowed")
