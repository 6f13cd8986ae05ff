"""Sampler chain: a request's stages in their order, and the programs that support them."""

from __future__ import annotations

from jinfer.ops import sampler_calls
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.sampling.stages import COMMON, SAMPLERS, STAGES, TABLE

# Those that cut nothing: the only ones before mirostat and FSD, which cut by rules of their own.
_UNCUT = ("penalties", "dry", "temperature")
_ACTIVE = {stage.name: stage.active for stage in TABLE}


def chain(params: SamplingParams) -> tuple[str, ...]:
    """Returns the stages that a request needs, in its order, without ineffective stages."""
    names = params.samplers or SAMPLERS
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


def stage_sets() -> tuple[tuple[str, ...], ...]:
    """Returns the stages of the compiled programs: the most used first, the last has all.

    On a CPU the first has the stages that the custom call supports. XLA's operations sample batches
    with a request that needs another stage.
    """
    known = sampler_calls.layout().stages if sampler_calls.available() else COMMON
    first = tuple(name for name in STAGES if name in known)
    return (STAGES,) if first == STAGES else (first, STAGES)


def is_plain(params: SamplingParams) -> bool:
    """Whether the stages of the first program are enough for a request."""
    return set(chain(params)) <= set(stage_sets()[0])
