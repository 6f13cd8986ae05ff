"""Prepare chat: the preparation of a conversation, the same for all dialects.

A dialect translates its request to a `ChatRequest`; here it becomes a prompt, sampling parameters
and an output parser.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinfer.sampling.request_errors import ConstraintError
from jinfer.server.core.chat_schemas import ChatRequest
from jinfer.server.core.prompt_builder import build_chat_prompt
from jinfer.server.core.prompt_requests import PromptRequests, prepare_prompt
from jinfer.server.core.request_params import CHAT, RequestOptions, request_options
from jinfer.server.core.sampling_fields import SamplingFields
from jinfer.server.core.thinking_choice import BUDGET, UNLIMITED, ThinkingChoice
from jinfer.server.core.tool_calls import output_parsing
from jinfer.server.http.http_errors import (
    ApiError,
    as_api_error,
    invalid_request,
    unsupported_field,
)
from jinfer.server.http.request_body import Ignore
from jinfer.server.http.server_settings import ServerSettings
from jinfer.server.models.served_model import ServedModel
from jinfer.server.tool_parsers.output_deltas import OutputParsing

# Fields that are not sampling parameters.
CHAT_FIELDS = frozenset(ChatRequest.model_fields) - frozenset(SamplingFields.model_fields)

type FieldName = Callable[[str], str]  # field of a chat request -> its name in a dialect


def prepare_chat(
    chat: ChatRequest,
    model: ServedModel,
    settings: ServerSettings,
    ignore: Ignore,
    *,
    base: Mapping[str, Any] = CHAT,
    context: Sequence[int] = (),
) -> PromptRequests:
    """Prepare the engine requests of a conversation. Slow: call it in a worker thread.

    Args:
        ignore: records fields that have no effect.
        base: the route's defaults, below the model's.
        context: tokens of an earlier prompt and its answer, which the conversation follows.

    Raises:
        ApiError: the request cannot be answered.
    """
    session = model.session
    prompt = build_chat_prompt(chat, session, settings, ignore)
    encoded = prompt.encoded()
    if encoded.images and chat.prompt_logprobs is not None:
        raise unsupported_field("a prompt with images has no log-probabilities", "prompt_logprobs")
    ids = encoded.ids
    if context:
        # One BOS token is enough; in ChatML it begins each message.
        has_bos = ids[0] == session.tokenizer.bos_id and ids[0] not in ids[1:]
        encoded = encoded.after(context, int(has_bos))
        ids = encoded.ids
    parsing = output_parsing(chat, prompt.template, session.opened.tokenizer, ids, ignore)
    fields_elsewhere = CHAT_FIELDS | prompt.thinking.unused.keys()
    changes: dict[str, Any] = dict(parsing.param_changes)
    if changes and chat.response_format is not None and chat.response_format.type != "text":
        # The format concerns the content, and a forced tool call has no content.
        ignore("response_format", "it cannot be used where tools have to be called")
        fields_elsewhere |= {"response_format"}
    if chat.logprobs:
        changes["logprobs"] = chat.top_logprobs or 0
    options = request_options(chat, session, base, changes, fields_elsewhere)
    options = _with_thinking_budget(options, prompt.thinking)
    if parsing.param_changes:
        names = {**options.names, **dict.fromkeys(parsing.param_changes, "tools")}
        options = replace(options, names=names)
    elif options.params.constrained:
        options, parsing = _constrained(options, parsing)
    return prepare_prompt(
        session, encoded, options, param="messages", timeout=settings.timeout, parsing=parsing
    )


def _with_thinking_budget(options: RequestOptions, thinking: ThinkingChoice) -> RequestOptions:
    """Set the thinking budget. Raises `ApiError` if another field contradicts it."""
    if thinking.budget is None:
        return options
    budget = None if thinking.budget == UNLIMITED else thinking.budget
    other, field = options.names.get(BUDGET), thinking.budget_field
    if other is not None and options.params.thinking_token_budget != budget:
        raise invalid_request(f"{other} and {field} contradict each other", field)
    params = replace(options.params, thinking_token_budget=budget)
    return replace(options, params=params, names={**options.names, BUDGET: field})


def _constrained(
    options: RequestOptions, parsing: OutputParsing
) -> tuple[RequestOptions, OutputParsing]:
    """Apply a constraint to the answer: no tool calls, and reasoning only before JSON."""
    schema = options.params.json_schema
    if schema is None or parsing.constrained is None:
        return options, OutputParsing()
    field = options.names.get("json_schema", "response_format")
    try:
        parsing = parsing.constrained(schema)
    except ConstraintError as error:
        raise as_api_error(error, param=field) from error
    if parsing.param_changes:
        params = replace(options.params, json_schema=None, **parsing.param_changes)
        options = replace(options, params=params, names={**options.names, "grammar": field})
    return options, parsing


@contextlib.contextmanager
def field_names(name_of: FieldName) -> Iterator[None]:
    """Translate the field names in errors to a dialect."""
    try:
        yield
    except ApiError as error:
        error.param = error.param and name_of(error.param)
        raise


def ignore_as(ignore: Ignore, name_of: FieldName) -> Ignore:
    """Translate the names of ignored fields to a dialect."""
    return lambda field, reason: ignore(name_of(field), reason)
