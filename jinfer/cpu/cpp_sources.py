"""C++ sources of the custom calls: translation units, and the compiler flags of each.

Most files share a unit with others, since reading XLA's headers and those of a processor's
instructions takes longer than compiling many of the files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jinfer.disk_cache import content_of, files_below

SRC = Path(__file__).parent / "src"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility-inlines-hidden", "-fno-math-errno", "-w")
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vbmi", "-mprefer-vector-width=512")
# By the end of a file's name, its instruction set.
ISA_FLAGS = {
    "_portable": (),
    "_avx2": _AVX2,
    "_avxvnni": _AVX2,
    "_avx512": (*_AVX512, "-mprefer-vector-width=512"),
    "_avx512bf16": _BF16,
    "_amx": (*_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    "_neon": ("-march=armv8.2-a+dotprod",),
}
# For code that reads XLA's headers and calls kernels: -O2 compiles longer and gains nothing.
HANDLER_FLAGS = ("-O1",)
_WITHOUT_XLA = ("read_bandwidth", "repack_gguf")  # portable loops that include no XLA headers
# Families that share a unit per ISA.
_TOGETHER = (("attention", "dense"), ("sample", "rowwise", "lora"))
# Families of which only `<family>_kernels.h` is compiled for an instruction set.
_GENERATED = ("attention", "dense", "lora", "recurrence", "rowwise", "sample")
_GENERATED_ISAS = ("portable", "avx2", "avx512")


def _generated(family: str, isa: str) -> str:
    name = family.capitalize()
    return (
        f'#include "{family}/{family}_kernels.h"\n'
        f"const jinfer::{name}Kernels& jinfer::{family}_{isa}() {{ return jinfer::k{name}; }}\n"
    )


# Path -> text of the generated files.
GENERATED = {
    SRC / family / f"{family}_{isa}.cc": _generated(family, isa)
    for family in _GENERATED
    for isa in _GENERATED_ISAS
}


def all_sources() -> list[Path]:
    """Lists every `*.cc`, handwritten or generated, sorted."""
    return sorted([*map(Path, files_below(SRC, ".cc")), *GENERATED])


def source_bytes(path: Path) -> bytes:
    """Reads a source."""
    text = GENERATED.get(path)
    return content_of(path) if text is None else text.encode()


@dataclass(frozen=True)
class Unit:
    """A translation unit.

    Attributes:
        name: name without an ending.
        paths: the included sources.
        flags: compiler flags of this unit, in addition to `FLAGS`.
    """

    name: str
    paths: tuple[Path, ...]
    flags: tuple[str, ...] = ()

    @property
    def isa_rank(self) -> int:
        """Position of the unit's instruction set in `ISA_FLAGS`; -1: any processor's."""
        ranks = [rank for rank, end in enumerate(ISA_FLAGS) if self.name.endswith(end)]
        return ranks[0] if ranks else -1

    def write(self, folder: Path) -> Path:
        """Returns the file to compile, written to `folder` unless it is one handwritten source."""
        if len(self.paths) == 1 and self.paths[0] not in GENERATED:
            return self.paths[0]
        unit = folder / f"{self.name}.cc"
        unit.write_text("".join(map(_part, self.paths)), encoding="utf-8")
        return unit


def _part(path: Path) -> str:
    return GENERATED.get(path) or f'#include "{path.parent.name}/{path.name}"\n'


def units(sources: Iterable[Path]) -> list[Unit]:
    """Returns translation units of `sources`, slowest first, to keep all cores busy.

    Some families of kernels for one instruction set share a unit. Quantized products, the slowest
    to compile, have one for themselves. Handlers are split into two, for two cores.
    """
    left = {path.stem: path for path in sources}

    def take(name: str, stems: Iterable[str], flags: tuple[str, ...]) -> list[Unit]:
        paths = tuple(left.pop(stem) for stem in [*stems] if stem in left)
        return [Unit(name, paths, flags)] if paths else []

    made: list[Unit] = []
    for end, flags in ISA_FLAGS.items():
        for families in _TOGETHER:
            name = "_".join((*families, end[1:]))
            made += take(name, [f"{family}{end}" for family in families], flags)
        for stem in [stem for stem in left if stem.endswith(end)]:
            made += take(stem, [stem], flags)
    for stem in _WITHOUT_XLA:
        made += take(stem, [stem], ())
    for number, stems in enumerate(([*left][::2], [*left][1::2]), start=1):
        made += take(f"handlers_{number}", stems, HANDLER_FLAGS)
    slowest = ("linear", "attention", "handlers")
    order = {start: number for number, start in enumerate(slowest)}
    return sorted(made, key=lambda unit: order.get(unit.name.partition("_")[0], len(slowest)))
