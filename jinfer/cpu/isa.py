"""Instruction sets that kernels are compiled for, and detection of this machine's.

`isa.cc` detects the same once there is a library.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from pathlib import Path
from typing import Literal

type Isa = Literal["portable", "avx2", "avxvnni", "avx512", "avx512bf16", "amx", "neon"]
# Indexed by `Isa` of isa.h.
ISAS: tuple[Isa, ...] = ("portable", "avx2", "avxvnni", "avx512", "avx512bf16", "amx", "neon")
# The set whose kernels a family uses if it has none for this one.
LOWER_ISA: dict[Isa, Isa] = {
    "avxvnni": "avx2",
    "avx512bf16": "avx512",
    "amx": "avx512",
    "neon": "portable",
}

_CPU = Path("/proc/cpuinfo")
# Linux's names of the features that isa.cc checks.
_AVX2_FLAGS = {"avx2", "fma", "f16c", "bmi2"}
_AVX512_FLAGS = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
_BF16_FLAGS = _AVX512_FLAGS | {"avx512_bf16", "avx512vbmi"}
_AMX_FLAGS = _BF16_FLAGS | {"amx_tile", "amx_int8", "amx_bf16"}
_DOT_FLAG = "asimddp"


def own_isa() -> Isa | None:
    """Detects this machine's instruction set; None if it is unknown without the library."""
    try:
        flags = _cpu_flags(_CPU, "Features" if is_arm() else "flags")
    except OSError:
        return None
    if not (is_x86() or is_arm()) or not flags:
        return None
    if is_arm():
        return "neon" if _DOT_FLAG in flags else "portable"
    if not flags >= _AVX2_FLAGS:
        return "portable"
    if flags >= _AMX_FLAGS and _requests_amx():
        return "amx"
    if flags >= _AVX512_FLAGS:
        return "avx512bf16" if flags >= _BF16_FLAGS else "avx512"
    return "avxvnni" if "avx_vnni" in flags else "avx2"


@functools.cache
def _cpu_flags(path: Path, name: str) -> frozenset[str]:
    """Reads the CPU flags of all cores; cached, because weight loading calls it often."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return frozenset(flag for line in lines if line.startswith(name) for flag in line.split())


def _requests_amx() -> bool:
    """Requests AMX from Linux, as each process must: a thread's saved state grows by 8 KiB."""
    if platform.system() != "Linux" or not is_x86():
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18  # of x86-64; ARCH_REQ_XCOMP_PERM
    return ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0


def is_x86() -> bool:
    """Whether this machine is x86-64."""
    return platform.machine().lower() in ("x86_64", "amd64")


def is_arm() -> bool:
    """Whether this machine is 64-bit ARM."""
    return platform.machine().lower() in ("aarch64", "arm64")


def isas() -> tuple[Isa, ...]:
    """Returns the instruction sets that this architecture's compilers support."""
    if is_x86():
        return ("portable", "avx2", "avxvnni", "avx512", "avx512bf16", "amx")
    return ("portable", "neon") if is_arm() else ("portable",)
