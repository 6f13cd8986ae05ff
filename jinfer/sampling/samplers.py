"""Samplers (transformers' logits processors) and decoding strategies: the tables of both.

A new sampler is a row here, a function of logits and `SamplerContext` in a module of this package,
and fields in `sampling_params.py`. Nothing here imports JAX, because the command line reads this
table too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

NOT_FINITE = -2  # in place of a token: a logit is NaN or +inf, so there is none


@dataclass(frozen=True)
class Sampler:
    """A row of the table.

    Attributes:
        name: as `SamplingParams.samplers` has it.
        function: module and name of its function in `jinfer.sampling`. Samplers may share one,
            which is then compiled once.
        active: whether it would change anything, given a request's `SamplingParams`.
        aliases: other engines' names, separated by spaces.
        filters: whether it drops tokens: a request with such a sampler draws from what is left.
        fixed: whether `samplers` cannot name it.
    """

    name: str
    function: str
    active: Callable[[Any], bool]
    aliases: str = ""
    filters: bool = False
    fixed: bool = False


def _filter(name: str, function: str, active: Callable[[Any], bool], aliases: str = "") -> Sampler:
    return Sampler(name, f"truncation.{function}", active, aliases, filters=True)


def _has_rules(p: Any) -> bool:
    lists = p.logit_bias, p.banned_token_ids, p.bad_words, p.bad_words_ids
    return any(lists) or p.min_tokens > 0


def _penalizes(p: Any) -> bool:
    penalty = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
    return p.penalty_last_n != 0 and bool(penalty)


def _always(p: Any) -> bool:
    return True


# In the order that holds where a request does not choose another. The rules (bias, bad words,
# min_tokens) always come first. Penalties see the model's own logits. The temperature comes before
# the filters, as in vLLM and transformers, so that top_p is a share of what is drawn from; the
# filters follow one another as in llama.cpp. The last two decide by what all others left.
SAMPLERS = (
    Sampler("rules", "penalties.rules", _has_rules, fixed=True),
    Sampler("penalties", "penalties.penalties", _penalizes, "penalty"),
    Sampler("dry", "penalties.dry", lambda p: p.dry_multiplier > 0 and p.dry_penalty_last_n != 0),
    Sampler("temperature", "truncation.temperature", _always, "temp temp_ext dynatemp"),
    Sampler("dynatemp", "truncation.dynatemp", _always, fixed=True),
    _filter("top_n_sigma", "top_n_sigma", lambda p: p.top_n_sigma > 0),
    _filter("top_k", "top_k_top_p", lambda p: p.top_k > 0),
    _filter("tfs_z", "tfs_z", lambda p: p.tfs_z < 1, "tfs"),
    _filter("typical_p", "top_k_top_p", lambda p: p.typical_p < 1, "typ_p typ typical"),
    _filter("top_p", "top_k_top_p", lambda p: p.top_p < 1, "nucleus"),
    _filter("min_p", "min_p_top_a", lambda p: p.min_p > 0),
    _filter("top_a", "min_p_top_a", lambda p: p.top_a > 0),
    _filter("xtc", "xtc", lambda p: p.xtc_probability > 0),
    Sampler("mirostat", "truncation.mirostat", lambda p: p.mirostat > 0, filters=True, fixed=True),
    Sampler("fsd", "fsd.fsd", _always, fixed=True),
)

SAMPLER_NAMES = tuple(sampler.name for sampler in SAMPLERS)
SELECTABLE = tuple(sampler.name for sampler in SAMPLERS if not sampler.fixed)
FILTERS = tuple(sampler for sampler in SAMPLERS if sampler.filters)
# The samplers of most requests. Where XLA computes them, a program of these alone compiles in a
# third of the time. (typical_p shares the function of top_p.)
COMMON = ("rules", "temperature", "top_k", "typical_p", "top_p", "min_p")

_ALIASES = {alias: sampler.name for sampler in SAMPLERS for alias in sampler.aliases.split()}


def sampler_name(name: str) -> str:
    """jinfer's name of a sampler; llama.cpp writes some with hyphens."""
    plain = name.replace("-", "_")
    return _ALIASES.get(plain, plain)


Strategy = Literal[
    "auto",
    "greedy",
    "sample",
    "top_k",
    "top_p",
    "min_p",
    "typical",
    "tfs",
    "top_a",
    "top_n_sigma",
    "xtc",
    "mirostat",
    "fsd",
    "random_fsd",
    "contrastive",
    "beam",
]
# Deterministic strategies.
DETERMINISTIC = ("greedy", "fsd", "contrastive", "beam")

# Defaults that a strategy sets. The numbers are Inferflow's where it has
# the strategy; top_a is KoboldAI's, top_n_sigma and xtc are their authors'.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "top_k": {"top_k": 8},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "typical": {"typical_p": 0.95},
    "tfs": {"tfs_z": 0.95},
    "top_a": {"top_a": 0.2},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "xtc": {"xtc_probability": 0.5},
    "mirostat": {"mirostat": 2},
    "random_fsd": {"top_p": 0.93, "top_k": 8},
    "contrastive": {"top_k": 4},
}
_STANDARD = {"top_p": 0.9, "top_k": 8}  # Inferflow's sample.std cuts by both, whichever is first

# Other engines' names of strategies -> jinfer's name, and further defaults.
STRATEGIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "": ("sample", _STANDARD),
    "std": ("sample", _STANDARD),
    "sample.std": ("sample", _STANDARD),
    "sample.greedy": ("greedy", {}),
    "sample.top_k": ("top_k", {}),
    "sample.top_p": ("top_p", _STANDARD),
    "sample.fsd": ("fsd", {}),
    "sample.random_fsd": ("random_fsd", {}),
    "random": ("sample", {}),
    "typical_p": ("typical", {}),
    "tfs_z": ("tfs", {}),
    "mirostat_v2": ("mirostat", {}),
    "contrastive_search": ("contrastive", {}),
    "beam_search": ("beam", {}),
}

# What the authors of FSD chose (arXiv 2305.12675) where Inferflow has other numbers; 0.55 for
# Chinese.
PAPERS_FSD: Mapping[str, Any] = {"fsd_alpha": 0.65, "fsd_k": 3, "fsd_pool": 0}
