"""Damaged safetensors files are read or refused, never worse."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jinfer.loader.checkpoint.safetensors import open_safetensors

from .fuzzing import EXAMPLES, fuzz


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_files(tmp_path: Path, examples: int) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b.weight": np.ones((2, 2, 2), ml_dtypes.bfloat16),
        "c": np.array([True, False]),
        "empty": np.zeros((0, 4), np.int64),
        "scalar": np.array(3, np.int64),
    }
    seeds = [
        safetensors.numpy.save(arrays, {"format": "np"}),
        safetensors.numpy.save({"only": np.arange(5, dtype=np.uint8)}),
        safetensors.numpy.save({}),
    ]
    fuzz(open_safetensors, seeds, tmp_path, examples)
