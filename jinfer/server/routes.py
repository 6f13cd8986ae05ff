"""Routes: the table of all HTTP endpoints."""

from __future__ import annotations

from functools import partial
from typing import Any

from jinfer.server import openapi
from jinfer.server.anthropic import messages
from jinfer.server.anthropic.message_schemas import MessageObject, TokenCount
from jinfer.server.anthropic.messages import ANTHROPIC_ERRORS
from jinfer.server.core import activation_schemas as activations
from jinfer.server.core import info
from jinfer.server.core import info as about
from jinfer.server.core.chat_schemas import ChatResponse
from jinfer.server.core.endpoint import Endpoint
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_responses import NDJSON_MEDIA_TYPE, SSE_MEDIA_TYPE, HttpResponse
from jinfer.server.inferflow import inferflow_api
from jinfer.server.llamacpp import llamacpp_completion as infill
from jinfer.server.llamacpp import llamacpp_completion as llamacpp_api
from jinfer.server.llamacpp import model_routes, stream_routes
from jinfer.server.llamacpp import model_routes as residency
from jinfer.server.llamacpp.llamacpp_completion import InferflowResponse, LlamaResponse
from jinfer.server.llamacpp.slots import SlotChange, slot_action
from jinfer.server.ollama import ollama_api, ollama_models
from jinfer.server.ollama import ollama_api as ollama_embeddings
from jinfer.server.ollama import ollama_schemas as ollama
from jinfer.server.openai import embeddings
from jinfer.server.openai import embeddings as vectors
from jinfer.server.openai import openai_routes as file_routes
from jinfer.server.openai import openai_routes as response_routes
from jinfer.server.openai.chat import chat
from jinfer.server.openai.completions import CompletionResponse, completions
from jinfer.server.page import static_files
from jinfer.server.vllm import (
    adapters,
    batched_chat,
    cohere_embed,
    invocations,
    ranking,
    steering,
    tokenize,
)
from jinfer.server.vllm import adapters as lora
from jinfer.server.vllm import pooling as pooling_routes
from jinfer.server.vllm import pooling as pools
from jinfer.server.vllm import ranking as ranks
from jinfer.server.vllm import tokenize as tokens
from jinfer.server.vllm.cohere_embed import CohereEmbedResponse

PAGE = "page"


async def _openapi(call: RequestContext[Any]) -> HttpResponse:
    return HttpResponse(openapi.openapi_document(ENDPOINTS))


async def _docs(call: RequestContext[Any]) -> HttpResponse:
    return HttpResponse(openapi.docs_page(ENDPOINTS), media_type="text/html; charset=utf-8")


_about = partial(Endpoint, tag="about")
_openai = partial(Endpoint, tag="OpenAI")
_openai_stream = partial(_openai, stream_media_type=SSE_MEDIA_TYPE)
_anthropic = partial(Endpoint, tag="Anthropic", errors=ANTHROPIC_ERRORS)
_vectors = partial(Endpoint, tag="vectors")
_tokens = partial(Endpoint, tag="tokens")
_llama = partial(Endpoint, tag="llama.cpp")
_vllm = partial(Endpoint, tag="vLLM")
_ollama = partial(Endpoint, tag="Ollama", errors=ollama_api.OLLAMA_ERRORS)
_ollama_stream = partial(_ollama, stream_media_type=NDJSON_MEDIA_TYPE)
_page = partial(Endpoint, tag=PAGE, public=True)

ENDPOINTS: tuple[Endpoint, ...] = (
    _about(
        "GET /health /v1/health /ping",
        info.health,
        "Whether requests are answered",
        about.Health,
        public=True,
    ),
    _about("GET /openapi.json", _openapi, "This description", about.OpenApiDocument),
    _about("GET /docs", _docs, "This description, for a person", media_type="text/html"),
    _about("GET /version", info.show_version, "Which jinfer this is", about.Version),
    _about("GET /metrics", info.metrics, "Figures for Prometheus", media_type="text/plain"),
    _vllm("GET /load", info.load, "How many requests are being answered", about.Load),
    # Before the routes whose paths have a model's name, which match theirs.
    _llama(
        "POST /models/load",
        model_routes.load_model,
        "Loads a model, or wakes it",
        residency.Success,
    ),
    _llama(
        "POST /models/unload",
        model_routes.unload_model,
        "Unloads a model once its requests have ended",
        residency.Success,
    ),
    _vllm(
        "POST /sleep",
        model_routes.sleep,
        "Lets models sleep once their requests have ended",
        media_type="text/plain",
        query=("each", "level"),
    ),
    _vllm(
        "POST /wake_up",
        model_routes.wake_up,
        "Wakes models",
        media_type="text/plain",
        query=("each",),
    ),
    _vllm(
        "GET /is_sleeping",
        model_routes.is_sleeping,
        "Whether a model sleeps, or all that are in memory",
        residency.SleepState,
        query=("each",),
    ),
    _openai(
        "GET /v1/models /models",
        info.models,
        "What is served",
        about.ModelList,
        query=("reload",),
    ),
    _openai(
        "GET /v1/models/{model:path} /models/{model:path}",
        info.model,
        "One of the models",
        about.ModelCard,
    ),
    _openai_stream(
        "POST /v1/chat/completions /chat/completions", chat, "Answers a conversation", ChatResponse
    ),
    _vllm(
        "POST /v1/chat/completions/batch",
        batched_chat.chat_batch,
        "Answers several conversations",
        ChatResponse,
    ),
    Endpoint(
        "POST /invocations",
        invocations.invoke,
        "Answers as the route whose fields a request has",
        about.AnyAnswer,
        SSE_MEDIA_TYPE,
        "SageMaker",
    ),
    _vectors(
        "POST /v2/embed",
        cohere_embed.embed,
        "The vectors of texts, as Cohere has them",
        CohereEmbedResponse,
    ),
    _llama(
        "POST /v1/chat/completions/input_tokens /chat/completions/input_tokens",
        tokenize.count_tokens,
        "Counts the tokens of a conversation",
        TokenCount,
    ),
    _openai_stream(
        "POST /v1/completions /completions", completions, "Continues texts", CompletionResponse
    ),
    *response_routes.RESPONSE_ENDPOINTS,
    *file_routes.FILE_ENDPOINTS,
    *stream_routes.STREAM_ENDPOINTS,
    _anthropic(
        "POST /v1/messages",
        messages.create_message,
        "Answers a conversation",
        MessageObject,
        SSE_MEDIA_TYPE,
    ),
    _anthropic(
        "POST /v1/messages/count_tokens",
        messages.count_tokens,
        "Counts the tokens of a conversation",
        TokenCount,
    ),
    _openai(
        "POST /v1/embeddings /embeddings",
        embeddings.embeddings,
        "The vectors of texts",
        vectors.EmbeddingResponse,
    ),
    _vectors(
        "POST /v1/rerank /rerank /v2/rerank",
        ranking.rerank,
        "Documents by how well they fit a query",
        ranks.RerankResponse,
    ),
    _vectors(
        "POST /score /v1/score",
        ranking.score,
        "How well pairs of texts fit",
        ranks.ScoreResponse,
    ),
    _vectors(
        "POST /classify /v1/classify",
        pooling_routes.classify_texts,
        "The classes of texts",
        pools.ClassifyResponse,
    ),
    _vectors(
        "POST /pooling",
        pooling_routes.pooling,
        "Classes of texts, or vectors of texts or of their tokens",
        pools.PoolingResponse,
    ),
    _vectors(
        "POST /fill-mask /v1/fill-mask",
        embeddings.fill_mask,
        "The likeliest tokens at the masks of texts",
        vectors.FillMaskResponse,
    ),
    _tokens(
        "POST /tokenize",
        tokenize.tokenize,
        "The tokens of a text or a conversation",
        tokens.TokenizeResponse,
    ),
    _tokens(
        "POST /detokenize", tokenize.detokenize, "The text of tokens", tokens.DetokenizeResponse
    ),
    _tokens(
        "GET /tokenizer_info",
        tokenize.tokenizer_info,
        "What vLLM says of a tokenizer",
        tokens.TokenizerInfo,
    ),
    _tokens(
        "POST /apply-template",
        tokenize.apply_template,
        "The prompt that a conversation becomes",
        tokens.ApplyTemplateResponse,
    ),
    _llama(
        "POST /completion",
        llamacpp_api.completion_route,
        "Continues texts",
        LlamaResponse,
        SSE_MEDIA_TYPE,
    ),
    _llama(
        "POST /infill",
        infill.infill,
        "Fills in what belongs between two texts",
        LlamaResponse,
        SSE_MEDIA_TYPE,
    ),
    _llama(
        "GET /props",
        llamacpp_api.props,
        "What a server says of a model",
        about.Props,
        query=("model",),
    ),
    _llama(
        "GET /slots",
        llamacpp_api.slots,
        "What each slot of a model does",
        about.SlotStates,
        query=("model",),
    ),
    _llama(
        "POST /slots/{id}",
        slot_action,
        "Saves, restores or erases what is cached of a slot's last prompt",
        SlotChange,
        query=("action", "model"),
    ),
    _llama(
        "GET /lora-adapters",
        adapters.list_adapters,
        "The LoRA adapters of the first model",
        lora.AdapterStates,
    ),
    _openai(
        "POST /v1/load_lora_adapter",
        adapters.load_adapter,
        "Loads a LoRA adapter",
        lora.AdapterChange,
    ),
    _openai(
        "POST /v1/unload_lora_adapter",
        adapters.unload_adapter,
        "Unloads a LoRA adapter",
        lora.AdapterChange,
    ),
    _openai(
        "GET /v1/steering",
        steering.list_steering,
        "The steering vectors that are kept",
        activations.SteeringStates,
    ),
    _openai(
        "POST /v1/steering",
        steering.keep_steering,
        "Keeps steering vectors under a name",
        activations.SteeringState,
    ),
    _openai(
        "DELETE /v1/steering/{name:path}",
        steering.forget_steering,
        "Forgets steering vectors",
        activations.SteeringState,
    ),
    _ollama_stream(
        "POST /api/chat", ollama_api.chat, "Answers a conversation", ollama.OllamaChatResponse
    ),
    _ollama_stream(
        "POST /api/generate",
        ollama_api.generate,
        "Answers a prompt, or continues it",
        ollama.OllamaGenerateResponse,
    ),
    _ollama(
        "POST /api/embed",
        ollama_embeddings.embed,
        "The vectors of texts",
        ollama.OllamaEmbedResponse,
    ),
    _ollama(
        "POST /api/embeddings",
        ollama_embeddings.embeddings,
        "The vector of a text",
        ollama.OllamaEmbeddingsResponse,
    ),
    _ollama("GET /api/tags", ollama_models.tags, "What is served", ollama.OllamaModels),
    _ollama("GET /api/ps", ollama_models.running, "What is in memory", ollama.OllamaModels),
    _ollama("POST /api/show", ollama_models.show, "One of the models", ollama.OllamaShowResponse),
    _ollama(
        "GET /api/version",
        ollama_models.version,
        "The version of Ollama's API",
        ollama.OllamaVersion,
    ),
    _ollama(
        "POST /api/pull /api/push /api/create /api/copy",
        ollama_models.refuse,
        "Refused: models are not changed by requests",
    ),
    _ollama(
        "DELETE /api/delete",
        ollama_models.refuse,
        "Refused: models are not changed by requests",
    ),
    Endpoint(
        "POST /",
        inferflow_api.inferflow,
        "Answers a text",
        InferflowResponse,
        NDJSON_MEDIA_TYPE,
        "Inferflow",
    ),
    _page(
        "GET /",
        static_files.index,
        "A page to chat, and to see what the engine does",
        media_type="text/html",
    ),
    _page("GET /page/{file}", static_files.asset, "The files of that page", media_type="*/*"),
)
