"""Cache identity: all that the content of a KV cache block depends on beside its tokens."""

from __future__ import annotations

import hashlib

from jinfer.engine.runner.compiled_programs import CompiledPrograms
from jinfer.engine.runner.program_cache import code_version, surroundings
from jinfer.ops.attention.kv_cache import BLOCK
from jinfer.version import __version__

_FORMAT = 1  # change where the same block would get other bytes
# Packages that read and convert weights, and divide models among devices.
_BESIDE = ("loader", "parallel")


def cache_identity(programs: CompiledPrograms, weights: str) -> str:
    """A digest that is equal only where the same tokens give the same bytes in a block.

    Args:
        weights: what the weights were read from, and how they are stored.
    """
    made_with = (
        *(_FORMAT, BLOCK, __version__, code_version(*_BESIDE), surroundings(), weights),
        *(programs.model.described(), repr(programs.sizes.kv_cache), programs.abstract_rows(1)),
    )
    return hashlib.sha256(repr(made_with).encode()).hexdigest()
