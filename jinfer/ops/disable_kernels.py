"""What may be turned off from outside, to find out whether it is to blame."""

import os
from typing import Literal, get_args

type Kernels = Literal["products", "attention", "experts", "sampling"]

OFF = "JINFER_NO_KERNELS"
_KNOWN: tuple[Kernels, ...] = get_args(Kernels.__value__)


class SwitchError(ValueError):
    """An environment variable has a word that it does not know."""


def kernels(which: Kernels) -> bool:
    """Whether a GPU's kernels of a kind may be used; where they may not, XLA computes.

    Raises:
        SwitchError: see `turned_off`.
    """
    return which not in turned_off()


def turned_off() -> frozenset[str]:
    """The kinds that $JINFER_NO_KERNELS names, with commas between; "1" or "all": all of them.

    Raises:
        SwitchError: it has another word.
    """
    given = os.environ.get(OFF, "").strip()
    if given in ("", "0"):
        return frozenset()
    if given in ("1", "all"):
        return frozenset(_KNOWN)
    words = [word.strip() for word in given.split(",")]
    for word in words:
        if word not in _KNOWN:
            known = f"1, all, or some of {', '.join(_KNOWN)}"
            raise SwitchError(f"{OFF}: there are no kernels {word!r}; give {known}")
    return frozenset(words)
