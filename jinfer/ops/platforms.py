"""JAX platform selection ($JAX_PLATFORMS): starting XLA, and clear errors if it fails."""

from __future__ import annotations

import os
from difflib import get_close_matches

import jax

from jinfer.ops.disable_kernels import SwitchError
from jinfer.sandbox.process_limits import check_process_limits
from jinfer.startup.thread_priority import at_usual_priority

PLATFORMS_VARIABLE = "JAX_PLATFORMS"
_KNOWN = ("cpu", "cuda", "rocm", "tpu")
_INSTALL = {
    "cuda": "for NVIDIA's GPUs: pip install 'jinfer[cuda]'; ",
    "gpu": "for NVIDIA's GPUs: pip install 'jinfer[cuda]'; ",
    "rocm": "for AMD's GPUs install JAX's plugin for ROCm; ",
    "tpu": "for TPUs: pip install 'jax[tpu]'; ",
}


def start() -> None:
    """Starts XLA on the requested platform.

    Raises:
        SwitchError: JAX does not find the platform.
        LimitError: system limits of this process are too low.
    """
    check_process_limits()
    try:
        at_usual_priority(jax.local_devices)
    except (RuntimeError, AssertionError) as error:  # the latter from a missing plugin
        if asked := os.environ.get(PLATFORMS_VARIABLE, ""):
            raise SwitchError(f"{PLATFORMS_VARIABLE}={asked}: {_reason(asked)}") from error
        raise


def _reason(asked: str) -> str:
    word = asked.partition(",")[0].strip().lower()
    if word in _INSTALL:
        return f"JAX finds no {word} here; {_INSTALL[word]}without it JAX takes what there is"
    near = get_close_matches(word, _KNOWN, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"JAX knows no platform {word!r}; {hint}there are: {', '.join(_KNOWN)}"
