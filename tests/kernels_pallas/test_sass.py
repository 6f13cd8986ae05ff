"""Machine code for an H200, compiled without one: `pip install .[sass]`, then `make soak`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from jinfer.loader.weights.gguf_blocks import REPACKED_FORMATS as GGUF
from jinfer.quant_format import FORMATS
from tests.kernels_pallas.sass import instructions, name_of, tools
from tests.kernels_pallas.targets import compiled_targets

NAMES = [target.name for target in compiled_targets()]
# Instructions of a thread for a weight. The memory would allow 2.6 at 2 bits, 3.9 at 3.5 bits and
# 4.3 at 4 bits; 2.3 for Q2_K, 3.0 for Q3_K, 3.9 for Q4_K, 5.6 for Q6_K, 3.6 and 3.9 for the last
# two.
BUDGET = {"q2": 2.2, "q3": 2.5, "q3.5": 3.1, "q4": 2.3, "q5": 3.2, "q6": 3.2, "q8": 2.7}
BUDGET |= {"Q2_K": 2.8, "Q3_K": 2.9, "Q4_K": 2.6, "Q6_K": 3.4, "IQ4_XS": 3.9, "MXFP4": 3.2}
# The same for a number of keys and values, of which 16 rows of queries take no more than one does;
# about 1.2 of them write a split's sums, which most rounds of the loop pass over.
ATTENTION_BUDGET = {"plain": 4.3, "codes": 7.2}


def test_longest_loop_is_found() -> None:
    head = "/*0000*/ MOV R1, R2;\n.L_x_0:\n"
    body = "".join(f"/*{i:04x}*/ @P0 IADD3 R1, R2, {i};\n" for i in range(1, 30))
    tail = "/*0100*/ @!P1 BRA `(.L_x_0);\n/*0110*/ EXIT;\n"
    found = instructions(head + body + tail)
    assert len(found) == 30
    assert name_of(found[0]) == "IADD3"
    assert instructions("/*0000*/ EXIT;") == ["EXIT"]


@pytest.mark.soak
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None or tools() is None,
    reason="pip install .[sass]",
)
@pytest.mark.parametrize("name", NAMES)
def test_code(name: str) -> None:
    program = [sys.executable, "-W", "ignore", "-m", "tests.kernels_pallas.sass", name]
    out = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    codes: list[dict[str, Any]] = json.loads(out.splitlines()[-1])[name]
    assert all(code["spilled"] == 0 for code in codes)
    kind, width, *rest = name.split("-")
    assert all(code["early"] for code in codes)
    # Here pools are not given away, so they are copied once; `test_programs` has them in place.
    assert kind == "entering" or all(code["copies"] == [] for code in codes)
    width = width.partition("_")[0] if width not in GGUF else width
    if kind in ("rows", "entering", "whole", "thresholds"):
        code = codes[0]
        assert len(codes) == (9 if kind == "thresholds" else 1)
        wide = "LDG.E.64" if name == "whole-q3.5" else "LDG.E.128"  # half as many columns
        assert any(wide in op for op in code["counts"])
        return
    kernels = [code for code in codes if not code["name"].startswith(("merge", "prepare"))]
    # Of 256 numbers registers hold few rows only, so that long runs take no call of their own.
    long = bool({"128", "512", "alone"} & set(rest[:1])) and rest[1:] != ["256"]
    parts = kind.endswith("attention") and long
    assert len(kernels) == (2 if parts else 1)
    for code in kernels:
        check(code, kind, width, rest)


def check(code: dict[str, Any], kind: str, width: str, rest: list[str]) -> None:
    """The kernel uses tensor cores and wide loads, and its loop is short."""
    counts = code["counts"]
    if width != "f32":
        assert any(op.startswith(("HGMMA", "HMMA")) for op in counts)
    if kind == "attention" and width != "f32":  # one instruction for every tile: one order of sums
        assert not any(op.startswith("HGMMA") for op in counts)
    if kind == "attention" and width in FORMATS:  # words are copied while others are used
        assert any(op.startswith("LDGSTS.E") for op in counts), counts
    else:
        assert any(op.startswith("LDGSTS.E.BYPASS.128") or "LDG.E.128" in op for op in counts)
    if kind == "triton" and rest == ["1"]:
        # Of a superblock of 1,024 weights a warp has 16 rows.
        assert code["loop"] * 32 / (16 * 1024) < BUDGET[width]
    if kind == "attention" and rest == ["1", "128"] and width != "f32":
        # 128 threads, 64 keys and values
        budget = ATTENTION_BUDGET["codes" if width in FORMATS else "plain"]
        assert code["loop"] * 128 / (2 * 64 * 128) < budget
