"""Schemas of the llama.cpp and Inferflow APIs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from jinfer.server.schemas import schema_base as base
from jinfer.server.schemas.sampling_fields import SamplingFields


class LlamaText(base.RequestModel):
    """A prompt with optional multimodal data, which is not supported."""

    prompt_string: str
    multimodal_data: Annotated[list[str], Field(max_length=0)] | None = None


_Piece = str | int
LlamaPrompt = str | LlamaText | list[_Piece] | list[str | LlamaText | list[_Piece]]


class LlamaRequest(SamplingFields):
    """A request to /completion; a list that mixes texts and ids is one prompt."""

    prompt: LlamaPrompt
    model: str | None = None
    stream: bool | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = Field(None, description="only these; a/b names b in a")


class ExtraFile(base.RequestModel):
    """Another file of the repository."""

    text: str
    filename: str | None = None


class InfillRequest(LlamaRequest):
    """A request to /infill: what belongs between two texts."""

    input_prefix: str
    input_suffix: str
    prompt: LlamaPrompt = Field("", description="follows input_prefix")
    input_extra: list[ExtraFile] | None = Field(None, max_length=base.MAX_ITEMS)


class LlamaCompletion(base.ResponseModel):
    """A whole answer, or the last event of a stream; `response_fields` selects fields."""

    index: int = 0
    content: str = ""
    tokens: list[int] | None = None
    id_slot: int = -1
    stop: bool = True
    model: str = ""
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    tokens_cached: int = 0
    generation_settings: dict[str, Any] | None = None
    has_new_line: bool = False
    truncated: bool = False
    stop_type: Literal["eos", "limit", "word", "none"] = "none"
    stopping_word: str = ""
    timings: base.Timings | None = None


class LlamaResponse(RootModel[LlamaCompletion | list[LlamaCompletion]]):
    """The response of /completion: one answer, or a list of several."""


class InferflowRequest(SamplingFields):
    """A request to Inferflow's POST /."""

    text: str
    model: str | None = None
    system_prompt: str | None = None
    res_prefix: str | None = Field(None, description="what the answer begins with")
    encoder_input_template: str | None = Field(
        None, description="only where the operator allows it"
    )
    decoder_input_template: str | None = Field(
        None, description="only where the operator allows it"
    )
    decoding_alg: str | dict[str, Any] | None = None
    random_seed: int | None = Field(None, description="0: a new one")
    is_streaming_mode: bool | Literal[0, 1] | None = Field(None, description="true if not given")
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
