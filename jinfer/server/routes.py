"""The table of routes."""

from __future__ import annotations

from jinfer.server import about, inferflow, llamacpp, openapi, tokens, vectors
from jinfer.server.chat import chat
from jinfer.server.completions import completions
from jinfer.server.endpoint import Endpoint
from jinfer.server.page import files
from jinfer.server.replies import EVENTS
from jinfer.server.responses import respond
from jinfer.server.schemas import about as about_schemas
from jinfer.server.schemas import chat as chat_schemas
from jinfer.server.schemas import completions as text_schemas
from jinfer.server.schemas import llamacpp as llama_schemas
from jinfer.server.schemas import responses as response_schemas
from jinfer.server.schemas import tokens as token_schemas
from jinfer.server.schemas import vectors as vector_schemas

_ABOUT, _OPENAI, _LLAMA = "about", "OpenAI", "llama.cpp"
_VECTORS, _TOKENS = "vectors", "tokens"
PAGE = "page"

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "GET",
        ("/health", "/v1/health", "/ping"),
        about.health,
        "Whether requests are answered",
        gives=about_schemas.Health,
        group=_ABOUT,
        public=True,
    ),
    Endpoint(
        "GET",
        ("/openapi.json",),
        openapi.describe,
        "This description",
        gives=about_schemas.Description,
        group=_ABOUT,
    ),
    Endpoint(
        "GET",
        ("/docs",),
        openapi.page,
        "This description, for a person",
        group=_ABOUT,
        media_type="text/html",
    ),
    Endpoint(
        "GET",
        ("/version",),
        about.show_version,
        "Which jinfer this is",
        gives=about_schemas.Version,
        group=_ABOUT,
    ),
    Endpoint(
        "GET",
        ("/metrics",),
        about.metrics,
        "Figures for Prometheus",
        group=_ABOUT,
        media_type="text/plain",
    ),
    Endpoint(
        "GET",
        ("/v1/models", "/models"),
        about.models,
        "What is served",
        gives=about_schemas.Models,
        group=_OPENAI,
    ),
    Endpoint(
        "GET",
        ("/v1/models/{model:path}", "/models/{model:path}"),
        about.model,
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
        vectors.embeddings,
        "The vectors of texts",
        vector_schemas.EmbeddingRequest,
        vector_schemas.EmbeddingAnswer,
        group=_OPENAI,
    ),
    Endpoint(
        "POST",
        ("/v1/rerank", "/rerank"),
        vectors.rerank,
        "Documents by how well they fit a query",
        vector_schemas.RerankRequest,
        vector_schemas.RerankAnswer,
        group=_VECTORS,
    ),
    Endpoint(
        "POST",
        ("/score", "/v1/score"),
        vectors.score,
        "How well pairs of texts fit",
        vector_schemas.ScoreRequest,
        vector_schemas.ScoreAnswer,
        group=_VECTORS,
    ),
    Endpoint(
        "POST",
        ("/classify", "/v1/classify"),
        vectors.classify,
        "Refused: no family has a head for classes",
        vector_schemas.ClassifyRequest,
        group=_VECTORS,
    ),
    Endpoint(
        "POST",
        ("/fill-mask", "/v1/fill-mask"),
        vectors.fill_mask,
        "The likeliest tokens at the masks of texts",
        vector_schemas.MaskRequest,
        vector_schemas.MaskAnswer,
        group=_VECTORS,
    ),
    Endpoint(
        "POST",
        ("/tokenize",),
        tokens.tokenize,
        "The tokens of a text or a conversation",
        token_schemas.TokenizeRequest,
        token_schemas.TokenizeAnswer,
        group=_TOKENS,
    ),
    Endpoint(
        "POST",
        ("/detokenize",),
        tokens.detokenize,
        "The text of tokens",
        token_schemas.DetokenizeRequest,
        token_schemas.DetokenizeAnswer,
        group=_TOKENS,
    ),
    Endpoint(
        "GET",
        ("/tokenizer_info",),
        tokens.tokenizer_info,
        "What vLLM says of a tokenizer",
        gives=token_schemas.TokenizerInfo,
        group=_TOKENS,
    ),
    Endpoint(
        "POST",
        ("/apply-template",),
        tokens.apply_template,
        "The prompt that a conversation becomes",
        token_schemas.TemplateRequest,
        token_schemas.TemplateAnswer,
        group=_TOKENS,
    ),
    Endpoint(
        "POST",
        ("/completion",),
        llamacpp.complete,
        "Continues texts",
        llama_schemas.LlamaRequest,
        llama_schemas.LlamaAnswer,
        EVENTS,
        _LLAMA,
    ),
    Endpoint(
        "GET",
        ("/props",),
        llamacpp.props,
        "What a server says of a model",
        gives=about_schemas.Props,
        group=_LLAMA,
    ),
    Endpoint(
        "GET",
        ("/slots",),
        llamacpp.slots,
        "What each slot of a model does",
        gives=about_schemas.Slots,
        group=_LLAMA,
    ),
    Endpoint(
        "POST",
        ("/",),
        inferflow.answer,
        "Answers a text",
        llama_schemas.InferflowRequest,
        llama_schemas.InferflowAnswer,
        inferflow.LINES,
        "Inferflow",
    ),
    Endpoint(
        "GET",
        ("/",),
        files.index,
        "A page to chat, and to see what the engine does",
        group=PAGE,
        public=True,
        media_type="text/html",
    ),
    Endpoint(
        "GET",
        ("/page/{file}",),
        files.asset,
        "The files of that page",
        group=PAGE,
        public=True,
        media_type="*/*",
    ),
)
