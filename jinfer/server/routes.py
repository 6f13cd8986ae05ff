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
from jinfer.server.schemas import chat as chat_schemas
from jinfer.server.schemas import completions as text_schemas
from jinfer.server.schemas import embeddings as vector_schemas
from jinfer.server.schemas import info as about_schemas
from jinfer.server.schemas import llamacpp_api as llama_schemas
from jinfer.server.schemas import responses as response_schemas
from jinfer.server.schemas import tokenize as token_schemas
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
        gives=about_schemas.Health,
        group=_ABOUT,
        public=True,
    ),
    Endpoint(
        "GET",
        ("/openapi.json",),
        _openapi,
        "This description",
        gives=about_schemas.Description,
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
        gives=about_schemas.Version,
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
        gives=about_schemas.Models,
        group=_OPENAI,
    ),
    Endpoint(
        "GET",
        ("/v1/models/{model:path}", "/models/{model:path}"),
        info.model,
        "One of the models",
        gives=about_schemas.Model,
        group=_OPENAI,
    ),
    Endpoint(
        "POST",
        ("/v1/chat/completions", "/chat/completions"),
        chat,
        "Answers a conversation",
        chat_schemas.ChatRequest,
        chat_schemas.ChatAnswer,
        EVENTS,
        _OPENAI,
    ),
    Endpoint(
        "POST",
        ("/v1/completions", "/completions"),
        completions,
        "Continues texts",
        text_schemas.CompletionRequest,
        text_schemas.CompletionAnswer,
        EVENTS,
        _OPENAI,
    ),
    Endpoint(
        "POST",
        ("/v1/responses", "/responses"),
        respond,
        "Answers a conversation",
        response_schemas.ResponseRequest,
        response_schemas.ResponseAnswer,
        EVENTS,
        _OPENAI,
    ),
    Endpoint(
        "POST",
        ("/v1/embeddings", "/embeddings"),
        embeddings.embeddings,
        "The vectors of texts",
        vector_schemas.EmbeddingRequest,
        vector_schemas.EmbeddingAnswer,
        group=_OPENAI,
    ),
    Endpoint(
        "POST",
        ("/v1/rerank", "/rerank"),
        embeddings.rerank,
        "Documents by how well they fit a query",
        vector_schemas.RerankRequest,
        vector_schemas.RerankAnswer,
        group=_VECTORS,
    ),
    Endpoint(
        "POST",
        ("/score", "/v1/score"),
        embeddings.score,
        "How well pairs of texts fit",
        vector_schemas.ScoreRequest,
        vector_schemas.ScoreAnswer,
        group=_VECTORS,
    ),
    Endpoint(
        "POST",
        ("/classify", "/v1/classify"),
        embeddings.classify,
        "Refused: no family has a head for classes",
        vector_schemas.ClassifyRequest,
        group=_VECTORS,
    ),
    Endpoint(
        "POST",
        ("/fill-mask", "/v1/fill-mask"),
        embeddings.fill_mask,
        "The likeliest tokens at the masks of texts",
        vector_schemas.MaskRequest,
        vector_schemas.MaskAnswer,
        group=_VECTORS,
    ),
    Endpoint(
        "POST",
        ("/tokenize",),
        tokenize.tokenize,
        "The tokens of a text or a conversation",
        token_schemas.TokenizeRequest,
        token_schemas.TokenizeAnswer,
        group=_TOKENS,
    ),
    Endpoint(
        "POST",
        ("/detokenize",),
        tokenize.detokenize,
        "The text of tokens",
        token_schemas.DetokenizeRequest,
        token_schemas.DetokenizeAnswer,
        group=_TOKENS,
    ),
    Endpoint(
        "GET",
        ("/tokenizer_info",),
        tokenize.tokenizer_info,
        "What vLLM says of a tokenizer",
        gives=token_schemas.TokenizerInfo,
        group=_TOKENS,
    ),
    Endpoint(
        "POST",
        ("/apply-template",),
        tokenize.apply_template,
        "The prompt that a conversation becomes",
        token_schemas.TemplateRequest,
        token_schemas.TemplateAnswer,
        group=_TOKENS,
    ),
    Endpoint(
        "POST",
        ("/completion",),
        llamacpp_api.complete,
        "Continues texts",
        llama_schemas.LlamaRequest,
        llama_schemas.LlamaAnswer,
        EVENTS,
        _LLAMA,
    ),
    Endpoint(
        "GET",
        ("/props",),
        llamacpp_api.props,
        "What a server says of a model",
        gives=about_schemas.Props,
        group=_LLAMA,
    ),
    Endpoint(
        "GET",
        ("/slots",),
        llamacpp_api.slots,
        "What each slot of a model does",
        gives=about_schemas.Slots,
        group=_LLAMA,
    ),
    Endpoint(
        "POST",
        ("/",),
        inferflow_api.answer,
        "Answers a text",
        llama_schemas.InferflowRequest,
        llama_schemas.InferflowAnswer,
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
