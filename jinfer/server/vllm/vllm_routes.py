"""vLLM routes: the table of the endpoints of vLLM's dialect, with Cohere's and SageMaker's."""

from __future__ import annotations

from functools import partial

from jinfer.server.core import info
from jinfer.server.core.chat_schemas import ChatResponse
from jinfer.server.core.endpoint import Endpoint
from jinfer.server.http.http_responses import SSE_MEDIA_TYPE
from jinfer.server.vllm import (
    batched_chat,
    cohere_embed,
    invocations,
    model_state,
    pooling_routes,
    ranking,
    steering,
    tokenize,
)

_vllm = partial(Endpoint, tag="vLLM")
_vectors = partial(Endpoint, tag="vectors")
_tokens = partial(Endpoint, tag="tokens")
_openai = partial(Endpoint, tag="OpenAI")

VLLM_ENDPOINTS: tuple[Endpoint, ...] = (
    _vllm("GET /load", info.load, "Count the requests in progress", info.Load),
    _vllm(
        "POST /sleep",
        model_state.sleep,
        "Let models sleep once their requests have ended",
        media_type="text/plain",
        query=("each", "level"),
    ),
    _vllm(
        "POST /wake_up",
        model_state.wake_up,
        "Wake models",
        media_type="text/plain",
        query=("each",),
    ),
    _vllm(
        "GET /is_sleeping",
        model_state.is_sleeping,
        "Whether a model sleeps, or all models in memory",
        model_state.SleepState,
        query=("each",),
    ),
    _vllm(
        "POST /v1/chat/completions/batch",
        batched_chat.chat_batch,
        "Answer several conversations",
        ChatResponse,
    ),
    Endpoint(
        "POST /invocations",
        invocations.invoke,
        "Answer as the route whose fields the request has",
        invocations.AnyAnswer,
        SSE_MEDIA_TYPE,
        "SageMaker",
    ),
    _vectors(
        "POST /v2/embed",
        cohere_embed.embed,
        "Compute the vectors of texts (Cohere)",
        cohere_embed.CohereEmbedResponse,
    ),
    _vectors(
        "POST /v1/rerank /rerank /v2/rerank",
        ranking.rerank,
        "Rank documents by a query",
        ranking.RerankResponse,
    ),
    _vectors("POST /score /v1/score", ranking.score, "Score pairs of texts", ranking.ScoreResponse),
    _vectors(
        "POST /classify /v1/classify",
        pooling_routes.classify_texts,
        "Classify texts",
        pooling_routes.ClassifyResponse,
    ),
    _vectors(
        "POST /pooling",
        pooling_routes.pooling,
        "Compute classes, vectors of texts, or vectors of tokens",
        pooling_routes.PoolingResponse,
    ),
    _tokens(
        "POST /tokenize",
        tokenize.tokenize,
        "Tokenize a text or a conversation",
        tokenize.TokenizeResponse,
    ),
    _tokens("POST /detokenize", tokenize.detokenize, "Decode tokens", tokenize.DetokenizeResponse),
    _tokens(
        "GET /tokenizer_info",
        tokenize.tokenizer_info,
        "Describe a tokenizer",
        tokenize.TokenizerInfo,
    ),
    _tokens(
        "POST /apply-template",
        tokenize.apply_template,
        "Render the prompt of a conversation",
        tokenize.ApplyTemplateResponse,
    ),
    _openai(
        "POST /v1/load_lora_adapter",
        model_state.load_adapter,
        "Load a LoRA adapter",
        model_state.AdapterChange,
    ),
    _openai(
        "POST /v1/unload_lora_adapter",
        model_state.unload_adapter,
        "Unload a LoRA adapter",
        model_state.AdapterChange,
    ),
    _openai(
        "GET /v1/steering",
        steering.list_steering,
        "List the steering vectors of a model",
        steering.SteeringStates,
    ),
    _openai(
        "POST /v1/steering",
        steering.keep_steering,
        "Store steering vectors under a name",
        steering.SteeringState,
    ),
    _openai(
        "DELETE /v1/steering/{name:path}",
        steering.forget_steering,
        "Delete steering vectors",
        steering.SteeringState,
    ),
)
