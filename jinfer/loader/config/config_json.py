"""config.json: reading it, its quantization settings, and the part about a language model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinfer.loader.checkpoint import Checkpoint
from jinfer.loader.checkpoint.checkpoint_reader import CheckpointError
from jinfer.loader.checkpoint.layouts.module_tensors import QuantSettings
from jinfer.loader.config.source_errors import SourceError
from jinfer.modelspec.spec_files import architecture_of, format_table
from jinfer.sandbox.safe_files import FileRefusedError, path_exists, read_downloaded

MAX_CONFIG_BYTES = 64 << 20

# Keys of config.json; a file of MLX may have the same table under "quantization" as well.
QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")
# Files of older writers, and the quantization method of each.
_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
_TIED = "tie_word_embeddings"


def read_config(path: Path, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Read the config.json of a checkpoint, or return the metadata of a GGUF or llama2.c file.

    Args:
        path: config.json, which need not exist.

    Raises:
        SourceError: it cannot be read.
    """
    if checkpoint.format in ("gguf", "llama2c"):
        return checkpoint.metadata
    return read_json(path) if path_exists(path) else {}


def with_image_processor(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Add the settings of a checkpoint's image processor to its config, as `image_processor`.

    Transformers 5 writes them to processor_config.json, in a table of their own, earlier versions
    to preprocessor_config.json, and the processor's to processor_config.json.

    Raises:
        SourceError: a file cannot be read.
    """
    processor, own = (
        read_json(path) if path_exists(path := folder / name) else {}
        for name in ("processor_config.json", "preprocessor_config.json")
    )
    nested = processor.pop("image_processor", None)
    found = {**processor, **own, **(nested if isinstance(nested, dict) else {})}
    return {**config, "image_processor": found} if found else config


def config_path(path: Path) -> Path:
    """Return the path of config.json for a checkpoint's folder or file."""
    return (path if path.is_dir() else path.parent) / "config.json"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `SourceError`."""
    table = read_json_value(path)
    if not isinstance(table, dict):
        raise SourceError(f"{path}: is not a JSON object")
    return table


def read_json_value(path: Path) -> Any:
    """Read a JSON file. Raises `SourceError`."""
    try:
        return json.loads(read_downloaded(path, MAX_CONFIG_BYTES).decode("utf-8-sig"))
    except FileRefusedError as error:
        raise SourceError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: cannot be read as JSON: {error}"[:300]) from None


def quant_settings(config: Mapping[str, Any], path: Path) -> QuantSettings | None:
    """Find a checkpoint's quantization settings; None if it is not quantized.

    Args:
        config: its config.json.
        path: the path of config.json; older writers have another file in the same folder.

    Raises:
        CheckpointError: the settings are not a table.
        SourceError: a file cannot be read.
    """
    for key in QUANTIZATION_KEYS:
        table = config.get(key)
        if table is None:
            continue
        if not isinstance(table, Mapping):
            raise CheckpointError(path, f"{key} is not a table")
        if key != "quantization" or "bits" in table:
            return QuantSettings(table, path, key)
    for name, method in _FILES.items():
        file = path.parent / name
        if path_exists(file):
            table, key = read_json(file), ""
            if isinstance(table.get("quantization"), Mapping):
                table, key = dict(table["quantization"]), "quantization"
            return QuantSettings({"quant_method": method, **table}, file, key)
    return None


@dataclass(frozen=True)
class Multimodal:
    """The language model in a multimodal checkpoint (vision-language models and others).

    Attributes:
        architecture: of the whole model.
        config: the language model's config.json.
        prefixes: prefix of its tensors' names -> the prefix that its family has instead.
        without: the checkpoint's modules that do not belong to the language model.
    """

    architecture: str
    config: Mapping[str, Any]
    prefixes: Mapping[str, str]
    without: tuple[str, ...]

    @property
    def tensors(self) -> dict[str, Any]:
        """The table `[tensors]` of a specification."""
        names = [full for name in self.without for full in (name, f"model.{name}")]
        patterns = [pattern for name in names for pattern in (name, f"{name}.*")]
        return {"prefix": dict(self.prefixes), "ignore": patterns}

    def others(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with the tensors of the other modules alone."""
        starts = tuple(f"{start}." for n in self.without for start in (n, f"model.{n}"))
        kept = {
            name: tensor
            for name, tensor in checkpoint.tensors.items()
            if any(f"{name.removeprefix(p)}.".startswith(starts) for p in ("", *self.prefixes))
        }
        return replace(checkpoint, tensors=kept)


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model in a config.json.

    Models that also read images have the language model's keys in a table `text_config`; these
    take precedence over the keys outside it.
    """
    if (found := multimodal(config)) is not None:
        return found.config
    own = config.get("text_config")
    if not isinstance(own, dict):
        return config
    kept = {key: config.get(key) for key in ("architectures", "model_type")}
    return {**config, **_without_null(own), **kept}


def _without_null(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


def multimodal(config: Mapping[str, Any]) -> Multimodal | None:
    """Find the language model in a multimodal config.json; None if the model is not multimodal.

    `specs/formats/multimodal.toml` lists, for each architecture, the modules to leave out.
    """
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
    known = {*own, *(["rope_parameters"] if "rope_theta" in own else [])}
    defaults = {k: v for k, v in table["defaults"].get(type_, {}).items() if k not in known}
    outer = {key: value for key, value in config.items() if key != "auto_map"}
    tied = [c[_TIED] for c in (config, own) if isinstance(c.get(_TIED), bool)]
    text = defaults | outer | _without_null(own) | {"architectures": [name] if name else names}
    # If the checkpoint has a head all the same, its tensors decide.
    text |= {"model_type": type_, **row.get("keys", {}), **({_TIED: any(tied)} if tied else {})}
    return Multimodal(whole, text, table["prefix"], tuple(row["without"]))
