"""Ollama API: models that are served (/api/tags, /api/show, /api/ps), and what is not done here."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from jinfer.api.user_errors import USER_ERRORS
from jinfer.opening.open_model import Opened
from jinfer.sampling.sampling_keywords import over_defaults
from jinfer.sampling.sampling_params import SamplingParams, canonical_names
from jinfer.server.http_errors import RunsElsewhereError, load_failed, unsupported_field
from jinfer.server.http_responses import HttpResponse, dumps
from jinfer.server.model_details import ModelDetails, opened_details
from jinfer.server.model_loading import has_own_processes
from jinfer.server.model_worker import asked_process
from jinfer.server.ollama_api import timestamp
from jinfer.server.request_params import OLLAMA
from jinfer.server.schemas.ollama_api import OllamaShowRequest
from jinfer.server.schemas.parameter_groups import parameter_of
from jinfer.server.served_model import ServedModel
from jinfer.server.server_settings import ModelSource, ServerSettings
from jinfer.server.service import RequestContext
from jinfer.server.tool_parsers.parser_registry import reasoning_format, tool_call_format
from jinfer.version import __version__

# The version of Ollama whose fields are read: clients refuse to talk to an older one.
OLLAMA_VERSION = "0.12.11"
_FOREVER = "9999-12-31T23:59:59Z"
_UNKNOWN = {"format": "", "family": "", "families": [], "parameter_size": ""}


async def version(call: RequestContext[Any]) -> HttpResponse:
    """The version of Ollama whose API this is, and jinfer's."""
    return HttpResponse({"version": OLLAMA_VERSION, "jinfer": __version__})


async def tags(call: RequestContext[Any]) -> HttpResponse:
    """Lists the served models."""
    models = call.service.models.models
    return HttpResponse({"models": [shown for one in models for shown in _with_adapters(one)]})


async def running(call: RequestContext[Any]) -> HttpResponse:
    """Lists the models in memory, but for those that sleep."""
    listed = []
    for one in call.service.models.models:
        if one.state == "loaded":
            shown = _listed(one)
            more = {
                "size_vram": shown["size"],
                "context_length": one.details.context if one.details else 0,
            }
            listed.append({**shown, "expires_at": _expiry(one), **more})
    return HttpResponse({"models": listed})


async def show(call: RequestContext[OllamaShowRequest]) -> HttpResponse:
    """Describes one model; it is not loaded for that."""
    hosted = await call.service.models.look_for(call.body.model or call.body.name)
    if hosted.open and hosted.worker is not None:
        raise RunsElsewhereError(hosted, awake=False)
    if hosted.open and hosted.details is not None:
        said = description(hosted.name, hosted.session.opened, hosted.details)
    else:
        try:
            given = hosted.source, call.service.settings
            said, known = await call.service.in_thread(describe_beside, *given)
        except USER_ERRORS as error:
            raise load_failed(hosted.name, " ".join(str(error).split())) from error
        hosted.details = hosted.details or known
    return HttpResponse({**said, "details": _details(hosted), "modified_at": _modified(hosted)})


def description(name: str, opened: Opened, known: ModelDetails) -> dict[str, Any]:
    """What /api/show says of a model that was opened."""
    conversation = opened.conversation
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": "\n".join(_parameters(opened) if opened.spec.generates else ()),
        "template": conversation.prompt.template or conversation.jinja or "",
        "model_info": _model_info(name, known),
        "capabilities": _capabilities(opened, known),
    }


def describe(source: ModelSource) -> tuple[dict[str, Any], ModelDetails]:
    """Describes a model that is not loaded.

    Raises:
        USER_ERRORS: it cannot be opened.
    """
    opened, known = opened_details(source)
    return description(source.name, opened, known), known


def describe_beside(
    source: ModelSource, settings: ServerSettings
) -> tuple[dict[str, Any], ModelDetails]:
    """As `describe`, where other models' streams go on meanwhile: in a process of its own."""
    if not has_own_processes(settings):
        return describe(source)
    return asked_process(source, settings)


async def refuse(call: RequestContext[Any]) -> HttpResponse:
    """Refuses to change the models that are served."""
    raise unsupported_field(
        "requests do not change the server's models; name others on its command line, or put them "
        "into the folder of --models-dir"
    )


def _expiry(one: ServedModel) -> str:
    """When a model leaves memory if nobody asks it anything meanwhile."""
    if one.keep is None or one.keep == math.inf or one.source.pinned:
        return _FOREVER
    rested = 0.0 if one.users else time.monotonic() - one.last_used
    try:
        return timestamp(datetime.now(UTC) + timedelta(seconds=max(0.0, one.keep - rested)))
    except OverflowError:
        return _FOREVER


def _parameters(opened: Opened) -> Iterator[str]:
    """Lines with the parameters of a request to /api/chat that says nothing."""
    params = SamplingParams(**over_defaults(dict(OLLAMA), canonical_names(opened.defaults)))
    for option in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n"):
        yield f"{option} {getattr(params, parameter_of(option))}"
    yield from (f"stop {dumps(one).decode()}" for one in params.stop)


def _with_adapters(one: ServedModel) -> Iterator[dict[str, Any]]:
    """A model of a list, and its LoRA adapters, whose names requests may use as well."""
    shown = _listed(one)
    yield shown
    for name in one.adapters:
        details = {**shown["details"], "parent_model": one.name}
        digest = _digest(name, one.source.path)
        yield {**shown, "name": name, "model": name, "digest": digest, "details": details}


def _listed(one: ServedModel) -> dict[str, Any]:
    """A model of a list; what is not known yet is empty."""
    return {
        "name": one.name,
        "model": one.name,
        "modified_at": _modified(one),
        "size": one.details.size if one.details else one.file_bytes,
        "digest": _digest(one.name, one.source.path),
        "details": _details(one),
    }


def _digest(*names: str) -> str:
    """A digest of where a model is, not of its bytes: those may be many gigabytes."""
    return hashlib.sha256("\0".join(names).encode()).hexdigest()


def _modified(one: ServedModel) -> str:
    return timestamp(datetime.fromtimestamp(one.created, UTC))


def _details(one: ServedModel) -> dict[str, Any]:
    if (known := one.details) is None:
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
    """A number of parameters as people write it: 1.2B, 135M."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def _model_info(name: str, known: ModelDetails) -> dict[str, Any]:
    """What is known of a model, under GGUF's names."""
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
    """What a model can do, in Ollama's words. Any model that chats can be given tools."""
    chats = "chat" in known.capabilities
    result = ["completion"] if "completion" in known.capabilities else []
    result += ["tools"] if chats else []
    conversation, tokenizer = opened.conversation, opened.tokenizer
    template, prompt = conversation.jinja or "", conversation.prompt
    thinks = tool_call_format(template, prompt.tool_calls).has_reasoning or (
        tokenizer is not None and reasoning_format(template, tokenizer, prompt.reasoning)
    )
    result += ["thinking"] if chats and thinks else []
    return [*result, "embedding"]
