"""Routes: the table of all HTTP endpoints."""

from __future__ import annotations

from typing import Any

from jinfer.server import embeddings, inferflow_api, info, llamacpp_api, openapi, tokenize
from jinfer.server.chat import chat
from jinfer.server.completions import completions
from jinfer.server.endpoint import Endpoint
from jinfer.server.http_responses import EVENTS, Reply
from jinfer.server.page import static_files
from jinfer.server.responses import respond
from jinfer.server.schemas.chat import ChatAnswer, ChatRequest
from jinfer.server.schemas.completions import CompletionAnswer, CompletionRequest
from jinfer.server.schemas.embeddings import (
    ClassifyRequest,
    EmbeddingAnswer,
    EmbeddingRequest,
    MaskAnswer,
    MaskRequest,
    RerankAnswer,
    RerankRequest,
    ScoreAnswer,
    ScoreRequest,
)
from jinfer.server.schemas.info import Description, Health, Model, Models, Props, Slots, Version
from jinfer.server.schemas.llamacpp_api import (
    InferflowAnswer,
    InferflowRequest,
    LlamaAnswer,
    LlamaRequest,
)
from jinfer.server.schemas.responses import ResponseAnswer, ResponseRequest
from jinfer.server.schemas.tokenize import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TemplateAnswer,
    TemplateRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
)
from jinfer.server.service import Call

_ABOUT, _OPENAI, _LLAMA = "about", "OpenAI", "llama.cpp"
_VECTORS, _TOKENS = "vectors", "tokens"
PAGE = "page"


async def _openapi(call: Call[Any]) -> Reply:
    return Reply(openapi.description(ENDPOINTS))


async def _docs(call: Call[Any]) -> Reply:
    return Reply(openapi.page(ENDPOINTS), media_type="text/html; charset=utf-8")


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "GET",
        ("/health", "/v1/health", "/ping"),
        info.health,
        "Whether requests are answered",
        gives=Health,
        group=_ABOUT,
        public=True,
    ),
    Endpoint(
        "GET",
        ("/openapi.json",),
        _openapi,
        "This description",
        gives=Description,
        group=_ABOUT,
    ),
    Endpoint(
        "GET",
        ("/docs",),
        _docs,
        "This description, for a person",
        group=_ABOUT,
        media_type="text/html",
    ),
    Endpoint(
        "GET",
        ("/version",),
        info.show_version,
        "Which jinfer this is",
        gives=Version,
        group=_ABOUT,
    ),
    Endpoint(
        "GET",
        ("/metrics",),
        info.metrics,
        "Figures for Prometheus",
        group=_ABOUT,
        media_type="text/plain",
    ),
    Endpoint(
        "GET",
        ("/v1/models", "/models"),
        info.models,
        "What is served",
        gives=Models,
        group=_OPENAI,
    ),
    Endpoint(
        "GET",
        ("/v1/models/{model:path}", "/models/{model:path}"),
        info.model,
        "One of the models",
        gives=Model,
        group=_OPENAI,
    ),
    Endpoint(
        "POST",
        ("/v1/chat/completions", "/chat/completions"),
        chat,
        "Answers a conversation",
        ChatRequest,
        ChatAnswer,
        EVENTS,
        _OPENAI,
    ),
    Endpoint(
        "POST",
        ("/v1/completions", "/completions"),
        completions,
        "Continues texts",
        CompletionRequest,
        CompletionAnswer,
        EVENTS,
        _OPENAI,
    ),
    Endpoint(
        "POST",
        ("/v1/responses", "/responses"),
        respond,
        "Answers a conversation",
        ResponseRequest,
        ResponseAnswer,
        EVENTS,
        _OPENAI,
    ),
    Endpoint(
        "POST",
        ("/v1/embeddings", "/embeddings"),
        embeddings.embeddings,
        "The vectors of texts",
        EmbeddingRequest,
        EmbeddingAnswer,
        group=_OPENAI,
    ),
    Endpoint(
        "POST",
        ("/v1/rerank", "/rerank"),
        embeddings.rerank,
        "Documents by how well they fit a query",
        RerankRequest,
        RerankAnswer,
        group=_VECTORS,
    ),
    Endpoint(
        "POST",
        ("/score", "/v1/score"),
        embeddings.score,
        "How well pairs of texts fit",
        ScoreRequest,
        ScoreAnswer,
        group=_VECTORS,
    ),
    Endpoint(
        "POST",
        ("/classify", "/v1/classify"),
        embeddings.classify,
        "Refused: no family has a head for classes",
        ClassifyRequest,
        group=_VECTORS,
    ),
    Endpoint(
        "POST",
        ("/fill-mask", "/v1/fill-mask"),
        embeddings.fill_mask,
        "The likeliest tokens at the masks of texts",
        MaskRequest,
        MaskAnswer,
        group=_VECTORS,
    ),
    Endpoint(
        "POST",
        ("/tokenize",),
        tokenize.tokenize,
        "The tokens of a text or a conversation",
        TokenizeRequest,
        TokenizeAnswer,
        group=_TOKENS,
    ),
    Endpoint(
        "POST",
        ("/detokenize",),
        tokenize.detokenize,
        "The text of tokens",
        DetokenizeRequest,
        DetokenizeAnswer,
        group=_TOKENS,
    ),
    Endpoint(
        "GET",
        ("/tokenizer_info",),
        tokenize.tokenizer_info,
        "What vLLM says of a tokenizer",
        gives=TokenizerInfo,
        group=_TOKENS,
    ),
    Endpoint(
        "POST",
        ("/apply-template",),
        tokenize.apply_template,
        "The prompt that a conversation becomes",
        TemplateRequest,
        TemplateAnswer,
        group=_TOKENS,
    ),
    Endpoint(
        "POST",
        ("/completion",),
        llamacpp_api.complete,
        "Continues texts",
        LlamaRequest,
        LlamaAnswer,
        EVENTS,
        _LLAMA,
    ),
    Endpoint(
        "GET",
        ("/props",),
        llamacpp_api.props,
        "What a server says of a model",
        gives=Props,
        group=_LLAMA,
    ),
    Endpoint(
        "GET",
        ("/slots",),
        llamacpp_api.slots,
        "What each slot of a model does",
        gives=Slots,
        group=_LLAMA,
    ),
    Endpoint(
        "POST",
        ("/",),
        inferflow_api.answer,
        "Answers a text",
        InferflowRequest,
        InferflowAnswer,
        inferflow_api.LINES,
        "Inferflow",
    ),
    Endpoint(
        "GET",
        ("/",),
        static_files.index,
        "A page to chat, and to see what the engine does",
        group=PAGE,
        public=True,
        media_type="text/html",
    ),
    Endpoint(
        "GET",
        ("/page/{file}",),
        static_files.asset,
        "The files of that page",
        group=PAGE,
        public=True,
        media_type="*/*",
    ),
)
