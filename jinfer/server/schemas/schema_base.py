"""What all requests and answers are made of."""

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
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MOST_PARTS = 8192  # messages, or tools, of a request


@dataclass(frozen=True)
class Ignored:
    """Marks a field that is taken though nothing here reads it; see `jinfer.server.ignored_fields`.

    Attributes:
        why: nothing does, as an error says it.
        but: values that ask for what is done anyway, of which there is nothing to tell.
    """

    why: str
    but: tuple[Any, ...] = ()


def whole(value: Any) -> Any:
    """JSON has one kind of numbers, and some clients write 16 as 16.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _lenient(schema: Any) -> None:
    """Has lists tell only of their first wrong item, and whole numbers be written as floats."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        if kind == "list":
            schema["fail_fast"] = True
        if kind == "int":
            inner: Any = dict(schema)
            schema.clear()
            schema.update(core_schema.no_info_before_validator_function(whole, inner))
        elif kind != "function-before" or schema["function"]["function"] is not whole:
            for part in schema.values():
                _lenient(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _lenient(part)


class Strict(BaseModel):
    """Fields of a request: none that is not known, none of another type; null is nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Only the first wrong thing in a list is told of, and so only that is looked for."""
        schema = handler(source)
        _lenient(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _null_is_nothing(cls, value: Any) -> Any:
        """Clients send what they got, with null for all that was not there.

        Objects without a model (JSON schemas, variables of templates) keep theirs.
        """
        if isinstance(value, dict) and any(one is None for one in value.values()):
            return {name: one for name, one in value.items() if one is not None}
        return value

    def given(self) -> dict[str, Any]:
        """The fields that were sent and are not null."""
        fields = [name for name in type(self).model_fields if name in self.model_fields_set]
        sent = {name: getattr(self, name) for name in fields}
        return {name: value for name, value in sent.items() if value is not None}


class Replayed(Strict):
    """A part of a conversation that may be an earlier answer, from whatever server.

    What that server put beside it, and its client sent back, is ignored with a word.
    """

    model_config = ConfigDict(extra="allow")

    @property
    def was_answer(self) -> bool:
        """Whether it is, so that fields may be in it which are not known."""
        return True


class OtherTool(BaseModel):
    """A tool that is no function, and that nobody here could run."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Ignored("only functions can be called")]


def tool_kind(value: Any) -> str:
    """Tells a function from another tool, for `Discriminator`."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "other" if isinstance(kind, str) and kind != "function" else "function"


class Answer(BaseModel):
    """Fields of an answer; there may be others beside those of OpenAI."""

    model_config = ConfigDict(extra="allow")


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorAnswer(BaseModel):
    """Every answer that is not a success."""

    error: ErrorDetail


def _same_type(kind: type) -> BeforeValidator:
    """Python takes 0 for false and 1.0 for 1, which JSON does not."""

    def check(value: Any) -> Any:
        value = whole(value) if kind is int else value
        if value is not None and type(value) is not kind:
            raise PydanticCustomError("type", f"Input should be of the type {kind.__name__}")
        return value

    return BeforeValidator(check)


def refused(why: str) -> BeforeValidator:
    """Says why a field can have no value but null, or false, and what to do instead."""

    def check(value: Any) -> Any:
        if value is not None and value is not False:
            raise PydanticCustomError("refused", why)
        return value

    return BeforeValidator(check)


def written(value: Any) -> Any:
    """The JSON text of an object, which some clients send in its place."""
    if not isinstance(value, dict):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise PydanticCustomError("type", "the object is nested too deeply") from None


JsonText = Annotated[str, BeforeValidator(written)]
No = Annotated[Literal[False], _same_type(bool)]
Zero = Annotated[Literal[0], _same_type(int)]
Ids = list[int]
Prompts = str | list[int] | list[str] | list[list[int]]
# A list of texts and ids together is one prompt, as llama.cpp has it.
MixedPrompts = str | list[str | int] | list[str | list[str | int]]


class StreamOptions(Strict):
    """What a stream has beside the answer."""

    include_usage: bool | None = Field(None, description="one more chunk, with the usage")
    continuous_usage_stats: bool | None = Field(None, description="usage in every chunk (vLLM)")
    include_obfuscation: Annotated[bool | None, Ignored("events are not padded", (False,))] = Field(
        None, description="true changes nothing"
    )


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Of the answer's tokens: those that were drafted and right, and drafts that were not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class Timings(BaseModel):
    """llama.cpp's figures of one answer."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
