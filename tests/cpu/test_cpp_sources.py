"""C++ sources: translation units and their flags."""

import re
from pathlib import Path

import pytest

from jinfer import quant_format
from jinfer.cpu import build_library
from jinfer.cpu.cpp_sources import HANDLER_FLAGS, ISA_FLAGS, SRC, Unit, source_bytes, units
from jinfer.cpu.isa import Isa


@pytest.mark.parametrize("only", [None, "portable", "avx2", "avxvnni", "amx"])
def test_every_file_is_in_one_unit(only: Isa | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_library, "is_x86", lambda: True)
    sources = build_library._sources(only)
    found = units(sources)
    assert sorted(path for unit in found for path in unit.paths) == sources
    assert len({unit.name for unit in found}) == len(found) < len(sources)
    assert found[0].name.startswith("linear_")


def test_files_have_the_flags_of_their_names() -> None:
    for unit in units(build_library._sources()):
        ends = {f"_{path.stem.rpartition('_')[2]}" for path in unit.paths}
        if ends & set(ISA_FLAGS):
            (end,) = ends
            assert unit.flags == ISA_FLAGS[end]
        elif unit.name.startswith("handlers"):
            assert unit.flags == HANDLER_FLAGS
        else:
            assert b"xla/" not in source_bytes(unit.paths[0])


def test_generated_files_are_written(tmp_path: Path) -> None:
    one, two = tmp_path / "one" / "a.cc", tmp_path / "two" / "b.cc"
    assert Unit("alone", (one,)).write(tmp_path) == one
    made = Unit("both", (one, two)).write(tmp_path)
    assert made.read_text() == '#include "one/a.cc"\n#include "two/b.cc"\n'


def test_kernels_without_a_file_are_generated(tmp_path: Path) -> None:
    path = SRC / "sample" / "sample_avx2.cc"
    made = Unit("sample_avx2", (path,)).write(tmp_path).read_bytes()
    assert made == source_bytes(path)
    assert made.startswith(b'#include "sample/sample_kernels.h"\n')
    assert b"jinfer::sample_avx2()" in made


def test_widths_are_those_of_the_formats() -> None:
    text = (SRC / "common" / "code_widths.h").read_text().replace("kThreeAndAHalf", "7")
    table = text.partition("kWidths[] = {")[2].partition("};")[0]
    rows = [tuple(map(int, row)) for row in re.findall(r"{(\d+), (\d+), (\d+)}", table)]
    assert rows == list(quant_format._WIDTHS.values())
