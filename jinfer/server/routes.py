"""Routes: the endpoints of all dialects in one, and the routes that describe the server."""

from __future__ import annotations

from typing import Any

from jinfer.server import openapi
from jinfer.server.anthropic import messages
from jinfer.server.core import info
from jinfer.server.core.endpoint import Endpoint, Routes
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_responses import HttpResponse
from jinfer.server.inferflow import inferflow_api
from jinfer.server.llamacpp import llamacpp_completion, server_state
from jinfer.server.ollama import ollama_api, ollama_models
from jinfer.server.openai import batches, chat, completions, embeddings, files, responses
from jinfer.server.page import static_files
from jinfer.server.vllm import (
    cohere_embed,
    invocations,
    model_state,
    pooling_routes,
    ranking,
    steering,
    tokenize,
)

routes = Routes(tag="about")


@routes.add("GET /openapi.json", info.OpenApiDocument)
async def openapi_json(request: RequestContext[Any]) -> HttpResponse:
    """This description."""
    return HttpResponse(openapi.openapi_document(ENDPOINTS))


@routes.add("GET /docs", media_type="text/html")
async def docs(request: RequestContext[Any]) -> HttpResponse:
    """This description as a page."""
    return HttpResponse(openapi.docs_page(ENDPOINTS), media_type="text/html; charset=utf-8")


_LISTS = (
    routes,
    # Before `info`, whose paths with a model's name would match /models/load.
    *(llamacpp_completion.routes, server_state.routes),
    info.routes,
    *(chat.routes, completions.routes, embeddings.routes, responses.routes),
    *(files.routes, batches.routes, messages.routes),
    *(model_state.routes, invocations.routes, tokenize.routes, steering.routes),
    *(cohere_embed.routes, ranking.routes, pooling_routes.routes),
    *(ollama_api.routes, ollama_models.routes, inferflow_api.routes, static_files.routes),
)
ENDPOINTS: tuple[Endpoint, ...] = tuple(item for routes in _LISTS for item in routes.endpoints)
