"""Routes: the table of all HTTP endpoints."""

from __future__ import annotations

from typing import Any

from jinfer.server import embeddings, inferflow_api, info, llamacpp_api, openapi, tokenize
from jinfer.server.chat import chat
from jinfer.server.completions import completions
from jinfer.server.endpoint import Endpoint
from jinfer.server.http_responses import SSE_MEDIA_TYPE, HttpResponse
from jinfer.server.page import static_files
from jinfer.server.responses import create_response
from jinfer.server.schemas.chat import ChatRequest, ChatResponse
from jinfer.server.schemas.completions import CompletionRequest, CompletionResponse
from jinfer.server.schemas.embeddings import (
    ClassifyRequest,
    EmbeddingRequest,
    EmbeddingResponse,
    FillMaskRequest,
    FillMaskResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from jinfer.server.schemas.info import (
    Health,
    ModelCard,
    ModelList,
    OpenApiDocument,
    Props,
    SlotStates,
    Version,
)
from jinfer.server.schemas.llamacpp_api import (
    InferflowRequest,
    InferflowResponse,
    LlamaRequest,
    LlamaResponse,
)
from jinfer.server.schemas.responses import ResponseObject, ResponseRequest
from jinfer.server.schemas.tokenize import (
    ApplyTemplateRequest,
    ApplyTemplateResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from jinfer.server.service import RequestContext

_ABOUT, _OPENAI, _LLAMA = "about", "OpenAI", "llama.cpp"
_VECTORS, _TOKENS = "vectors", "tokens"
PAGE = "page"


async def _openapi(call: RequestContext[Any]) -> HttpResponse:
    return HttpResponse(openapi.openapi_document(ENDPOINTS))


async def _docs(call: RequestContext[Any]) -> HttpResponse:
    return HttpResponse(openapi.docs_page(ENDPOINTS), media_type="text/html; charset=utf-8")


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "GET",
        ("/health", "/v1/health", "/ping"),
        info.health,
        "Whether requests are answered",
        response_model=Health,
        tag=_ABOUT,
        public=True,
    ),
    Endpoint(
        "GET",
        ("/openapi.json",),
        _openapi,
        "This description",
        response_model=OpenApiDocument,
        tag=_ABOUT,
    ),
    Endpoint(
        "GET",
        ("/docs",),
        _docs,
        "This description, for a person",
        tag=_ABOUT,
        media_type="text/html",
    ),
    Endpoint(
        "GET",
        ("/version",),
        info.show_version,
        "Which jinfer this is",
        response_model=Version,
        tag=_ABOUT,
    ),
    Endpoint(
        "GET",
        ("/metrics",),
        info.metrics,
        "Figures for Prometheus",
        tag=_ABOUT,
        media_type="text/plain",
    ),
    Endpoint(
        "GET",
        ("/v1/models", "/models"),
        info.models,
        "What is served",
        response_model=ModelList,
        tag=_OPENAI,
    ),
    Endpoint(
        "GET",
        ("/v1/models/{model:path}", "/models/{model:path}"),
        info.model,
        "One of the models",
        response_model=ModelCard,
        tag=_OPENAI,
    ),
    Endpoint(
        "POST",
        ("/v1/chat/completions", "/chat/completions"),
        chat,
        "Answers a conversation",
        ChatRequest,
        ChatResponse,
        SSE_MEDIA_TYPE,
        _OPENAI,
    ),
    Endpoint(
        "POST",
        ("/v1/completions", "/completions"),
        completions,
        "Continues texts",
        CompletionRequest,
        CompletionResponse,
        SSE_MEDIA_TYPE,
        _OPENAI,
    ),
    Endpoint(
        "POST",
        ("/v1/responses", "/responses"),
        create_response,
        "Answers a conversation",
        ResponseRequest,
        ResponseObject,
        SSE_MEDIA_TYPE,
        _OPENAI,
    ),
    Endpoint(
        "POST",
        ("/v1/embeddings", "/embeddings"),
        embeddings.embeddings,
        "The vectors of texts",
        EmbeddingRequest,
        EmbeddingResponse,
        tag=_OPENAI,
    ),
    Endpoint(
        "POST",
        ("/v1/rerank", "/rerank"),
        embeddings.rerank,
        "Documents by how well they fit a query",
        RerankRequest,
        RerankResponse,
        tag=_VECTORS,
    ),
    Endpoint(
        "POST",
        ("/score", "/v1/score"),
        embeddings.score,
        "How well pairs of texts fit",
        ScoreRequest,
        ScoreResponse,
        tag=_VECTORS,
    ),
    Endpoint(
        "POST",
        ("/classify", "/v1/classify"),
        embeddings.classify,
        "Refused: no family has a head for classes",
        ClassifyRequest,
        tag=_VECTORS,
    ),
    Endpoint(
        "POST",
        ("/fill-mask", "/v1/fill-mask"),
        embeddings.fill_mask,
        "The likeliest tokens at the masks of texts",
        FillMaskRequest,
        FillMaskResponse,
        tag=_VECTORS,
    ),
    Endpoint(
        "POST",
        ("/tokenize",),
        tokenize.tokenize,
        "The tokens of a text or a conversation",
        TokenizeRequest,
        TokenizeResponse,
        tag=_TOKENS,
    ),
    Endpoint(
        "POST",
        ("/detokenize",),
        tokenize.detokenize,
        "The text of tokens",
        DetokenizeRequest,
        DetokenizeResponse,
        tag=_TOKENS,
    ),
    Endpoint(
        "GET",
        ("/tokenizer_info",),
        tokenize.tokenizer_info,
        "What vLLM says of a tokenizer",
        response_model=TokenizerInfo,
        tag=_TOKENS,
    ),
    Endpoint(
        "POST",
        ("/apply-template",),
        tokenize.apply_template,
        "The prompt that a conversation becomes",
        ApplyTemplateRequest,
        ApplyTemplateResponse,
        tag=_TOKENS,
    ),
    Endpoint(
        "POST",
        ("/completion",),
        llamacpp_api.completion_route,
        "Continues texts",
        LlamaRequest,
        LlamaResponse,
        SSE_MEDIA_TYPE,
        _LLAMA,
    ),
    Endpoint(
        "GET",
        ("/props",),
        llamacpp_api.props,
        "What a server says of a model",
        response_model=Props,
        tag=_LLAMA,
    ),
    Endpoint(
        "GET",
        ("/slots",),
        llamacpp_api.slots,
        "What each slot of a model does",
        response_model=SlotStates,
        tag=_LLAMA,
    ),
    Endpoint(
        "POST",
        ("/",),
        inferflow_api.inferflow,
        "Answers a text",
        InferflowRequest,
        InferflowResponse,
        inferflow_api.LINES,
        "Inferflow",
    ),
    Endpoint(
        "GET",
        ("/",),
        static_files.index,
        "A page to chat, and to see what the engine does",
        tag=PAGE,
        public=True,
        media_type="text/html",
    ),
    Endpoint(
        "GET",
        ("/page/{file}",),
        static_files.asset,
        "The files of that page",
        tag=PAGE,
        public=True,
        media_type="*/*",
    ),
)
