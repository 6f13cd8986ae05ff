"""Where a checkpoint says how it is quantized: keys of config.json, and files of older writers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer.loader.checkpoint import CheckpointError
from jinfer.loader.checkpoint.layouts.quant_layouts import method_of
from jinfer.loader.config.config_json import quant_settings
from jinfer.loader.open_model import open_files
from tests.loader.checkpoint.quantized_cases import CASES

AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}


@pytest.mark.parametrize(
    ("config", "beside", "method"),
    [
        ({}, {}, None),
        ({"quantization": {"group_size": 64, "bits": 4}}, {}, "mlx"),
        ({"quantization_config": {"group_size": 64, "bits": 4}}, {}, "mlx"),
        ({"quantization": "q4"}, {}, CheckpointError),
        ({"quantization_config": {"quant_method": "FBGEMM_FP8"}}, {}, "fbgemm-fp8"),
        ({"quantization_config": {"load_in_8bit": True}}, {}, "bitsandbytes"),
        ({"compression_config": {"config_groups": {}}}, {}, "compressed-tensors"),
        ({}, {"quantize_config.json": {"bits": 4, "sym": True}}, "gptq"),
        ({}, {"quant_config.json": AWQ}, "awq"),
        ({}, {"hf_quant_config.json": MODELOPT}, "modelopt"),
        ({"quantization_config": []}, {}, CheckpointError),
    ],
)
def test_method(
    tmp_path: Path, config: dict[str, Any], beside: dict[str, Any], method: Any
) -> None:
    for name, table in beside.items():
        (tmp_path / name).write_text(json.dumps(table))
    if method is CheckpointError:
        with pytest.raises(CheckpointError, match="is not a table"):
            quant_settings(config, tmp_path / "config.json")
        return
    settings = quant_settings(config, tmp_path / "config.json")
    assert (settings and method_of(settings)) == method


@pytest.mark.parametrize(
    ("name", "file", "said"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "sym": False}),
        ("awq", "quant_config.json", AWQ),
        ("modelopt_nvfp4", "hf_quant_config.json", MODELOPT),
    ],
)
def test_files_of_older_writers(tmp_path: Path, name: str, file: str, said: Any) -> None:
    leaves, weights = CASES[name].write(np.random.default_rng(1), 32, 64)
    save_file({f"m.{leaf}": array for leaf, array in leaves.items()}, tmp_path / "a.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(said))
    tensors = open_files(str(tmp_path), {}).checkpoint.tensors
    assert set(tensors) == {"m.weight"}
    np.testing.assert_allclose(tensors["m.weight"].read(), weights, rtol=1e-5, atol=1e-8)
