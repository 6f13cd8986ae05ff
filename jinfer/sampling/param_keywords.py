"""Sampling parameters as keywords and as dictionaries, beside `SamplingParams` or over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cached_property
from inspect import Parameter, Signature, signature
from types import MappingProxyType
from typing import Any, Literal, TypedDict, cast

from jinfer.sampling.param_names import PARAMETERS, Strategy, own_names
from jinfer.sampling.sampling_params import SamplingParams


class Sampling(TypedDict, total=False):
    """The fields of `SamplingParams`, each of which may be left out."""

    strategy: Strategy
    samplers: tuple[str, ...] | list[str] | None
    temperature: float | None
    dynatemp_range: float
    dynatemp_exponent: float
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
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop: str | tuple[str, ...] | list[str]
    stop_token_ids: tuple[int, ...] | list[int]
    ignore_eos: bool
    include_stop: bool
    skip_special: bool
    logprobs: int | None
    speculation: bool
    json_schema: str | Mapping[str, Any] | bool | None
    regex: str | None
    choice: tuple[str, ...] | list[str] | None
    grammar: str | None


class ChatKeywords(Sampling, total=False):
    """What `chat` takes beside a conversation: sampling, and what templates commonly know.

    A template's own variables may be given too, by name or in `variables`.
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
    """Gives a function's `**keywords` the names that they may have, which Tab then completes.

    Args:
        names: the `TypedDict` of its keywords.
    """

    def completed(function: F) -> F:
        function.__signature__ = _Completed(function, names)  # type: ignore[attr-defined]
        return function

    return completed


class _Completed(Signature):
    """A signature that is made when somebody looks at it: no start waits for six of 70 names."""

    def __init__(self, function: Any, names: type) -> None:
        self._function, self._names = function, names

    @cached_property
    def _whole(self) -> Signature:
        function = self._function
        del function.__signature__
        own = signature(function)
        *first, rest = own.parameters.values()
        known = {name: hint for each in self._names.__mro__ for name, hint in _hints(each)}
        more = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=..., annotation=hint)
            for name, hint in known.items()
        ]
        function.__signature__ = own.replace(parameters=[*first, *more, rest])
        return cast("Signature", function.__signature__)

    @property
    def parameters(self) -> MappingProxyType[str, Parameter]:
        return self._whole.parameters

    @property
    def return_annotation(self) -> Any:
        return self._whole.return_annotation

    def replace(self, **changes: Any) -> Signature:  # type: ignore[override]
        return self._whole.replace(**changes)


def _hints(table: type) -> Iterator[tuple[str, Any]]:
    for name, hint in getattr(table, "__annotations__", {}).items():
        yield name, getattr(hint, "__forward_arg__", hint)


FIELDS = tuple(field.name for field in fields(SamplingParams))


def is_parameter(name: str) -> bool:
    """Whether a name is that of a parameter, jinfer's or another engine's."""
    return name in FIELDS or name in PARAMETERS


def laid_over(
    defaults: Mapping[str, Any],
    params: SamplingParams | Mapping[str, Any] | None,
    changes: Mapping[str, Any],
) -> SamplingParams:
    """The parameters of a request.

    Args:
        defaults: what holds where a request says nothing; not beside `SamplingParams`, which say
            all there is to say.
        params: the request's.
        changes: over them.

    Raises:
        RequestError: as `SamplingParams`.
    """
    if isinstance(params, SamplingParams):
        return replace(params, **own_names(changes)) if changes else params
    given = {**own_names(params or {}), **own_names(changes)}
    return SamplingParams(**over_defaults(own_names(defaults), given))


def over_defaults(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a request says over what holds otherwise, of which `min_tokens` gives way to a limit."""
    values = {**defaults, **given}
    least, most = values.get("min_tokens"), given.get("max_tokens")
    if "min_tokens" not in given and isinstance(least, int) and isinstance(most, int):
        values["min_tokens"] = min(least, max(0, most))
    return values
