"""config.json: reading it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinfer.checkpoint import Checkpoint
from jinfer.opening.source_errors import SourceError
from jinfer.sandbox.download_check import read_downloaded
from jinfer.sandbox.safe_files import FileRefusedError, path_exists

MAX_CONFIG_BYTES = 64 << 20


def read_config(weights: Path, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The config.json beside a checkpoint, or the metadata of a file that carries its own.

    Args:
        weights: the checkpoint's folder or file.

    Raises:
        SourceError: it cannot be read.
    """
    if checkpoint.format in ("gguf", "llama2c"):
        return checkpoint.metadata
    path = config_path(weights)
    return read_json(path) if path_exists(path) else {}


def config_path(weights: Path) -> Path:
    """Where the config.json of a checkpoint's folder or file is looked for."""
    return (weights if weights.is_dir() else weights.parent) / "config.json"


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises `SourceError`."""
    table = read_json_value(path)
    if not isinstance(table, dict):
        raise SourceError(f"{path}: is not a JSON object")
    return table


def read_json_value(path: Path) -> Any:
    """Reads a JSON file. Raises `SourceError`."""
    try:
        return json.loads(read_downloaded(path, MAX_CONFIG_BYTES).decode("utf-8-sig"))
    except FileRefusedError as error:
        raise SourceError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: cannot be read as JSON: {error}"[:300]) from None
