"""jinfer's own programs, compiled for an H200 without one: see `programs`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.kernels_pallas.programs import NAMES, largest_copy, thunks

# Kernels of a layer, at most, by the format of its weights: of a step that decodes 1 sequence, of
# one that decodes 16, of a prompt of 512 tokens: its products are three kernels each, or more.
_PACKED = {"decode-1": 12, "decode-16": 12, "prompt-512": 22}
MOST = dict.fromkeys(("q4", "q3.5", "q8", "Q4_K"), _PACKED)
_MIB = 1 << 20

LISTING = """\
000: kCommandBuffer [source       | next=003 (1)] 
    001: kCopy         [source | sink] kCopy
    002: kCustomKernel [source | sink] loop_fusion_4 grid: [1, 1, 1] threads: [8, 1, 1]
003: kWhile         [prev=000 (1) | sink        ]   
condition:
    004: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source       | next=005 (1)] 
        005: kCustomKernel [source | next=006 (1) ] loop_fusion grid: [1, 1, 1] threads: [1, 1, 1]
        006: kCustomKernel [prev=005 (1)  | sink ] packed_product__1 grid: [1, 1, 1]
"""  # noqa: W291


def test_thunks_are_counted() -> None:
    found = thunks(LISTING)
    assert found.kernels == {
        "kCopy": 1,
        "loop_fusion": 2,
        "loop_and_fusion": 1,
        "packed_product": 1,
    }
    assert (found.loops, found.alone) == (1, 1)


def test_the_largest_copy_is_found() -> None:
    hlo = """
    %copy.1 = bf16[4,8]{1,0} copy(%a)
    %b = f32[1000,8]{1,0} fusion(%copy.1), kind=kLoop
    %copy.2 = f16[4,8,2]{1,0,2:T(8)} copy(%a)
    """
    assert largest_copy(hlo) == 128


@pytest.mark.soak
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="pip install .[sass]"
)
@pytest.mark.parametrize("name", NAMES)
def test_program(name: str) -> None:
    program = [sys.executable, "-W", "ignore", "-m", "tests.kernels_pallas.programs", "--json"]
    out = subprocess.run([*program, name], capture_output=True, text=True, check=True).stdout
    counts: dict[str, Any] = json.loads(out.splitlines()[-1])[name]
    kind, _, format = name.rpartition("-")
    assert counts["kernels"] <= MOST[format][kind], counts["named"]
    assert counts["loops"] == 0
    assert counts["alone"] == 0, "kernels outside of command buffers"
    assert counts["kept"], "the cache is copied"
    assert counts["added"] < _MIB, "memory for each layer"
    assert counts["copied"] < 16 * _MIB, "a copy as large as a weight"
