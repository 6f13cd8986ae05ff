"""Model routes: load and unload models, and list LoRA adapters (llama.cpp)."""

from __future__ import annotations

from typing import Any

from pydantic import Field, RootModel

from jinfer.server.core.endpoint import Routes
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_responses import HttpResponse
from jinfer.server.http.schema_base import RequestModel, ResponseModel

routes = Routes(tag="llama.cpp")


class ModelChoice(RequestModel):
    """A request to load or unload a model (llama.cpp)."""

    model: str = Field(description="name of a model")


class Success(ResponseModel):
    """The model was loaded or unloaded."""

    success: bool


_DONE = {"success": True}


@routes.add("POST /models/load", Success)
async def load_model(request: RequestContext[ModelChoice]) -> HttpResponse:
    """Load a model, or wake it."""
    model = await request.service.models.load(request.body.model)
    request.note(model=model.name)
    return HttpResponse(_DONE)


@routes.add("POST /models/unload", Success)
async def unload_model(request: RequestContext[ModelChoice]) -> HttpResponse:
    """Unload a model once its requests have ended."""
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


@routes.add("GET /lora-adapters", AdapterStates)
async def list_adapters(request: RequestContext[Any]) -> HttpResponse:
    """List the LoRA adapters of the first model."""
    async with request.service.models.use(None) as model:
        adapters = model.session.adapters
        listed = [
            {"id": number, "name": name, "path": adapters.sources.get(name, ""), "scale": 0.0}
            for number, name in enumerate(adapters.loaded)
        ]
    return HttpResponse(listed)
