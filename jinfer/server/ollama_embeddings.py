"""Ollama API: /api/embed, and the older /api/embeddings of one text."""

from __future__ import annotations

from jinfer.server.embeddings import Embedder, truncate_vectors
from jinfer.server.http_responses import HttpResponse, dumps_list
from jinfer.server.ollama_api import Clock
from jinfer.server.schemas.ollama_api import OllamaEmbeddingsRequest, OllamaEmbedRequest
from jinfer.server.service import RequestContext

_AS_MANY_AS_FIT = -1


async def embed(call: RequestContext[OllamaEmbedRequest]) -> HttpResponse:
    """Handles an embedding request; vectors have the length 1, as Ollama's."""
    body, clock = call.body, Clock()
    truncate = None if body.truncate is False else _AS_MANY_AS_FIT
    async with call.service.models.use(body.model, keep=call.keep_alive()) as hosted:
        clock.loaded()
        call.note(model=hosted.name)
        head = {"model": hosted.name, "load_duration": clock.load}
        if not body.input:
            none = {"embeddings": [], "total_duration": clock.total, "prompt_eval_count": 0}
            return HttpResponse({**head, **none})
        embedder = Embedder(call.service, hosted, truncate)
        vectors, tokens = await embedder.embed(body.input, "input", None, normalize=True)
        call.note(prompt_tokens=tokens)
        vectors = truncate_vectors(vectors, body.dimensions, unit=True)
        head |= {"total_duration": clock.total, "prompt_eval_count": tokens}
        return HttpResponse(await call.service.in_thread(dumps_list, head, "embeddings", vectors))


async def embeddings(call: RequestContext[OllamaEmbeddingsRequest]) -> HttpResponse:
    """Handles a request of the older route; the vector's length is the model's, as Ollama's."""
    body = call.body
    async with call.service.models.use(body.model, keep=call.keep_alive()) as hosted:
        call.note(model=hosted.name)
        if not body.prompt:
            return HttpResponse({"embedding": []})
        embedder = Embedder(call.service, hosted, _AS_MANY_AS_FIT)
        (vector,), tokens = await embedder.embed(body.prompt, "prompt", None, normalize=False)
        call.note(prompt_tokens=tokens)
        return HttpResponse({"embedding": vector})
