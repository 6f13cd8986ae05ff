"""Ollama models: /api/tags, /api/show, /api/ps, and refused routes."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from jinfer.api.user_errors import USER_ERRORS
from jinfer.loader.open_model import Opened
from jinfer.sampling.sampling_keywords import over_defaults
from jinfer.sampling.sampling_params import SamplingParams, canonical_names
from jinfer.server.core.endpoint import Routes
from jinfer.server.core.request_params import OLLAMA
from jinfer.server.core.sampling_fields import parameter_of
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import RunsElsewhereError, load_failed, unsupported_field
from jinfer.server.http.http_responses import HttpResponse, dumps
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from jinfer.server.models.model_details import ModelDetails, opened_details
from jinfer.server.models.model_residency import has_own_processes
from jinfer.server.models.model_worker import describe_in_process
from jinfer.server.models.served_model import ServedModel
from jinfer.server.ollama.ollama_api import OLLAMA_ERRORS, timestamp
from jinfer.server.ollama.ollama_schemas import (
    OllamaModels,
    OllamaShowRequest,
    OllamaShowResponse,
    OllamaVersion,
)
from jinfer.server.tool_parsers.parser_registry import reasoning_format, tool_call_format
from jinfer.version import __version__

routes = Routes(tag="Ollama", errors=OLLAMA_ERRORS)

# The supported version of Ollama's API: clients refuse older versions.
OLLAMA_VERSION = "0.12.11"
_FOREVER = "9999-12-31T23:59:59Z"
_UNKNOWN = {"format": "", "family": "", "families": [], "parameter_size": ""}


@routes.add("GET /api/version", OllamaVersion)
async def version(request: RequestContext[Any]) -> HttpResponse:
    """The version of Ollama's API."""
    return HttpResponse({"version": OLLAMA_VERSION, "jinfer": __version__})


@routes.add("GET /api/tags", OllamaModels)
async def tags(request: RequestContext[Any]) -> HttpResponse:
    """List the models."""
    models = request.service.models.models
    return HttpResponse({"models": [shown for model in models for shown in _with_adapters(model)]})


@routes.add("GET /api/ps", OllamaModels)
async def running(request: RequestContext[Any]) -> HttpResponse:
    """List the models in memory."""
    listed = []
    for model in request.service.models.models:
        if model.state == "loaded":
            shown = _listed(model)
            more = {
                "size_vram": shown["size"],
                "context_length": model.details.context if model.details else 0,
            }
            listed.append({**shown, "expires_at": _expiry(model), **more})
    return HttpResponse({"models": listed})


@routes.add("POST /api/show", OllamaShowResponse)
async def show(request: RequestContext[OllamaShowRequest]) -> HttpResponse:
    """Describe a model."""
    model = await request.service.models.look_for(request.body.model or request.body.name)
    if model.open and model.worker is not None:
        raise RunsElsewhereError(model, awake=False)
    if model.open and model.details is not None:
        described = description(model.name, model.session.opened, model.details)
    else:
        try:
            source_and_settings = model.source, request.service.settings
            described, known = await request.service.in_thread(
                describe_beside, *source_and_settings
            )
        except USER_ERRORS as error:
            raise load_failed(model.name, " ".join(str(error).split())) from error
        model.details = model.details or known
    return HttpResponse({**described, "details": _details(model), "modified_at": _modified(model)})


def description(name: str, opened: Opened, known: ModelDetails) -> dict[str, Any]:
    """Describe an opened model for /api/show."""
    conversation = opened.conversation
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": "\n".join(_parameters(opened) if opened.spec.generates else ()),
        "template": conversation.prompt.template or conversation.jinja or "",
        "model_info": _model_info(name, known),
        "capabilities": _capabilities(opened, known),
    }


def describe(source: ModelSource) -> tuple[dict[str, Any], ModelDetails]:
    """Describe a model that is not loaded.

    Raises:
        USER_ERRORS: the model cannot be opened.
    """
    opened, known = opened_details(source)
    return description(source.name, opened, known), known


def describe_beside(
    source: ModelSource, settings: ServerSettings
) -> tuple[dict[str, Any], ModelDetails]:
    """Describe a model in its own process, so that the streams of other models continue."""
    if not has_own_processes(settings):
        return describe(source)
    return describe_in_process(source, settings)


@routes.add("DELETE /api/delete")
@routes.add("POST /api/pull /api/push /api/create /api/copy")
async def refuse(request: RequestContext[Any]) -> HttpResponse:
    """Refused: requests do not change the models."""
    raise unsupported_field(
        "requests do not change the server's models; use its command line, or the folder of "
        "--models-dir"
    )


def _expiry(model: ServedModel) -> str:
    """Return the time at which an idle model is unloaded."""
    if model.keep is None or model.keep == math.inf or model.source.pinned:
        return _FOREVER
    rested = 0.0 if model.users else time.monotonic() - model.last_used
    try:
        return timestamp(datetime.now(UTC) + timedelta(seconds=max(0.0, model.keep - rested)))
    except OverflowError:
        return _FOREVER


def _parameters(opened: Opened) -> Iterator[str]:
    """Yield the default parameters of /api/chat, a line each."""
    params = SamplingParams(**over_defaults(dict(OLLAMA), canonical_names(opened.defaults)))
    for option in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n"):
        yield f"{option} {getattr(params, parameter_of(option))}"
    yield from (f"stop {dumps(text).decode()}" for text in params.stop)


def _with_adapters(model: ServedModel) -> Iterator[dict[str, Any]]:
    """Yield a model and its LoRA adapters, for lists."""
    shown = _listed(model)
    yield shown
    for name in model.adapters:
        details = {**shown["details"], "parent_model": model.name}
        digest = _digest(name, model.source.path)
        yield {**shown, "name": name, "model": name, "digest": digest, "details": details}


def _listed(model: ServedModel) -> dict[str, Any]:
    """Describe a model for lists; unknown values are empty."""
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _modified(model),
        "size": model.details.size if model.details else model.file_bytes,
        "digest": _digest(model.name, model.source.path),
        "details": _details(model),
    }


def _digest(*names: str) -> str:
    """Hash the location of a model rather than its bytes, which may be many gigabytes."""
    return hashlib.sha256("\0".join(names).encode()).hexdigest()


def _modified(model: ServedModel) -> str:
    return timestamp(datetime.fromtimestamp(model.created, UTC))


def _details(model: ServedModel) -> dict[str, Any]:
    if (known := model.details) is None:
        return {"parent_model": "", **_UNKNOWN, "quantization_level": ""}
    return {
        "parent_model": "",
        "format": known.format,
        "family": known.family,
        "families": [known.family],
        "parameter_size": _rounded(known.parameters),
        "quantization_level": known.stored_as.upper(),
    }


def _rounded(count: int) -> str:
    """Format a number of parameters: 1.2B, 135M."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def _model_info(name: str, known: ModelDetails) -> dict[str, Any]:
    """Return the known sizes of a model, under GGUF's names."""
    family = known.family or "jinfer"
    return {
        "general.architecture": family,
        "general.basename": name,
        "general.parameter_count": known.parameters,
        f"{family}.context_length": known.context,
        f"{family}.embedding_length": known.hidden,
        f"{family}.vocab_size": known.vocab,
    }


def _capabilities(opened: Opened, known: ModelDetails) -> list[str]:
    """Return a model's capabilities under Ollama's names. Any chat model supports tools."""
    chats = "chat" in known.capabilities
    result = ["completion"] if "completion" in known.capabilities else []
    result += ["tools"] if chats else []
    conversation, tokenizer = opened.conversation, opened.tokenizer
    template, prompt = conversation.jinja or "", conversation.prompt
    thinks = tool_call_format(template, prompt.tool_calls).has_reasoning or (
        tokenizer is not None and reasoning_format(template, tokenizer, prompt.reasoning)
    )
    result += ["thinking"] if chats and thinks else []
    result += ["vision"] if "multimodal" in known.capabilities else []
    return [*result, "embedding"]
