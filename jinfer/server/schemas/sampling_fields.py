"""How an answer is chosen: the fields that all routes which generate have in common.

`jinfer.server.request_params` says what becomes of each; docs/sampling.md what they do.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from jinfer.server.schemas.parameter_groups import tell
from jinfer.server.schemas.schema_base import Ignored, Strict


class JsonSchema(Strict):
    """A named schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="answers always keep to the schema")


class ResponseFormat(Strict):
    """What an answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class StructuredOutputs(Strict):
    """The same in vLLM's words."""

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Sampling(Strict):
    """OpenAI's, vLLM's, llama.cpp's and jinfer's own names, whichever a client prefers."""

    model_config = ConfigDict(json_schema_extra=tell)

    # OpenAI
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float | bool] | list[list[int | float | str | bool]] | None = None
    response_format: ResponseFormat | None = None
    # vLLM
    top_k: int | None = Field(None, description="-1 and 0: all")
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, description="keeps the last ones")
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = Field(None, description="lower ones go first")
    return_token_ids: bool | None = None
    # llama.cpp
    n_predict: int | None = Field(None, description="-1: up to the context's end")
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    typical_p: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str | int] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    top_n_sigma: float | None = None
    samplers: list[str] | None = None
    grammar: str | None = Field(None, description="Lark, or llama.cpp's GBNF")
    json_schema: dict[str, Any] | bool | None = None
    cache_prompt: bool | None = Field(None, description="false: the whole prompt is computed")
    n_probs: int | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    id_slot: Annotated[int | None, Ignored("slots are chosen by what they hold", (-1,))] = None
    verbose: Annotated[bool | None, Ignored("/props and the log say more", (False,))] = None
    # jinfer
    strategy: str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    speculation: bool | None = Field(None, description="false: no tokens are drafted")
    tfs_z: float | None = None
    top_a: float | None = None
    penalty_last_n: int | None = None
    banned_token_ids: list[int] | None = None
    bad_words_ids: list[list[int]] | None = None
    fsd_alpha: float | None = None
    fsd_k: int | None = None
    fsd_n: int | None = None
    fsd_beta: float | None = None
    fsd_pool: int | None = None
    random_fsd_tokens: int | None = None
    random_fsd_probability: float | None = None
    penalty_alpha: float | None = None
    beams: int | None = None
    early_stopping: bool | Literal["never"] | None = None
    best_of: int | None = None
