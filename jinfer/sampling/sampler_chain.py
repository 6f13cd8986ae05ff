"""In which order the stages of a request's sampler run."""

from __future__ import annotations

from jinfer.ops import sampler_calls
from jinfer.sampling.param_names import SAMPLERS, STAGES
from jinfer.sampling.sampling_params import SamplingParams

# The stages that most requests are content with: where XLA computes them, a program of these alone
# is made in a third of the time. (typical_p comes along with top_p.)
PLAIN = ("rules", "temperature", "top_k", "typical_p", "top_p", "min_p")
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
    if params.dynatemp_range > 0:
        asked = ["dynatemp" if name == "temperature" else name for name in asked]
    needed = _needed(params)
    return tuple(name for name in ("rules", *asked) if needed[name])


def _needed(params: SamplingParams) -> dict[str, bool]:
    """Which stages have something to do."""
    biased = params.logit_bias or params.banned_token_ids
    worded = params.bad_words or params.bad_words_ids
    window = params.penalty_last_n != 0
    penalties = params.presence_penalty or params.frequency_penalty
    return {
        "rules": bool(biased or worded or params.min_tokens),
        "penalties": window and bool(penalties or params.repetition_penalty != 1.0),
        "dry": params.dry_multiplier > 0 and params.dry_penalty_last_n != 0,
        "temperature": True,
        "dynatemp": True,
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


def is_plain(params: SamplingParams) -> bool:
    """Whether a program of the `PLAIN` stages is enough for a request."""
    return set(chain(params)) <= set(PLAIN)


def stage_sets() -> tuple[tuple[str, ...], ...]:
    """The stages that programs are made with: those of plain requests first, all of them last."""
    return (STAGES,) if sampler_calls.available() else (PLAIN, STAGES)
