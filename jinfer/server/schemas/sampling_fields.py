"""Sampling fields of requests, which all routes that generate have.

`jinfer.server.request_params` makes `SamplingParams` of them; docs/sampling.md says what they do.
"""

from __future__ import annotations

import functools
from operator import or_
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin, get_type_hints

from pydantic import ConfigDict, Field, create_model

from jinfer.modelspec.field_types import union
from jinfer.modelspec.foreign_names import FIELDS, ForeignField
from jinfer.sampling.sampling_params import ACTIVATIONS, PARAMETERS, SamplingParams
from jinfer.server.schemas.activations import EditField, SteerField
from jinfer.server.schemas.parameter_groups import describe
from jinfer.server.schemas.schema_base import Ignored, RequestModel, rejected_field


class JsonSchema(RequestModel):
    """A named schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="answers always keep to the schema")


class ResponseFormat(RequestModel):
    """What an answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class StructuredOutputs(RequestModel):
    """The same in vLLM's words."""

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class LoraScale(RequestModel):
    """A LoRA adapter, by its number in /lora-adapters, and what its term is multiplied by."""

    id: int
    scale: float = Field(1.0, allow_inf_nan=False, ge=-1e6, le=1e6)


def _json_type(annotation: Any) -> Any:
    """A parameter's type in JSON: lists only, where Python takes tuples too; null is nothing."""
    kept = [
        arm for arm in union(annotation) if get_origin(arm) is not tuple and arm is not NoneType
    ]
    return functools.reduce(or_, kept) | None


def _table_fields() -> dict[str, Any]:
    """The fields of the table of sampling parameters, for `create_model`."""
    types = get_type_hints(SamplingParams)
    rows = [p for p in PARAMETERS.values() if p.name not in ACTIVATIONS]
    fields = [(field, p.name) for p in rows for field in p.fields]
    return {field: (_json_type(types[name]), None) for field, name in fields}


def _foreign(field: ForeignField) -> Any:
    """The type of a field of other servers that is ignored or refused."""
    if field.type is None:
        return Annotated[None, rejected_field(field.reason, *field.neutral)]
    return Annotated[field.type | None, Ignored(field.reason, field.neutral)]


FOREIGN_FIELDS = {name: _foreign(field) for field in FIELDS for name in field.names.split()}

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

    The fields of `SamplingParams` come from its table. Below are those whose JSON differs from
    Python, those with a description of their own, those that routes read by name, and fields that
    are no sampling parameters.
    """

    model_config = ConfigDict(json_schema_extra=describe)

    strategy: str | None = None
    top_k: int | None = Field(None, description="-1 and 0: all")
    logit_bias: dict[str, float | bool] | list[list[int | float | str | bool]] | None = None
    json_schema: dict[str, Any] | bool | None = None
    grammar: str | None = Field(None, description="Lark, or llama.cpp's GBNF")
    n_predict: int | None = Field(None, description="-1: up to the context's end")
    logits_processors: list[str] | None = Field(
        None, description="by the names that the server's owner gave them"
    )
    speculation: bool | None = Field(None, description="false: no tokens are drafted")
    n: int | None = None
    best_of: int | None = None
    n_probs: int | None = None
    # OpenAI
    response_format: ResponseFormat | None = None
    # vLLM
    truncate_prompt_tokens: int | None = Field(None, description="keeps the last ones")
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="right: truncate_prompt_tokens keeps the first ones"
    )
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = Field(None, description="lower ones go first")
    return_token_ids: bool | None = None
    # llama.cpp
    post_sampling_probs: bool | None = Field(
        None, description="log-probabilities are those after the samplers"
    )
    cache_prompt: bool | None = Field(None, description="false: the whole prompt is computed")
    lora: list[LoraScale] | None = Field(None, description="the LoRA adapter to compute with")
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    verbose: bool | None = Field(None, description="the answer as /completion has it, too")
    n_cmpl: int | None = Field(None, description="as n")
    t_max_predict_ms: int | None = Field(None, description="0: any time")
    id_slot: int | None = Field(None, description="the slot that /slots/{id} knows it by")
    # jinfer, where --allow-inspection is set
    capture: list[str] | None = Field(None, description="activations that come back, by name")
    capture_format: Literal["npy", "list"] | None = Field(None, description="npy: base64")
    steer: list[SteerField] | None = Field(None, description="steering vectors")
    edits: list[EditField] | None = Field(None, description="changes of activations")
