"""Ollama API: models that are served (/api/tags, /api/show, /api/ps), and what is not done here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from jinfer.api.session import Session
from jinfer.sampling.param_keywords import over_defaults
from jinfer.sampling.sampling_params import SamplingParams, canonical_names
from jinfer.server.http_errors import unsupported_field
from jinfer.server.http_responses import HttpResponse, dumps
from jinfer.server.info import capabilities, model_card
from jinfer.server.model_manager import ServedModel
from jinfer.server.ollama_api import timestamp
from jinfer.server.request_params import OLLAMA
from jinfer.server.schemas.ollama_api import OllamaShowRequest
from jinfer.server.schemas.parameter_groups import parameter_of
from jinfer.server.service import RequestContext
from jinfer.server.tool_parsers.parser_registry import reasoning_format, tool_call_format
from jinfer.version import __version__

# The version of Ollama whose fields are read: clients refuse to talk to an older one.
OLLAMA_VERSION = "0.12.11"
_FOREVER = "9999-12-31T23:59:59Z"  # served models leave memory for others only
_UNKNOWN = {"format": "", "family": "", "families": [], "parameter_size": ""}


async def version(call: RequestContext[Any]) -> HttpResponse:
    """The version of Ollama whose API this is, and jinfer's."""
    return HttpResponse({"version": OLLAMA_VERSION, "jinfer": __version__})


async def tags(call: RequestContext[Any]) -> HttpResponse:
    """Lists the served models."""
    models = call.service.models.models
    return HttpResponse({"models": [shown for one in models for shown in _with_adapters(one)]})


async def running(call: RequestContext[Any]) -> HttpResponse:
    """Lists the models in memory."""
    ready = [one for one in call.service.models.models if one.state == "ready"]
    listed = []
    for one in ready:
        shown = _listed(one)
        more = {"size_vram": shown["size"], "context_length": one.llm.context}
        listed.append({**shown, "expires_at": _FOREVER, **more})
    return HttpResponse({"models": listed})


async def show(call: RequestContext[OllamaShowRequest]) -> HttpResponse:
    """Describes one model."""
    body = call.body
    async with call.service.models.use(body.model or body.name) as hosted:
        session, opened = hosted.session, hosted.session.opened
        conversation = opened.conversation
        template = conversation.prompt.template or conversation.jinja or ""
        return HttpResponse(
            {
                "modelfile": f"FROM {hosted.name}\n",
                "parameters": "\n".join(_parameters(session) if opened.spec.generates else ()),
                "template": template,
                "details": _details(hosted),
                "model_info": _model_info(hosted),
                "capabilities": _capabilities(hosted),
                "modified_at": _modified(hosted),
            }
        )


async def refuse(call: RequestContext[Any]) -> HttpResponse:
    """Refuses to change the models that are served."""
    raise unsupported_field(
        "the models are those that the server was started with; name another on its command line"
    )


def _parameters(session: Session) -> Iterator[str]:
    """Lines with the parameters of a request to /api/chat that says nothing."""
    params = SamplingParams(**over_defaults(dict(OLLAMA), canonical_names(session.opened.defaults)))
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
    """A model of a list; sizes are known only while it is loaded."""
    return {
        "name": one.name,
        "model": one.name,
        "modified_at": _modified(one),
        "size": model_card(one).get("meta", {}).get("size", 0),
        "digest": _digest(one.name, one.source.path),
        "details": _details(one),
    }


def _digest(*names: str) -> str:
    """A digest of where a model is, not of its bytes: those may be many gigabytes."""
    return hashlib.sha256("\0".join(names).encode()).hexdigest()


def _modified(one: ServedModel) -> str:
    return timestamp(datetime.fromtimestamp(one.created, UTC))


def _details(one: ServedModel) -> dict[str, Any]:
    if one.state != "ready":
        return {"parent_model": "", **_UNKNOWN, "quantization_level": ""}
    family = one.session.family
    return {
        "parent_model": "",
        "format": one.session.opened.checkpoint.format,
        "family": family,
        "families": [family],
        "parameter_size": _rounded(one.parameters),
        "quantization_level": one.session.stored_as.upper(),
    }


def _rounded(count: int) -> str:
    """A number of parameters as people write it: 1.2B, 135M."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def _model_info(one: ServedModel) -> dict[str, Any]:
    """What is known of a model, under GGUF's names."""
    meta, family = model_card(one)["meta"], one.session.family or "jinfer"
    return {
        "general.architecture": family,
        "general.basename": one.name,
        "general.parameter_count": meta["n_params"],
        f"{family}.context_length": one.llm.context,
        f"{family}.embedding_length": meta["n_embd"],
        f"{family}.vocab_size": meta["n_vocab"],
    }


def _capabilities(one: ServedModel) -> list[str]:
    """What a model can do, in Ollama's words. Any model that chats can be given tools."""
    known = capabilities(one)
    result = ["completion"] if "completion" in known else []
    result += ["tools"] if "chat" in known else []
    conversation, tokenizer = one.session.opened.conversation, one.session.opened.tokenizer
    template, prompt = conversation.jinja or "", conversation.prompt
    thinks = tool_call_format(template, prompt.tool_calls).has_reasoning or (
        tokenizer is not None and reasoning_format(template, tokenizer, prompt.reasoning)
    )
    result += ["thinking"] if "chat" in known and thinks else []
    return [*result, "embedding"]
