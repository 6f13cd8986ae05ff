"""Ollama routes: the table of the endpoints of Ollama's dialect."""

from __future__ import annotations

from functools import partial

from jinfer.server.core.endpoint import Endpoint
from jinfer.server.http.http_responses import NDJSON_MEDIA_TYPE
from jinfer.server.ollama import ollama_api, ollama_models
from jinfer.server.ollama import ollama_schemas as schemas

_ollama = partial(Endpoint, tag="Ollama", errors=ollama_api.OLLAMA_ERRORS)
_stream = partial(_ollama, stream_media_type=NDJSON_MEDIA_TYPE)

OLLAMA_ENDPOINTS: tuple[Endpoint, ...] = (
    _stream("POST /api/chat", ollama_api.chat, "Answer a conversation", schemas.OllamaChatResponse),
    _stream(
        "POST /api/generate",
        ollama_api.generate,
        "Answer a prompt, or continue it",
        schemas.OllamaGenerateResponse,
    ),
    _ollama(
        "POST /api/embed",
        ollama_api.embed,
        "Compute the vectors of texts",
        schemas.OllamaEmbedResponse,
    ),
    _ollama(
        "POST /api/embeddings",
        ollama_api.embeddings,
        "Compute the vector of a text",
        schemas.OllamaEmbeddingsResponse,
    ),
    _ollama("GET /api/tags", ollama_models.tags, "List the models", schemas.OllamaModels),
    _ollama(
        "GET /api/ps", ollama_models.running, "List the models in memory", schemas.OllamaModels
    ),
    _ollama("POST /api/show", ollama_models.show, "Describe a model", schemas.OllamaShowResponse),
    _ollama(
        "GET /api/version",
        ollama_models.version,
        "The version of Ollama's API",
        schemas.OllamaVersion,
    ),
    _ollama(
        "POST /api/pull /api/push /api/create /api/copy",
        ollama_models.refuse,
        "Refused: requests do not change the models",
    ),
    _ollama(
        "DELETE /api/delete", ollama_models.refuse, "Refused: requests do not change the models"
    ),
)
