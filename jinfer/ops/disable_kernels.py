"""Kernel switches ($JINFER_NO_KERNELS): turn GPU kernels off, for debugging."""

import os
from typing import Literal, get_args

type KernelKind = Literal["products", "attention", "experts", "sampling"]

NO_KERNELS_VARIABLE = "JINFER_NO_KERNELS"
_KNOWN: tuple[KernelKind, ...] = get_args(KernelKind.__value__)


class SwitchError(ValueError):
    """An environment variable has an unknown value."""


def kernels_enabled(which: KernelKind) -> bool:
    """Whether GPU kernels of this kind are enabled; if not, XLA computes.

    Raises:
        SwitchError: see `disabled_kernels`.
    """
    return which not in disabled_kernels()


def disabled_kernels() -> frozenset[str]:
    """Returns the kinds listed in $JINFER_NO_KERNELS, comma-separated; "1" or "all": all kinds.

    Raises:
        SwitchError: the value is unknown.
    """
    setting = os.environ.get(NO_KERNELS_VARIABLE, "").strip()
    if setting in ("", "0"):
        return frozenset()
    if setting in ("1", "all"):
        return frozenset(_KNOWN)
    words = [word.strip() for word in setting.split(",")]
    for word in words:
        if word not in _KNOWN:
            known = f"1, all, or some of {', '.join(_KNOWN)}"
            raise SwitchError(f"{NO_KERNELS_VARIABLE}: there are no kernels {word!r}; give {known}")
    return frozenset(words)
