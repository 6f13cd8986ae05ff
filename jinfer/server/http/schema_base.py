"""Schema base classes: strict request models, response models, usage and timings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_ITEMS = 8192  # of messages, or of tools, in a request


@dataclass(frozen=True)
class Ignored:
    """Marks a field that has no effect; see `jinfer.server.http.request_body`.

    Attributes:
        reason: the reason, for the error of a strict server.
        allowed: values that ask for the default behaviour, which are not reported.
    """

    reason: str
    allowed: tuple[Any, ...] = ()


def whole_number(value: Any) -> Any:
    """Convert 16.0 to 16: JSON has one number type, and some clients write integers as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _lenient(schema: Any) -> None:
    """Make lists fail at their first wrong item, and integers accept whole floats."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        if kind == "list":
            schema["fail_fast"] = True
        if kind == "int":
            inner: Any = dict(schema)
            schema.clear()
            schema.update(core_schema.no_info_before_validator_function(whole_number, inner))
        elif kind != "function-before" or schema["function"]["function"] is not whole_number:
            for part in schema.values():
                _lenient(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _lenient(part)


class RequestModel(BaseModel):
    """A request model: no unknown fields, no type coercion; null means not given."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Make lists fail fast, as only the first error is reported."""
        schema = handler(source)
        _lenient(schema)
        return schema

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describe that unknown fields may be null."""
        described = handler(schema)
        fields = handler.resolve_ref_schema(described)
        if fields.get("additionalProperties") is False:
            fields["additionalProperties"] = {"type": "null"}
        return described

    @model_validator(mode="before")
    @classmethod
    def _null_is_nothing(cls, value: Any) -> Any:
        """Drop null fields: clients replay responses with null for absent fields.

        Free-form objects (JSON schemas, template variables) keep their nulls.
        """
        if isinstance(value, dict) and any(item is None for item in value.values()):
            return {name: item for name, item in value.items() if item is not None}
        return value

    def given_fields(self) -> dict[str, Any]:
        """Return the fields that were sent and are not null."""
        fields = [name for name in type(self).model_fields if name in self.model_fields_set]
        sent = {name: getattr(self, name) for name in fields}
        return {name: value for name, value in sent.items() if value is not None}


class ReplayedModel(RequestModel):
    """A part of a conversation that may be an earlier answer, of any server.

    Extra fields that another server added are ignored and reported.
    """

    model_config = ConfigDict(extra="allow")

    @property
    def was_answer(self) -> bool:
        """Return whether the part is an earlier answer, which may have unknown fields."""
        return True


class OtherTool(BaseModel):
    """A tool other than a function, which the server cannot run."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[
        str,
        Ignored("the model can call functions only"),
        Field(json_schema_extra={"not": {"const": "function"}}),
    ]


def tool_kind(value: Any) -> str:
    """Distinguish functions from other tools, for `Discriminator`."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "other" if isinstance(kind, str) and kind != "function" else "function"


class ResponseModel(BaseModel):
    """A response model; fields beyond OpenAI's are allowed."""

    model_config = ConfigDict(extra="allow")


class ListPage(ResponseModel):
    """A page of a list."""

    object: Literal["list"]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


class ErrorDetail(BaseModel):
    """The error object."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(BaseModel):
    """The response of a failed request."""

    error: ErrorDetail


def rejected_field(why: str, *neutral: Any) -> BeforeValidator:
    """Rejects a field, with the reason, unless its value requests what happens anyway.

    Args:
        neutral: such values, besides null; 0 is not false.
    """

    def check(value: Any) -> Any:
        value = whole_number(value)
        if value is None or any(type(value) is type(same) and value == same for same in neutral):
            return None
        raise PydanticCustomError("refused", why)

    return BeforeValidator(check)


def json_text(value: Any) -> Any:
    """Convert an object to its JSON text: some clients send the object."""
    if not isinstance(value, dict):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise PydanticCustomError("type", "the object is nested too deeply") from None


JsonText = Annotated[str, BeforeValidator(json_text)]
Ids = list[int]
Prompts = str | list[int] | list[str] | list[list[int]]
# A list that mixes texts and ids is a single prompt, as in llama.cpp.
MixedPrompts = str | list[str | int] | list[str | list[str | int]]


class StreamOptions(RequestModel):
    """Options of a streamed response."""

    include_usage: bool | None = Field(None, description="adds a chunk with the usage")
    continuous_usage_stats: bool | None = Field(None, description="usage in every chunk (vLLM)")
    include_obfuscation: Annotated[bool | None, Ignored("events are not padded", (False,))] = Field(
        None, description="true changes nothing"
    )


class PromptTokensDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Details of the answer's tokens: accepted and rejected draft tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class TokenUsage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class Timings(BaseModel):
    """llama.cpp's timings of an answer."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
