"""Sampling parameters as keywords and dictionaries: types, completion, defaults, overrides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from inspect import Parameter, signature
from typing import Any, Literal, TypedDict

from jinfer.sampling.activation_edits import Edit, Steer
from jinfer.sampling.param_field import ALIASES
from jinfer.sampling.param_types import Processor
from jinfer.sampling.samplers import Strategy
from jinfer.sampling.sampling_params import PARAMETERS, SamplingParams, canonical_names


class SamplingKeywords(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords, each of which may be left out."""

    strategy: Strategy
    temperature: float | None
    dynatemp_range: float
    dynatemp_exponent: float
    seed: int | None
    samplers: tuple[str, ...] | list[str] | None
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    tfs_z: float
    top_a: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_last_n: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: tuple[str | int, ...] | list[str | int]
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None
    banned_token_ids: tuple[int, ...] | list[int]
    allowed_token_ids: tuple[int, ...] | list[int] | None
    bad_words: tuple[str, ...] | list[str]
    bad_words_ids: tuple[tuple[int, ...], ...] | list[list[int]]
    logits_processors: tuple[Processor, ...] | list[Processor]
    fsd_alpha: float
    fsd_k: int
    fsd_n: int
    fsd_beta: float
    fsd_pool: int
    random_fsd_tokens: int
    random_fsd_probability: float
    penalty_alpha: float
    beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    n: int
    best_of: int | None
    max_tokens: int | None
    min_tokens: int
    stop: str | tuple[str, ...] | list[str]
    stop_token_ids: tuple[int, ...] | list[int]
    ignore_eos: bool
    include_stop: bool
    skip_special: bool
    thinking_token_budget: int | None
    thinking_budget_message: str | None
    logprobs: int | None
    logprob_token_ids: tuple[int, ...] | list[int]
    post_sampling_probs: bool
    speculation: bool
    json_schema: str | Mapping[str, Any] | bool | None
    regex: str | None
    choice: tuple[str, ...] | list[str] | None
    grammar: str | None
    capture: str | tuple[str, ...] | list[str]
    steer: Steer | tuple[Steer, ...] | list[Steer]
    edits: Edit | tuple[Edit, ...] | list[Edit]


class ChatKeywords(SamplingKeywords, total=False):
    """Keywords of `chat`: sampling parameters, and the usual variables of templates.

    Further variables of a template may be passed by name or in `variables`.
    """

    special: bool
    tools: list[Any] | tuple[Any, ...] | None
    documents: list[Any] | tuple[Any, ...] | None
    add_generation_prompt: bool
    continue_final_message: bool
    enable_thinking: bool
    reasoning_effort: str
    variables: Mapping[str, Any]


def completing[F: Callable[..., Any]](names: type) -> Callable[[F], F]:
    """Lists the names of a function's `**keywords` in its signature, for completion by Tab.

    Args:
        names: the `TypedDict` of its keywords.
    """

    def completed(function: F) -> F:
        plain = signature(function)
        *first, rest = plain.parameters.values()
        whole = plain.replace(parameters=[*first, *_keywords(names), rest])
        function.__signature__ = whole  # type: ignore[attr-defined]
        return function

    return completed


@cache
def _keywords(names: type) -> tuple[Parameter, ...]:
    hints = {n: hint for table in names.__mro__ for n, hint in _hints(table).items()}
    kind = Parameter.KEYWORD_ONLY
    return tuple(Parameter(n, kind, default=..., annotation=hint) for n, hint in hints.items())


def _hints(table: type) -> dict[str, Any]:
    hints = getattr(table, "__annotations__", {})
    return {name: getattr(hint, "__forward_arg__", hint) for name, hint in hints.items()}


def is_parameter(name: str) -> bool:
    """Whether a name is that of a parameter, jinfer's or another engine's."""
    return name in PARAMETERS or name in ALIASES


def merged(
    defaults: Mapping[str, Any],
    params: SamplingParams | Mapping[str, Any] | None,
    changes: Mapping[str, Any],
) -> SamplingParams:
    """The parameters of a request.

    Args:
        defaults: the model's, for what the request leaves out; a `SamplingParams` leaves out
            nothing.
        params: the request's.
        changes: keywords over them.

    Raises:
        RequestError: as `SamplingParams`.
    """
    if isinstance(params, SamplingParams):
        return replace(params, **canonical_names(changes)) if changes else params
    values = {**canonical_names(params or {}), **canonical_names(changes)}
    return SamplingParams(**over_defaults(canonical_names(defaults), values))


def over_defaults(defaults: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """A request's values over defaults; a default `min_tokens` gives way to its `max_tokens`."""
    values = {**defaults, **request}
    least, max_tokens = values.get("min_tokens"), request.get("max_tokens")
    if "min_tokens" not in request and isinstance(least, int) and isinstance(max_tokens, int):
        values["min_tokens"] = min(least, max(0, max_tokens))
    return values
