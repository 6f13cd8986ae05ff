"""Model routes: load and unload models, and list LoRA adapters (llama.cpp)."""

from __future__ import annotations

from typing import Any

from pydantic import Field, RootModel

from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_responses import HttpResponse
from jinfer.server.http.schema_base import RequestModel, ResponseModel


class ModelChoice(RequestModel):
    """A request to load or unload a model (llama.cpp)."""

    model: str = Field(description="name of a model")


class Success(ResponseModel):
    """The model was loaded or unloaded."""

    success: bool


_DONE = {"success": True}


async def load_model(request: RequestContext[ModelChoice]) -> HttpResponse:
    """Load or wake a model, and answer when it is loaded."""
    model = await request.service.models.load(request.body.model)
    request.note(model=model.name)
    return HttpResponse(_DONE)


async def unload_model(request: RequestContext[ModelChoice]) -> HttpResponse:
    """Unload a model once its requests have ended, and answer when it is unloaded."""
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
    """List the adapters of the first model, with the numbers of `lora` in requests."""
    async with request.service.models.use(None) as model:
        adapters = model.session.adapters
        listed = [
            {"id": number, "name": name, "path": adapters.sources.get(name, ""), "scale": 0.0}
            for number, name in enumerate(adapters.loaded)
        ]
    return HttpResponse(listed)
