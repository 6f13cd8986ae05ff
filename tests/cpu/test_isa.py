"""What a machine's own account of itself says about instructions."""

import platform
from pathlib import Path

import pytest

from jinfer.cpu import isa as instructions

_AVX512 = "avx2 bmi2 f16c fma avx512f avx512bw avx512vl avx512dq"
_BF16 = f"{_AVX512} avx512_vnni avx512_bf16 avx512vbmi"


@pytest.mark.parametrize(
    ("machine", "flags", "isa"),
    [
        ("x86_64", "flags: sse4_2 avx", "portable"),
        ("x86_64", "flags: avx2 fma f16c", "portable"),
        ("x86_64", "flags: avx2 bmi2 f16c fma", "avx2"),
        ("x86_64", "flags: avx2 bmi2 f16c fma avx_vnni", "avxvnni"),
        ("x86_64", f"flags: {_AVX512}", "avx2"),
        ("AMD64", f"flags: {_AVX512} avx512_vnni amx_int8", "avx512"),
        ("x86_64", f"flags: {_AVX512} avx512_vnni avx512_bf16", "avx512"),
        ("x86_64", f"flags: {_AVX512} avx512_vnni avx512_bf16 avx512vbmi", "avx512bf16"),
        ("x86_64", f"flags: {_AVX512} avx512_bf16 avx512vbmi", "avx2"),
        ("x86_64", f"flags: {_BF16} amx_tile amx_bf16 amx_int8", "amx"),
        ("x86_64", f"flags: {_BF16} amx_tile amx_int8", "avx512bf16"),
        ("x86_64", None, None),
        ("aarch64", "Features: fp asimd fphp asimdhp asimddp", "neon"),
        ("aarch64", "Features: fp asimd", "portable"),
        ("aarch64", f"flags: {_AVX512}", None),  # another machine's, where this one is emulated
        ("arm64", None, None),
        ("riscv64", "flags: avx2 asimddp", None),
    ],
)
def test_the_instructions_of_a_machine(
    machine: str,
    flags: str | None,
    isa: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(instructions, "_CPU", tmp_path / "cpuinfo")
    monkeypatch.setattr(instructions, "_requests_amx", lambda: True)
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"model name\t: avx512f\n{flags}\n")
    assert instructions.own_isa() == isa


def test_denied_tiles_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(instructions, "_CPU", tmp_path / "cpuinfo")
    monkeypatch.setattr(instructions, "_requests_amx", lambda: False)
    (tmp_path / "cpuinfo").write_text(f"flags: {_BF16} amx_tile amx_bf16 amx_int8\n")
    assert instructions.own_isa() == "avx512bf16"


def test_machine_without_tiles_denies_them() -> None:
    known = instructions._CPU.read_text() if instructions._CPU.exists() else ""
    assert instructions._requests_amx() <= ("amx_tile" in known)
