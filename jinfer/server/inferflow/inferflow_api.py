"""Inferflow API: POST / with its fields, and its stream of JSON chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from jinfer.server.core.endpoint import Routes
from jinfer.server.core.prompt_requests import PromptRequests, prepare_prompt
from jinfer.server.core.request_params import INFERFLOW, request_options
from jinfer.server.core.sampling_fields import (
    NO_CAPTURE,
    SamplingFields,
    check_stream,
    reject_fields,
)
from jinfer.server.core.service import RequestContext
from jinfer.server.http import schema_base as base
from jinfer.server.http.http_errors import ApiError, invalid_request, unsupported_field
from jinfer.server.http.http_responses import (
    NDJSON_MEDIA_TYPE,
    HttpResponse,
    StreamedResponse,
    dumps,
)
from jinfer.server.models.served_model import ServedModel
from jinfer.template.chat_prompt import Conversation

routes = Routes(tag="Inferflow")


class InferflowRequest(SamplingFields):
    """A request to Inferflow's POST /."""

    text: str
    model: str | None = None
    system_prompt: str | None = None
    res_prefix: str | None = Field(None, description="beginning of the answer")
    encoder_input_template: str | None = Field(
        None, description="only with --request-chat-templates"
    )
    decoder_input_template: str | None = Field(
        None, description="only with --request-chat-templates"
    )
    decoding_alg: str | dict[str, Any] | None = None
    random_seed: int | None = Field(None, description="0: random")
    is_streaming_mode: bool | Literal[0, 1] | None = Field(None, description="default: true")
    max_output_len: int | None = None
    max_new_tokens: int | None = None
    header: dict[str, Any] | None = Field(None, description="fn, user and passcode")


class InferflowResponse(base.ResponseModel):
    """A chunk of an Inferflow answer, or all of it."""

    text: str
    ret_code: str
    error_text: str
    time_cost: float
    is_end: int | None = None


_OWN = {"decoding_alg", "random_seed", "max_output_len", "max_new_tokens"}
_ROUTE = frozenset(InferflowRequest.model_fields) - frozenset(SamplingFields.model_fields) - _OWN


@routes.add("POST /", InferflowResponse, stream=NDJSON_MEDIA_TYPE)
async def inferflow(request: RequestContext[InferflowRequest]) -> HttpResponse | StreamedResponse:
    """Answer a text."""
    body = request.body
    stream = body.is_streaming_mode is None or bool(body.is_streaming_mode)
    check_stream(body, stream, None)
    if (body.n or 1) > 1:
        raise unsupported_field("this route returns a single answer", "n")
    if body.prompt_logprobs is not None:
        raise unsupported_field("this route does not return log-probabilities", "prompt_logprobs")
    reject_fields(
        body,
        n_probs="this route does not return log-probabilities",
        return_token_ids="this route does not return token ids",
        timings_per_token="this route does not return timings",
        return_progress="this route does not report progress",
        capture=NO_CAPTURE,
    )
    user = (body.header or {}).get("user")
    request.note(user=user if isinstance(user, str) else None)
    if stream:
        return StreamedResponse(
            _stream_events(request), media_type=NDJSON_MEDIA_TYPE, failed=_failed
        )
    begun = time.perf_counter()
    async with request.running(_prepare) as (_, run):
        ((completion,),) = await run.completions()
        return HttpResponse(_piece(completion.text, begun, "succ", end=True))


def _piece(text: str, begun: float, code: str = "", end: bool = False) -> dict[str, Any]:
    seconds = round(time.perf_counter() - begun, 6)
    shown = {"text": text, "ret_code": code, "error_text": "", "time_cost": seconds}
    return {**shown, "is_end": 1} if end else shown


def _failed(error: ApiError) -> bytes:
    """Format an error in the middle of a stream."""
    code = "error.busy" if error.status == 429 else "error"
    shown = {"text": "", "ret_code": code, "error_text": error.message, "time_cost": 0.0}
    return dumps({**shown, "is_end": 1}) + b"\n\n"


def _prepare(request: RequestContext[InferflowRequest], model: ServedModel) -> list[PromptRequests]:
    body, session, settings = request.body, model.session, request.service.settings
    if body.random_seed == 0:  # Inferflow's value for a random seed
        body = body.model_copy(update={"random_seed": None})
    sampling = request_options(body, session, INFERFLOW, None, _ROUTE)
    conversation = _conversation(request, model)
    if not conversation.has_template:
        if body.system_prompt:
            raise invalid_request("the model's prompt format has no system prompt", "system_prompt")
        ids = session.encode(body.text + (body.res_prefix or ""))
    else:
        messages = [{"role": "user", "content": body.text}]
        if body.system_prompt:
            messages = [{"role": "system", "content": body.system_prompt}, *messages]
        if body.res_prefix and conversation.prompt.template:
            messages.append({"role": "assistant", "content": body.res_prefix})
        ids = conversation.encode(session.tokenizer, messages)
        if body.res_prefix and not conversation.prompt.template:
            ids += session.tokenizer.encode(body.res_prefix, special=False, parse_special=False)
    return [prepare_prompt(session, ids, sampling, param="text", timeout=settings.timeout)]


def _conversation(request: RequestContext[InferflowRequest], model: ServedModel) -> Conversation:
    """Return the prompt format of the request, or else of the model."""
    body, conversation = request.body, model.session.opened.conversation
    cross = model.session.engine.runner.model.has_cross_attention
    own, other = "decoder_input_template", "encoder_input_template"
    if cross:
        own, other = other, own
    if getattr(body, other) is not None:
        raise unsupported_field("the model does not use this template", other)
    template = getattr(body, own)
    if template is None:
        return conversation
    if not request.service.settings.request_templates:
        raise ApiError(403, "the server does not allow templates in requests", param=own)
    return replace(conversation, prompt=replace(conversation.prompt, template=template), jinja=None)


async def _stream_events(request: RequestContext[InferflowRequest]) -> AsyncGenerator[bytes]:
    """Yield the chunks, each followed by an empty line; the last chunk has `is_end`."""
    begun = time.perf_counter()
    async with request.streaming(_prepare) as (_, _, pieces):
        async for batch in pieces:
            text = "".join(chunk.text for _, chunk in batch or ())
            yield dumps(_piece(text, begun)) + b"\n\n" if text else b""
        yield dumps(_piece("", begun, end=True)) + b"\n\n"
