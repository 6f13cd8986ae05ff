"""Routes that load and unload models (llama.cpp's router) and let them sleep (vLLM)."""

from __future__ import annotations

from typing import Any

from pydantic import Field, RootModel

from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_responses import HttpResponse
from jinfer.server.http.schema_base import RequestModel, ResponseModel


class ModelChoice(RequestModel):
    """A request to load or unload a model (llama.cpp)."""

    model: str = Field(description="one of the models")


class Success(ResponseModel):
    """It was done."""

    success: bool


_DONE = {"success": True}


async def load_model(request: RequestContext[ModelChoice]) -> HttpResponse:
    """Load a model, or wakes it, and answers when it is there."""
    model = await request.service.models.load(request.body.model)
    request.note(model=model.name)
    return HttpResponse(_DONE)


async def unload_model(request: RequestContext[ModelChoice]) -> HttpResponse:
    """Unload a model, and answers when the requests that use it have ended and it has left."""
    models = request.service.models
    model = models.by_name(request.body.model)
    request.note(model=model.name)
    await models.unload(model)
    return HttpResponse(_DONE)


class AdapterState(ResponseModel):
    """An adapter, as llama.cpp's /lora-adapters."""

    id: int
    name: str
    path: str
    scale: float


class AdapterStates(RootModel[list[AdapterState]]):
    """The list of adapters."""


async def list_adapters(request: RequestContext[Any]) -> HttpResponse:
    """The adapters of the first model, numbered as `lora` of a request does (llama.cpp)."""
    async with request.service.models.use(None) as model:
        adapters = model.session.adapters
        listed = [
            {"id": number, "name": name, "path": adapters.sources.get(name, ""), "scale": 0.0}
            for number, name in enumerate(adapters.loaded)
        ]
    return HttpResponse(listed)
