"""Routes that load and unload models (llama.cpp's router) and let them sleep (vLLM)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import invalid_request, unsupported_field
from jinfer.server.http.http_responses import HttpResponse
from jinfer.server.http.schema_base import RequestModel, ResponseModel
from jinfer.server.models.served_model import ServedModel


class ModelChoice(RequestModel):
    """A request to load or unload a model (llama.cpp)."""

    model: str = Field(description="one of the models")


class Success(ResponseModel):
    """It was done."""

    success: bool


class SleepState(ResponseModel):
    """Whether a model sleeps (vLLM)."""

    is_sleeping: bool


_DONE = {"success": True}
_TEXT = "text/plain; charset=utf-8"


async def load_model(call: RequestContext[ModelChoice]) -> HttpResponse:
    """Loads a model, or wakes it, and answers when it is there."""
    one = await call.service.models.load(call.body.model)
    call.note(model=one.name)
    return HttpResponse(_DONE)


async def unload_model(call: RequestContext[ModelChoice]) -> HttpResponse:
    """Unloads a model, and answers when the requests that use it have ended and it has left."""
    models = call.service.models
    one = models.by_name(call.body.model)
    call.note(model=one.name)
    await models.unload(one)
    return HttpResponse(_DONE)


async def sleep(call: RequestContext[Any]) -> HttpResponse:
    """Lets a model sleep, or all that are awake, when the requests that use it have ended."""
    level = call.request.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise invalid_request(f"{level[:80]!r} is not a level of sleep; allowed: 1, 2", "level")
    mode = call.request.query_params.get("mode", "wait")
    if mode != "wait":
        raise unsupported_field("requests that run come to their end: only mode=wait", "mode")
    for one in _chosen(call, "loaded"):
        await call.service.models.sleep(one, int(level))
    return HttpResponse(b"", media_type=_TEXT)


async def wake_up(call: RequestContext[Any]) -> HttpResponse:
    """Wakes a model, or all that sleep."""
    if "tags" in call.request.query_params:
        raise unsupported_field("a model wakes as a whole", "tags")
    for one in _chosen(call, "sleeping"):
        await call.service.models.load(one.name)
    return HttpResponse(b"", media_type=_TEXT)


async def is_sleeping(call: RequestContext[Any]) -> HttpResponse:
    """Whether a model sleeps; without its name, whether all do that are in memory."""
    chosen = [one for one in _chosen(call, "loaded", "sleeping") if one.open]
    asleep = bool(chosen) and all(one.state == "sleeping" for one in chosen)
    return HttpResponse({"is_sleeping": asleep})


def _chosen(call: RequestContext[Any], *states: str) -> list[ServedModel]:
    """The model that a request names, or all in one of some states."""
    models, name = call.service.models, call.request.query_params.get("model")
    if name is not None:
        return [models.by_name(name)]
    return [one for one in models.models if one.state in states]
