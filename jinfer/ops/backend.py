"""Target platform of the code being traced; one process may compile for several."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from typing import TYPE_CHECKING

import jax

from jinfer.cpu import build_library
from jinfer.ops.disable_kernels import KernelKind, SwitchError, kernels_enabled
from jinfer.sandbox.process_limits import check_process_limits
from jinfer.startup import at_usual_priority

if TYPE_CHECKING:
    from kernels_pallas import Backend

# A target in addition to JAX's platforms: XLA's operations on any of them, all differentiable.
DIFFERENTIABLE = "differentiable"

_TARGET: ContextVar[str | None] = ContextVar("target", default=None)
_INTERPRETED: ContextVar[bool] = ContextVar("interpreted", default=False)


def backend() -> str:
    """The target platform by JAX's name, such as "cpu" or "gpu"; or `DIFFERENTIABLE`."""
    return _TARGET.get() or jax.default_backend()


def needs_derivatives() -> bool:
    """Whether code traced here must be differentiable."""
    return backend() == DIFFERENTIABLE


def has_cpu_calls() -> bool:
    """Whether code traced here can use the CPU's custom calls; compiles them the first time."""
    return backend() == "cpu" and build_library.available()


def selected_backend() -> Backend:
    """How GPU kernels are compiled: by Triton-style Pallas while JAX has it, else by XLA.

    JAX has deprecated its Triton-style back end. Once it is gone, XLA computes what the kernels do.
    """
    # Imported lazily: Pallas is slow to import and only a GPU needs it.
    from kernels_pallas.triton_ops import DEFAULT

    return DEFAULT


def has_triton_kernels(which: KernelKind) -> bool:
    """Whether code traced here can use the Triton-style kernels of a kind."""
    return backend() == "gpu" and kernels_enabled(which) and selected_backend() == "triton"


def fuses_prologue() -> bool:
    """Whether operations before a matmul are fused into its prologue kernel."""
    return has_triton_kernels("products")


def interpreted() -> bool:
    """Whether GPU kernels run in Pallas' interpret mode: slowly, without a GPU."""
    return _INTERPRETED.get()


@contextmanager
def target_platform(platform: str, *, interpret: bool = False) -> Iterator[None]:
    """Code that this thread traces within the context targets the given platform.

    Args:
        platform: by JAX's name, or `DIFFERENTIABLE`.
        interpret: run GPU kernels in interpret mode.
    """
    tokens = _TARGET.set(platform), _INTERPRETED.set(interpret)
    try:
        yield
    finally:
        _TARGET.reset(tokens[0])
        _INTERPRETED.reset(tokens[1])


PLATFORMS_VARIABLE = "JAX_PLATFORMS"
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
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
        if platforms := os.environ.get(PLATFORMS_VARIABLE, ""):
            raise SwitchError(f"{PLATFORMS_VARIABLE}={platforms}: {_reason(platforms)}") from error
        raise


def _reason(platforms: str) -> str:
    word = platforms.partition(",")[0].strip().lower()
    if word in _INSTALL:
        return f"JAX finds no {word} here; {_INSTALL[word]}without it JAX takes what there is"
    near = get_close_matches(word, _PLATFORMS, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"JAX knows no platform {word!r}; {hint}there are: {', '.join(_PLATFORMS)}"
