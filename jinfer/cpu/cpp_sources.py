"""What the compiler is given of the custom calls, and with which flags.

Most files are put together: to read the headers of XLA and of a processor's instructions takes
longer than to compile what many of them do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility-inlines-hidden", "-fno-math-errno", "-w")
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vbmi", "-mprefer-vector-width=512")
# Of the files whose names end so.
ISA_FLAGS = {
    "_portable": (),
    "_avx2": _AVX2,
    "_avxvnni": _AVX2,
    "_avx512": (*_AVX512, "-mprefer-vector-width=512"),
    "_avx512bf16": _BF16,
    "_amx": (*_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    "_neon": ("-march=armv8.2-a+dotprod",),
}
# Of what reads XLA's headers and calls kernels: -O2 takes half as long again, and gives nothing.
HANDLER_FLAGS = ("-O1",)
_LOOPS = ("read_bandwidth", "repack_gguf")  # for any processor; they read no such header
_TOGETHER = (("attention", "dense"), ("sample", "rowwise"))  # kernels for the same instructions


@dataclass(frozen=True)
class Unit:
    """A file for the compiler.

    Attributes:
        name: without an ending.
        paths: the files that it is made of.
        flags: of its own, beside `FLAGS`.
    """

    name: str
    paths: tuple[Path, ...]
    flags: tuple[str, ...] = ()

    @property
    def needs(self) -> int:
        """What of a processor, as its place in `ISA_FLAGS`; -1: nothing."""
        isas = [number for number, end in enumerate(ISA_FLAGS) if self.name.endswith(end)]
        return isas[0] if isas else -1

    def write(self, folder: Path) -> Path:
        """The file; one of several is written to a folder."""
        if len(self.paths) == 1:
            return self.paths[0]
        unit = folder / f"{self.name}.cc"
        lines = [f'#include "{path.parent.name}/{path.name}"\n' for path in self.paths]
        unit.write_text("".join(lines), encoding="utf-8")
        return unit


def units(sources: Iterable[Path]) -> list[Unit]:
    """Those of the files in `sources`, the slowest first: nothing else waits for it at the end.

    Two families of kernels for the same instructions are a file, products with quantized matrices,
    which take longest, one by themselves; handlers are two, for two cores.
    """
    left = {path.stem: path for path in sources}

    def take(name: str, stems: Iterable[str], flags: tuple[str, ...]) -> list[Unit]:
        paths = tuple(left.pop(stem) for stem in [*stems] if stem in left)
        return [Unit(name, paths, flags)] if paths else []

    found: list[Unit] = []
    for end, flags in ISA_FLAGS.items():
        for families in _TOGETHER:
            name = "_".join((*families, end[1:]))
            found += take(name, [f"{family}{end}" for family in families], flags)
        for stem in [stem for stem in left if stem.endswith(end)]:
            found += take(stem, [stem], flags)
    for stem in _LOOPS:
        found += take(stem, [stem], ())
    for number, stems in enumerate(([*left][::2], [*left][1::2]), start=1):
        found += take(f"handlers_{number}", stems, HANDLER_FLAGS)
    slowest = ("linear", "attention", "handlers")
    place = {start: number for number, start in enumerate(slowest)}
    return sorted(found, key=lambda unit: place.get(unit.name.partition("_")[0], len(slowest)))
