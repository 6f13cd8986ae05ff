"""What all requests and answers are made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema


def _stop_at_first(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _stop_at_first(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _stop_at_first(part)


MOST_PARTS = 8192  # messages, or tools, of a request


class Strict(BaseModel):
    """Fields of a request: none that is not known, none of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Only the first wrong thing in a list is told of, and so only that is looked for."""
        schema = handler(source)
        _stop_at_first(schema)
        return schema

    def given(self) -> dict[str, Any]:
        """The fields that were sent and are not null."""
        fields = [name for name in type(self).model_fields if name in self.model_fields_set]
        sent = {name: getattr(self, name) for name in fields}
        return {name: value for name, value in sent.items() if value is not None}


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
        if value is not None and type(value) is not kind:
            raise ValueError(f"Input should be of the type {kind.__name__}")
        return value

    return BeforeValidator(check)


No = Annotated[Literal[False], _same_type(bool)]
Zero = Annotated[Literal[0], _same_type(int)]
Ids = list[int]
Prompts = str | list[int] | list[str] | list[list[int]]


class StreamOptions(Strict):
    """What a stream has beside the answer."""

    include_usage: bool | None = Field(None, description="one more chunk, with the usage")
    continuous_usage_stats: bool | None = Field(None, description="usage in every chunk (vLLM)")
    include_obfuscation: bool | None = Field(None, description="only false")


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
