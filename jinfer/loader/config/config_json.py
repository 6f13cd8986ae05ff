"""config.json: reading it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinfer.guard.download_check import read_downloaded
from jinfer.guard.safe_files import FileRefusedError, path_exists
from jinfer.guard.sanitize import sanitized
from jinfer.loader.checkpoint import Checkpoint
from jinfer.loader.checkpoint.checkpoint_reader import CheckpointError
from jinfer.loader.checkpoint.layouts.module_tensors import QuantSettings
from jinfer.modelspec.spec_files import architecture_of, format_table


class SourceError(ValueError):
    """A source that leads nowhere: says what was looked for, and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(sanitized(text))


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


_TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class Multimodal:
    """A multimodal model's language model.

    Attributes:
        config: the language model's config.json.
        prefixes: prefixes of its tensors' names -> what its family has instead.
        without: the modules of the file that are not the language model's.
    """

    config: Mapping[str, Any]
    prefixes: Mapping[str, str]
    without: tuple[str, ...]

    @property
    def tensors(self) -> dict[str, Any]:
        """A specification's `[tensors]`."""
        names = [each for name in self.without for each in (name, f"model.{name}")]
        patterns = [pattern for name in names for pattern in (name, f"{name}.*")]
        return {"prefix": dict(self.prefixes), "ignore": patterns}

    def leaves_out(self, checkpoint: Checkpoint) -> bool:
        """Whether the file has what is not loaded."""
        prefixes = ("", *self.prefixes)
        starts = {(name, f"model.{name}") for name in self.without}
        bare = (name.removeprefix(p) for name in checkpoint.tensors for p in prefixes)
        return any(f"{n}.".startswith(f"{s}.") for n in bare for pair in starts for s in pair)


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json as its language model's.

    What is for text alone has a table of its own, `text_config`, where a model also sees
    images; there it counts before the rest, and what it leaves out is looked up in the rest.
    """
    if (found := multimodal(config)) is not None:
        return found.config
    own = config.get("text_config")
    if not isinstance(own, dict):
        return config
    kept = {key: config.get(key) for key in ("architectures", "model_type")}
    return {**config, **_given(own), **kept}


def _given(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


def multimodal(config: Mapping[str, Any]) -> Multimodal | None:
    """What a config.json says of its language model; None: the model has nothing else."""
    table = format_table("multimodal")
    names, type_ = config.get("architectures"), config.get("model_type")
    if not isinstance(names, list) or not names:
        names = [architecture_of(type_)] if isinstance(type_, str) else []
    rows = table["architectures"]
    whole = next((n for n in names if isinstance(n, str) and n in rows), None)
    if whole is None:
        return None
    row = rows[whole]
    own: Any = config
    for key in row.get("config", "text_config").split("."):
        own = own.get(key) if isinstance(own, dict) else None
    own = own if isinstance(own, dict) else {}
    usual = row.get("text")
    usual = usual.get(str(config.get("version"))) if isinstance(usual, dict) else usual
    type_ = str(own.get("model_type") or usual or f"the language model of {whole}")
    names = own.get("architectures") if isinstance(own.get("architectures"), list) else []
    name = table["text"].get(type_) or architecture_of(type_)
    defaults = {k: v for k, v in table["defaults"].get(type_, {}).items() if k not in own}
    outer = {key: value for key, value in config.items() if key != "auto_map"}
    tied = [each[_TIED] for each in (config, own) if isinstance(each.get(_TIED), bool)]
    text = defaults | outer | _given(own) | {"architectures": [name] if name else names}
    # Of a head that is in the file nevertheless, the tensor decides.
    text |= {"model_type": type_, **row.get("keys", {}), **({_TIED: any(tied)} if tied else {})}
    return Multimodal(text, table["prefix"], tuple(row["without"]))
