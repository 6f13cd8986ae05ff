"""Sampling fields: request fields of all routes that generate.

`request_params` makes `SamplingParams` of them; docs/sampling.md describes each.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from operator import or_
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from jinfer.modelspec.bounded_types import documentation, union
from jinfer.modelspec.foreign_names import ForeignField, foreign_fields
from jinfer.sampling.param_field import ALIASES, Group, Parameter
from jinfer.sampling.samplers import SELECTABLE, Strategy
from jinfer.sampling.sampling_params import ACTIVATIONS, PARAMETERS, SamplingParams
from jinfer.server.http.http_errors import invalid_request, unsupported_field
from jinfer.server.http.request_body import Ignore
from jinfer.server.http.schema_base import (
    Ignored,
    RequestModel,
    ResponseModel,
    StreamOptions,
    rejected_field,
)


class NpyArray(RequestModel):
    """An array as base64 of a .npy file."""

    npy: str


Numbers = float | list[Any] | NpyArray
# A slice is [start, stop].
Tokens = Literal["all", "prompt", "answer"] | list[int | None]


class EditField(RequestModel):
    """An edit of a named activation; `Edit` in Python."""

    name: str
    operation: Literal["add", "set", "scale", "project_out"]
    value: Numbers = Field(description="a number, nested lists, or base64 of a .npy file")
    tokens: Tokens = Field("all", description="all, prompt, answer, or [start, stop]")
    head: int | None = None


class SteerField(RequestModel):
    """A steering vector (`Steer` in Python), or the name of a stored one."""

    name: str | None = None
    vector: Numbers | None = None
    steering: str | None = Field(None, description="a name of /v1/steering, in place of both")
    scale: float = Field(1.0, allow_inf_nan=False)
    tokens: Tokens = "all"


class CapturedArray(ResponseModel):
    """A captured activation [tokens, ...], float32."""

    shape: list[int]
    npy: str | None = None
    values: list[Any] | None = None


# The request's fields under each heading; other fields are aliases, or set the number of answers.
GROUPS: Mapping[str, tuple[str, ...]] = {
    group: tuple(p.fields[0] for p in PARAMETERS.values() if p.group == group)
    for group in get_args(Group)
    if group
}
_PARAMETER_OF = {field: p.name for p in PARAMETERS.values() for field in p.fields}
_EXAMPLES: Mapping[str, list[Any]] = {
    "strategy": list(get_args(Strategy)),
    "samplers": [list(SELECTABLE)],
}


def parameter_of(field: str) -> str:
    """Return the parameter that a field sets."""
    return _PARAMETER_OF.get(field, ALIASES.get(field, field))


def describe(schema: dict[str, Any]) -> None:
    """Add ranges, texts and groups of sampling parameters to a request's JSON schema."""
    texts = {name: text for names, text in documentation(SamplingParams).items() for name in names}
    groups = {name: group for group, names in GROUPS.items() for name in names}
    schema["properties"] = _ordered(schema["properties"], list(groups))
    for name, field in schema["properties"].items():
        own = parameter_of(name)
        if name in groups:
            field["x-group"] = groups[name]
        if own in texts:
            field.setdefault("description", texts[own])
        if own in PARAMETERS:
            _bound(field, PARAMETERS[own])
        if name in _EXAMPLES:
            field["examples"] = _EXAMPLES[name]


def _ordered(fields: dict[str, Any], order: list[str]) -> dict[str, Any]:
    """Sort the fields in `order` among their own positions."""
    sorted_names = iter([name for name in order if name in fields])
    names = [next(sorted_names) if name in order else name for name in fields]
    return {name: fields[name] for name in names}


def _bound(field: dict[str, Any], parameter: Parameter) -> None:
    """Write a parameter's bounds to the alternatives that are numbers."""
    if (bounds := parameter.bounds) is None:
        return
    low = -1 if parameter.minus_one else bounds.low
    minimum = {"exclusiveMinimum": 0} if 0 < low < 1e-20 else {"minimum": low}
    for item in field.get("anyOf", ()):
        if item.get("type") in ("integer", "number"):
            item |= {**minimum, "maximum": bounds.high}


class JsonSchema(RequestModel):
    """A named schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="the schema is always enforced")


class ResponseFormat(RequestModel):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class StructuredOutputs(RequestModel):
    """vLLM's fields for the same."""

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class LoraScale(RequestModel):
    """The number of a LoRA adapter in /lora-adapters, and its scale."""

    id: int
    scale: float = Field(1.0, allow_inf_nan=False, ge=-1e6, le=1e6)


def _json_type(annotation: Any) -> Any:
    """A parameter's type in JSON: lists only, where Python takes tuples too; null is nothing."""
    members = union(annotation)
    kept = [arm for arm in members if get_origin(arm) is not tuple and arm is not NoneType]
    return functools.reduce(or_, kept) | None


def _table_fields() -> dict[str, Any]:
    """Return the fields of the table of sampling parameters, for `create_model`."""
    types = get_type_hints(SamplingParams)
    rows = [p for p in PARAMETERS.values() if p.name not in ACTIVATIONS]
    fields = [(field, p.name) for p in rows for field in p.fields]
    return {field: (_json_type(types[name]), None) for field, name in fields}


def _foreign(field: ForeignField) -> Any:
    """The type of a field of other servers that is ignored or refused."""
    if field.type is None:
        return Annotated[None, rejected_field(field.reason, *field.neutral)]
    return Annotated[field.type | None, Ignored(field.reason, field.neutral)]


FOREIGN_FIELDS = {name: _foreign(field) for name, field in foreign_fields().items()}

if TYPE_CHECKING:
    _TableFields = RequestModel
else:
    _TableFields = create_model(
        "_TableFields",
        __base__=RequestModel,
        **{name: (type_, None) for name, type_ in FOREIGN_FIELDS.items()},
        **_table_fields(),
    )


class SamplingFields(_TableFields):
    """OpenAI's, vLLM's, llama.cpp's and jinfer's own names, whichever a client prefers.

    The fields of `SamplingParams` come from its table. Listed below are fields whose JSON differs
    from Python, fields with their own description, fields that routes read by name, and fields that
    are not sampling parameters.
    """

    model_config = ConfigDict(json_schema_extra=describe)

    strategy: str | None = None
    top_k: int | None = Field(None, description="-1 and 0: all")
    logit_bias: dict[str, float | bool] | list[list[int | float | str | bool]] | None = None
    json_schema: dict[str, Any] | bool | None = None
    grammar: str | None = Field(None, description="Lark, or llama.cpp's GBNF")
    n_predict: int | None = Field(None, description="-1: up to the end of the context")
    logits_processors: list[str] | None = Field(None, description="names from --logits-processor")
    speculation: bool | None = Field(None, description="false: no tokens are drafted")
    n: int | None = None
    best_of: int | None = None
    n_probs: int | None = None
    # OpenAI
    response_format: ResponseFormat | None = None
    # vLLM
    truncate_prompt_tokens: int | None = Field(None, description="keeps the last tokens")
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="right: truncate_prompt_tokens keeps the first tokens"
    )
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = Field(None, description="lower values are scheduled first")
    return_token_ids: bool | None = None
    # llama.cpp
    post_sampling_probs: bool | None = Field(
        None, description="log-probabilities after the samplers"
    )
    cache_prompt: bool | None = Field(None, description="false: the whole prompt is computed")
    lora: list[LoraScale] | None = Field(None, description="the LoRA adapter to compute with")
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    verbose: bool | None = Field(None, description="adds the answer in the format of /completion")
    n_cmpl: int | None = Field(None, description="as n")
    t_max_predict_ms: int | None = Field(None, description="0: any time")
    id_slot: int | None = Field(None, description="the slot of /slots/{id}")
    # jinfer, where --allow-inspection is set
    capture: list[str] | None = Field(None, description="names of activations to return")
    capture_format: Literal["npy", "list"] | None = Field(None, description="npy: base64")
    steer: list[SteerField] | None = Field(None, description="steering vectors")
    edits: list[EditField] | None = Field(None, description="edits of activations")


def ignore_verbose(body: SamplingFields, stream: bool | None, ignore: Ignore) -> None:
    """Report `verbose` where it has no effect."""
    if body.verbose and stream:
        ignore("verbose", "streamed answers have no llama.cpp format")


def check_stream(body: SamplingFields, stream: bool | None, options: StreamOptions | None) -> None:
    """Raise `ApiError` if stream options are given without a stream, or are invalid."""
    if stream:
        if body.capture:
            raise unsupported_field("activations are not streamed", "capture")
        if body.best_of is not None and body.best_of > (body.n or 1):
            raise invalid_request("the best answer is known only at the end", "best_of")
        return
    if body.capture_format is not None and not body.capture:
        raise invalid_request("it needs capture", "capture_format")
    if options is not None:
        raise invalid_request("it needs stream: true", "stream_options")
    for name in ("timings_per_token", "return_progress"):
        if getattr(body, name):
            raise invalid_request("it needs stream: true", name)


NO_CAPTURE = "use /v1/completions or /v1/chat/completions for activations"

# Fields about tokens, which answers in blocks (messages, responses) cannot represent.
TOKEN_FIELDS = {
    "prompt_logprobs": "use /v1/completions",
    "return_token_ids": "this route does not return token ids",
    "timings_per_token": "this route does not return timings",
    "return_progress": "this route does not report progress",
    "capture": NO_CAPTURE,
}


def reject_fields(body: BaseModel, **reasons: str) -> None:
    """Raise `ApiError`, with the reason, if a field is set that a route does not support."""
    for name, reason in reasons.items():
        if getattr(body, name):
            raise unsupported_field(reason, name)
