"""Sampler chain: a request's samplers in their order, and the programs that support them."""

from __future__ import annotations

from jinfer.ops import sampler_calls
from jinfer.sampling.samplers import COMMON, SAMPLER_NAMES, SAMPLERS, SELECTABLE
from jinfer.sampling.sampling_params import SamplingParams

# Those that cut nothing: the only ones before mirostat and FSD, which cut by rules of their own.
_UNCUT = ("penalties", "dry", "temperature")
_ACTIVE = {sampler.name: sampler.active for sampler in SAMPLERS}


def chain(params: SamplingParams) -> tuple[str, ...]:
    """Returns the samplers that a request needs, in its order, without ineffective samplers."""
    names = params.samplers or SELECTABLE
    if params.strategy in ("fsd", "random_fsd"):
        # FSD leaves one token; where random FSD draws instead, the filters after it apply.
        after = [name for name in names if name not in _UNCUT]
        names = [*(name for name in names if name in _UNCUT), "fsd"]
        if params.strategy == "random_fsd":
            names += after
    elif params.mirostat and params.draws:
        names = [*(names if params.samplers else _UNCUT), "mirostat"]
    elif not params.draws:
        names = [name for name in names if name in ("penalties", "dry")]
    if params.dynatemp_range > 0:
        names = ["dynatemp" if name == "temperature" else name for name in names]
    return tuple(name for name in ("rules", *names) if _ACTIVE[name](params))


def sampler_sets() -> tuple[tuple[str, ...], ...]:
    """Returns the samplers of the compiled programs: the most used first, the last has all.

    On a CPU the first has the samplers that the custom call supports. XLA's operations sample
    batches with a request that needs another sampler.
    """
    known = sampler_calls.layout().samplers if sampler_calls.available() else COMMON
    first = tuple(name for name in SAMPLER_NAMES if name in known)
    return (SAMPLER_NAMES,) if first == SAMPLER_NAMES else (first, SAMPLER_NAMES)


def is_plain(params: SamplingParams) -> bool:
    """Whether the samplers of the first program are enough for a request."""
    return set(chain(params)) <= set(sampler_sets()[0])
