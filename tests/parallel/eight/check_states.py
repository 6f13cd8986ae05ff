"""Recurrent states on several devices: a hybrid in stages of two devices, with drafts."""

from pathlib import Path
from typing import Any

import pytest

from jinfer import LLM
from tests.engine.hybrid import MANY, check_company, write_hybrid


@pytest.mark.parametrize("devices", ["0&1;2&3", pytest.param("0;1;2", marks=pytest.mark.soak)])
def test_hybrid(tmp_path: Path, devices: str) -> None:
    spec = write_hybrid(tmp_path)
    # Shards are added in another order; activations in 8 bits would make steps of such last bits.
    bits: dict[str, Any] = {"quantization": {"weights": "q4", "activations": "float"}}
    split: dict[str, Any] = {
        "partition.devices": devices,
        "engine.prefill_chunk": 64,
        "engine.mixed_chunk": 32,
    }
    with LLM(spec, **bits) as one, LLM(spec, **bits, **MANY, **split) as many:
        check_company(one, many)
