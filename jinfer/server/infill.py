"""Fill-in-the-middle: llama.cpp's /infill, and `suffix` of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jinfer.api.generation_requests import with_fim_ends
from jinfer.api.session import Session
from jinfer.server.http_errors import ApiError, invalid_request, unsupported_field
from jinfer.server.http_responses import HttpResponse, StreamedResponse
from jinfer.server.llamacpp_api import answer_prompts, prepare_llama
from jinfer.server.prompt_builder import check_prompt_count, is_single_prompt
from jinfer.server.request_params import LLAMA_CPP, RequestOptions, request_options
from jinfer.server.request_runner import PromptRequests
from jinfer.server.schemas.llamacpp_api import InfillRequest
from jinfer.server.schemas.sampling_fields import SamplingFields
from jinfer.server.served_model import ServedModel
from jinfer.server.service import RequestContext
from jinfer.tokenizer import TokenizerError
from jinfer.tokenizer.fill_in_middle import infill_prompt

_ROUTE = frozenset(InfillRequest.model_fields) - frozenset(SamplingFields.model_fields)


async def infill(call: RequestContext[InfillRequest]) -> HttpResponse | StreamedResponse:
    """Handles a request to fill in what belongs between two texts."""
    if not isinstance(call.body.prompt, str):
        raise invalid_request("it is a text, which follows input_prefix", "prompt")
    return await answer_prompts(call, _prepare)


def _prepare(call: RequestContext[InfillRequest], hosted: ServedModel) -> list[PromptRequests]:
    body, session = call.body, hosted.session
    sampling = request_options(body, session, LLAMA_CPP, None, _ROUTE)
    files = [(one.filename or "file", one.text) for one in body.input_extra or ()]
    # Editors send whole files: what the context has no room for is left out, but room for an
    # answer.
    context = session.opened.context
    answer = min(sampling.params.max_tokens or context // 4, context // 2)
    try:
        ids = infill_prompt(
            session.tokenizer,
            f"{body.input_prefix}{body.prompt}",
            body.input_suffix,
            files,
            room=context - answer,
        )
    except TokenizerError as error:
        raise _no_tokens(error, "input_suffix") from error
    options = fim_options(session, sampling)
    return prepare_llama(call, session, [ids], options, param="input_prefix")


def infill_ids(
    prompts: str | Sequence[Any], suffix: str, session: Session, limit: int
) -> list[list[int]]:
    """The tokens of prompts with a gap after each and one suffix behind it. Raises `ApiError`."""
    listed = [prompts] if is_single_prompt(prompts) else prompts
    check_prompt_count(listed, limit, "prompt")
    given = [one if isinstance(one, str) else session.encode(one) for one in listed]
    try:
        return [infill_prompt(session.tokenizer, one, suffix) for one in given]
    except TokenizerError as error:
        raise _no_tokens(error, "suffix") from error


def fim_options(session: Session, sampling: RequestOptions) -> RequestOptions:
    """Options with which a filled-in text ends where the FIM tokens say so."""
    return replace(sampling, params=with_fim_ends(session, sampling.params))


def _no_tokens(error: TokenizerError, param: str) -> ApiError:
    return unsupported_field(str(error), param)
