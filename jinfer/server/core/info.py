"""Server information: health, version, metrics and the list of models."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Literal

from jinfer.server.core.endpoint import Routes
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_responses import HttpResponse
from jinfer.server.http.metrics import CONTENT_TYPE
from jinfer.server.http.query_params import query_value
from jinfer.server.http.schema_base import ResponseModel
from jinfer.server.models.served_model import ServedModel
from jinfer.version import __version__

routes = Routes(tag="about")


class Health(ResponseModel):
    """The server is healthy."""

    status: Literal["ok"]


class Load(ResponseModel):
    """The server's load (vLLM)."""

    server_load: int


class Version(ResponseModel):
    """Versions of jinfer and JAX."""

    version: str
    jax: str


class OpenApiDocument(ResponseModel):
    """The OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]


class ModelCard(ResponseModel):
    """A model; sizes are known after the first load."""

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


@routes.add("GET /health /v1/health /ping", Health, public=True)
async def health(request: RequestContext[Any]) -> HttpResponse:
    """Whether the server answers requests."""
    message = (
        request.service.models.unavailable_reason()
        if request.service.models.ready
        else "Loading model"
    )
    if not message:
        return HttpResponse({"status": "ok"})
    error = {"code": 503, "message": message, "type": "unavailable_error"}
    return HttpResponse({"error": error}, 503)


@routes.add("GET /version", Version)
async def show_version(request: RequestContext[Any]) -> HttpResponse:
    """The versions of jinfer and JAX."""
    return HttpResponse({"version": __version__, "jax": version("jax")})


@routes.add("GET /load", Load, tag="vLLM")
async def load(request: RequestContext[Any]) -> HttpResponse:
    """Count the requests in progress."""
    # The count includes this request, unless its answer began first.
    return HttpResponse({"server_load": max(0, len(request.service.answers) - 1)})


@routes.add("GET /metrics", media_type="text/plain")
async def metrics(request: RequestContext[Any]) -> HttpResponse:
    """Metrics for Prometheus."""
    await request.service.models.refresh()
    return HttpResponse(request.service.metrics.text(), media_type=CONTENT_TYPE)


@routes.add("GET /v1/models /models", ModelList, tag="OpenAI", query=("reload",))
async def models(request: RequestContext[Any]) -> HttpResponse:
    """List the models."""
    if query_value(request.http, "reload") in ("1", "true"):  # as llama.cpp's router
        await request.service.models.reload()
    listed = []
    request.service.models.mark_ended()
    for model in request.service.models.models:
        listed += [model_card(model), *(adapter_card(model, name) for name in model.adapters)]
    return HttpResponse({"object": "list", "data": listed})


@routes.add("GET /v1/models/{model:path} /models/{model:path}", ModelCard, tag="OpenAI")
async def model(request: RequestContext[Any]) -> HttpResponse:
    """Describe a model."""
    name = request.http.path_params["model"]
    model = request.service.models.by_name(name)
    return HttpResponse(adapter_card(model, name) if name in model.adapters else model_card(model))


def adapter_card(model: ServedModel, name: str) -> dict[str, Any]:
    """Describe a LoRA adapter as in `/v1/models`."""
    shared = {key: model_card(model)[key] for key in ("object", "created", "owned_by", "status")}
    root = model.adapter_sources.get(name, "")
    return {"id": name, **shared, "root": root, "parent": model.name}


def model_card(model: ServedModel) -> dict[str, Any]:
    """Describe a model as in `/v1/models`; sizes are known after the first load."""
    status: dict[str, Any] = {"value": model.state}
    if model.state == "unloaded" and model.error:
        status |= {"failed": True, "error": model.error}
    shown: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "jinfer",
        "root": model.source.path,
        "status": status,
    }
    if model.source.aliases:
        shown["aliases"] = list(model.source.aliases)
    if (known := model.details) is None:
        return shown
    return {
        **shown,
        "max_model_len": known.context,
        "capabilities": list(known.capabilities),
        "meta": {
            "n_vocab": known.vocab,
            "n_ctx_train": known.trained_context,
            "n_embd": known.hidden,
            "n_params": known.parameters,
            "size": known.size,
        },
    }
