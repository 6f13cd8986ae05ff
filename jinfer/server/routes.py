"""Routes: the tables of all dialects in one, and the routes that describe the server."""

from __future__ import annotations

from functools import partial
from typing import Any

from jinfer.server import openapi
from jinfer.server.anthropic.messages import ANTHROPIC_ENDPOINTS
from jinfer.server.core import info
from jinfer.server.core.endpoint import Endpoint
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_responses import HttpResponse
from jinfer.server.inferflow.inferflow_api import INFERFLOW_ENDPOINTS
from jinfer.server.llamacpp.llamacpp_routes import LLAMACPP_ENDPOINTS
from jinfer.server.ollama.ollama_routes import OLLAMA_ENDPOINTS
from jinfer.server.openai.openai_routes import OPENAI_ENDPOINTS
from jinfer.server.page.static_files import PAGE_ENDPOINTS
from jinfer.server.vllm.vllm_routes import VLLM_ENDPOINTS


async def _openapi(request: RequestContext[Any]) -> HttpResponse:
    return HttpResponse(openapi.openapi_document(ENDPOINTS))


async def _docs(request: RequestContext[Any]) -> HttpResponse:
    return HttpResponse(openapi.docs_page(ENDPOINTS), media_type="text/html; charset=utf-8")


_about = partial(Endpoint, tag="about")

ENDPOINTS: tuple[Endpoint, ...] = (
    _about(
        "GET /health /v1/health /ping",
        info.health,
        "Whether the server answers requests",
        info.Health,
        public=True,
    ),
    _about("GET /openapi.json", _openapi, "This description", info.OpenApiDocument),
    _about("GET /docs", _docs, "This description as a page", media_type="text/html"),
    _about("GET /version", info.show_version, "The versions of jinfer and JAX", info.Version),
    _about("GET /metrics", info.metrics, "Metrics for Prometheus", media_type="text/plain"),
    # Before OpenAI's, whose paths with a model's name would match /models/load.
    *LLAMACPP_ENDPOINTS,
    *OPENAI_ENDPOINTS,
    *ANTHROPIC_ENDPOINTS,
    *VLLM_ENDPOINTS,
    *OLLAMA_ENDPOINTS,
    *INFERFLOW_ENDPOINTS,
    *PAGE_ENDPOINTS,
)
