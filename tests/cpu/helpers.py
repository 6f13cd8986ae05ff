"""What tests of custom calls share: this machine's instructions, and activation functions."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jinfer.cpu import build_library
from jinfer.cpu.isa import ISAS, Isa

BF16: tuple[Isa, ...] = ("avx512bf16", "amx")  # that multiply bfloat16 with bfloat16


def isas() -> list[Isa]:
    """What this machine can run; of AVX-512 the better of two, as most kernels are the same."""
    found = every_isa()
    return [isa for isa in found if isa != "avx512" or "avx512bf16" not in found]


def every_isa() -> list[Isa]:
    """What this machine can run."""
    return [isa for isa in ISAS if build_library.available() and _runs(isa)]


def _runs(isa: Isa) -> bool:
    with build_library.lowered_isa(isa):
        return build_library.isa() == isa


def copying_compiler(folder: Path) -> str:
    """A compiler that takes no time: what it links is the library that there is."""
    script = folder / "copier"
    script.write_text(
        f"""#!{sys.executable}
import shutil, sys
to = sys.argv[sys.argv.index("-o") + 1]
open(to, "w").close()
if "-shared" in sys.argv:
    shutil.copy({str(build_library.library_path())!r}, to)
"""
    )
    script.chmod(0o700)
    return str(script)


def _gelu_tanh(v: np.ndarray) -> np.ndarray:
    return v / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))


FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda v: v / (1 + np.exp(-v)),
    "gelu_tanh": _gelu_tanh,
    "relu": lambda v: np.maximum(v, 0),
}
