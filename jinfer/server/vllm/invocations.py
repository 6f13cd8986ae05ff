"""Invocations: Amazon SageMaker's /invocations, which selects the route by the request's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, RootModel

from jinfer.server.core.endpoint import Routes
from jinfer.server.core.service import Handler, RequestContext
from jinfer.server.http.http_errors import invalid_request
from jinfer.server.http.http_responses import SSE_MEDIA_TYPE, HttpResponse, StreamedResponse
from jinfer.server.http.request_body import ignored_fields, validated
from jinfer.server.openai import embeddings
from jinfer.server.openai.chat import chat
from jinfer.server.openai.completions import completions
from jinfer.server.vllm import pooling_routes, ranking

routes = Routes(tag="SageMaker")

# Field -> handler of the route that has it.
_ROUTES: Mapping[str, Handler] = {
    "messages": chat,
    "prompt": completions,
    "query": ranking.rerank,
    "queries": ranking.score,
    "text_1": ranking.score,
    "data_1": ranking.score,
    "task": pooling_routes.pooling,
    "input": embeddings.embeddings,
}


class Invocation(BaseModel):
    """A request with the fields of any route."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None


class AnyAnswer(RootModel[dict[str, Any] | list[Any]]):
    """The response of another route."""


@routes.add("POST /invocations", AnyAnswer, stream=SSE_MEDIA_TYPE)
async def invoke(request: RequestContext[Invocation]) -> HttpResponse | StreamedResponse:
    """Answer as the route whose fields the request has."""
    fields: dict[str, Any] = dict(request.body.model_extra or {})
    if request.body.model is not None:
        fields["model"] = request.body.model
    name = next((name for name in _ROUTES if fields.get(name) is not None), None)
    if name is None:
        raise invalid_request(f"give one of {', '.join(_ROUTES)}", "messages")
    handler = _ROUTES[name]
    if name == "input":
        async with request.service.models.use(request.body.model) as model:
            if model.session.opened.classification is not None:
                handler = pooling_routes.classify_texts
    (schema,) = get_args(get_type_hints(handler)["request"])
    body = validated(fields, schema)
    for field, why in ignored_fields(body):
        request.ignore(field, why)
    answer: HttpResponse | StreamedResponse = await handler(replace(request, body=body))
    return answer
