"""In which order the stages of a request's sampler run."""

from __future__ import annotations

from jinfer.sampling.names import RULES, SAMPLERS
from jinfer.sampling.params import SamplingParams

# Those that cut nothing: the only ones before mirostat and FSD, which cut by rules of their own.
_UNCUT = ("penalties", "dry", "temperature")


def chain(params: SamplingParams) -> tuple[str, ...]:
    """The stages that a request needs, in its order; what would change nothing is left out."""
    asked = params.samplers or SAMPLERS
    if params.strategy in ("fsd", "random_fsd"):
        # Where chance chooses FSD one token is left, and what random FSD does else changes nothing.
        after = [name for name in asked if name not in _UNCUT]
        asked = [*(name for name in asked if name in _UNCUT), "fsd"]
        if params.strategy == "random_fsd":
            asked += after
    elif params.mirostat and params.draws:
        kept = asked if params.samplers else _UNCUT
        asked = [*kept, "mirostat"]
    elif not params.draws:
        asked = [name for name in asked if name in ("penalties", "dry")]
    needed = _needed(params)
    return tuple(name for name in (*RULES, *asked) if needed[name])


def _needed(params: SamplingParams) -> dict[str, bool]:
    """Which stages have something to do."""
    window = params.penalty_last_n != 0
    penalties = params.presence_penalty or params.frequency_penalty
    return {
        "bias": bool(params.logit_bias or params.banned_token_ids),
        "bad_words": bool(params.bad_words or params.bad_words_ids),
        "min_tokens": params.min_tokens > 0,
        "penalties": window and bool(penalties or params.repetition_penalty != 1.0),
        "dry": params.dry_multiplier > 0 and params.dry_penalty_last_n != 0,
        "temperature": True,
        "top_n_sigma": params.top_n_sigma > 0,
        "top_k": params.top_k > 0,
        "tfs_z": params.tfs_z < 1.0,
        "typical_p": params.typical_p < 1.0,
        "top_p": params.top_p < 1.0,
        "min_p": params.min_p > 0.0,
        "top_a": params.top_a > 0.0,
        "xtc": params.xtc_probability > 0.0,
        "mirostat": params.mirostat > 0,
        "fsd": True,
    }
