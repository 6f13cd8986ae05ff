"""Sampling keywords: the types of sampling parameters that are given as keywords."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from jinfer.sampling.activation_edits import Edit, Steer
from jinfer.sampling.sampling_params import Processor
from jinfer.sampling.strategies import Strategy


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
