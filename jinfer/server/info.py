"""Server information: health, version, metrics and the list of models."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from jinfer.server.http_responses import HttpResponse
from jinfer.server.metrics import CONTENT_TYPE
from jinfer.server.model_manager import ServedModel
from jinfer.server.service import RequestContext
from jinfer.version import __version__


async def health(call: RequestContext[Any]) -> HttpResponse:
    """Health check: whether the models are loaded and all processes of a job respond."""
    message = (
        call.service.models.unavailable_reason() if call.service.models.ready else "Loading model"
    )
    if not message:
        return HttpResponse({"status": "ok"})
    error = {"code": 503, "message": message, "type": "unavailable_error"}
    return HttpResponse({"error": error}, 503)


async def show_version(call: RequestContext[Any]) -> HttpResponse:
    """The versions of jinfer and JAX."""
    return HttpResponse({"version": __version__, "jax": version("jax")})


async def metrics(call: RequestContext[Any]) -> HttpResponse:
    """Metrics in Prometheus's text format."""
    return HttpResponse(call.service.metrics.text(), media_type=CONTENT_TYPE)


async def models(call: RequestContext[Any]) -> HttpResponse:
    """Lists the served models."""
    listed = []
    for one in call.service.models.models:
        listed += [model_card(one), *(adapter_card(one, name) for name in one.adapters)]
    return HttpResponse({"object": "list", "data": listed})


async def model(call: RequestContext[Any]) -> HttpResponse:
    """Describes one model."""
    name = call.request.path_params["model"]
    one = call.service.models.by_name(name)
    return HttpResponse(adapter_card(one, name) if name in one.adapters else model_card(one))


def adapter_card(one: ServedModel, name: str) -> dict[str, Any]:
    """A LoRA adapter of a model as in `/v1/models`."""
    shared = {key: model_card(one)[key] for key in ("object", "created", "owned_by", "status")}
    root = one.session.adapters.sources.get(name, "")
    return {"id": name, **shared, "root": root, "parent": one.name}


def model_card(one: ServedModel) -> dict[str, Any]:
    """A model as in `/v1/models`; sizes are known only while it is loaded."""
    shown: dict[str, Any] = {
        "id": one.name,
        "object": "model",
        "created": one.created,
        "owned_by": "jinfer",
        "root": one.source.path,
        "status": {"value": one.state},
    }
    if one.state != "ready":
        return shown
    llm = one.llm
    dims = llm.spec.dims
    weights = llm.session.engine.weights
    return {
        **shown,
        "max_model_len": llm.context,
        "capabilities": capabilities(one),
        "meta": {
            "n_vocab": dims.get("vocab", 0),
            "n_ctx_train": dims.get("context", llm.context),
            "n_embd": dims.get("hidden", 0),
            "n_params": one.parameters,
            "size": sum(one.size * one.dtype.itemsize for one in weights),
        },
    }


def capabilities(one: ServedModel) -> list[str]:
    """What a model can do: embeddings, completion, chat, fill-mask, classify, rerank."""
    spec = one.llm.spec
    result = ["embeddings"]
    if spec.generates:
        result.append("completion")
        if one.llm.can_chat:
            result.append("chat")
    tokenizer = one.llm.tokenizer
    if spec.decoder is None and tokenizer is not None and tokenizer.mask_id is not None:
        result.append("fill-mask")
    opened = one.session.opened
    result += ["classify"] if opened.classification is not None else []
    ranks = opened.classification is not None and opened.classification.relevance is not None
    return [*result, "rerank"] if ranks or opened.pooling.late else result
