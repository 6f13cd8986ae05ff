"""Quantization config of a checkpoint: where its writer says how weights are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinfer.checkpoint.checkpoint_reader import CheckpointError
from jinfer.checkpoint.layouts.quant_settings import QuantSettings
from jinfer.opening.config_json import config_path, read_json
from jinfer.sandbox.safe_files import path_exists

# Keys of config.json; "quantization" is MLX's, which may have its table twice.
CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
# Files of older writers, and the method that they are of.
_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}


def quant_settings(config: Mapping[str, Any], weights: Path) -> QuantSettings | None:
    """What a checkpoint says of its quantization; None if it says nothing.

    Args:
        config: its config.json.
        weights: its folder or file.

    Raises:
        CheckpointError: it is no table.
        SourceError: a file that cannot be read.
    """
    path = config_path(weights)
    for key in CONFIG_KEYS:
        table = config.get(key)
        if table is None:
            continue
        if not isinstance(table, Mapping):
            raise CheckpointError(path, f"{key} is not a table")
        if key == "quantization" and "bits" not in table:
            continue
        return QuantSettings(table, path, key)
    for name, method in _FILES.items():
        file = path.parent / name
        if path_exists(file):
            table = read_json(file)
            said, inner = "", table.get("quantization")
            if isinstance(inner, Mapping):
                table, said = dict(inner), "quantization"
            return QuantSettings({"quant_method": method, **table}, file, said)
    return None
