"""Native (converted) checkpoint writer: arrays (safetensors or Orbax), spec, tokenizer files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jinfer.cli.toml_writer import toml_text
from jinfer.loader.checkpoint.orbax import DESCRIPTION, FOLDER, describe_file, orbax_api
from jinfer.loader.checkpoint.safetensors import NAMES, SHARD_BYTES, Writer
from jinfer.loader.config.config_json import read_json_value
from jinfer.loader.config.source_errors import SourceError
from jinfer.loader.model_files import SPEC_FILE, ModelFiles
from jinfer.loader.resolve_model import family_of
from jinfer.modelspec.spec_files import families, with_families
from jinfer.modelspec.toml_tables import merge

CHUNK_BYTES = 1 << 20  # of an array in Orbax's folder
# What tokenizers, chat templates and poolings are read from.
_PATTERNS = ("*.json", "*.model", "*.txt", "*.jinja", "*.spm", "tokenizer.bin")
_ABOUT_WEIGHTS = (".index.json", DESCRIPTION)
_SETTINGS = ("dtype", "prompt", "engine", "quantization", "generation", "description")
_PLACES = ("family", "weights", "tokenizer")
_MORE_TEMPLATES = "additional_chat_templates"
_PACKED = (".words", ".scales", ".steps")  # the arrays of a `QuantizedTensor`


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write to, renamed to its final name on success and deleted on failure.

    Raises:
        SourceError: the name is taken by something other than an empty folder.
    """
    try:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise SourceError(f"{out}: is there already; name another folder, or remove it")
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.parent / f".{out.name}.{os.getpid()}.partial"
        partial.mkdir()
    except OSError as error:
        raise SourceError(f"{out}: cannot be written: {error.strerror}") from error
    try:
        yield partial
        if out.exists():
            out.rmdir()
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class OrbaxWriter(Writer):
    """Write named arrays to Orbax's folder `model.orbax`, and a description of them."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        """Arguments as for `Writer`. Raises `CheckpointError` if Orbax is not installed."""
        super().__init__(folder, shard_bytes // 2)  # Orbax copies what it writes
        self._api = orbax_api(folder)
        self._arrays: dict[str, list[Any]] = {}

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the remaining arrays, and `metadata`."""
        self._flush(metadata)
        path = self._folder / FOLDER
        self._api.partial.finalize(path.absolute())
        files = {
            file.relative_to(path).as_posix(): describe_file(file)
            for file in sorted(path.rglob("*"))
            if file.is_file()
        }
        described = {"__metadata__": dict(metadata), "arrays": self._arrays, "files": files}
        text = json.dumps(described, indent=1)
        (self._folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")

    def _flush(self, metadata: Mapping[str, str]) -> None:
        context = self._api.Context()
        context.array.saving.use_compression = False  # codes are as good as random
        context.array.saving.scoped_storage_options_creator = self._chunks
        context.memory.deepcopy_host_arrays = False  # they are not modified
        # Orbax cannot store empty arrays.
        whole = {name: array for name, array in self._held.items() if array.size}
        if whole:
            with context:
                self._api.partial.save((self._folder / FOLDER).absolute(), whole)
        for name, array in self._held.items():
            self._arrays[name] = [NAMES[array.dtype], array.shape]
        self._held = {}

    def _chunks(self, path: Sequence[Any], array: np.ndarray) -> Any:
        """Chunk shape: the least that is read, so that a shard reads little of other shards.

        Orbax cuts the longest axes, which suits plain matrices and the rows of packed ones. Of
        packed ones, [*stack, tiles, superblocks, ...], matrices and superblocks are cut first.
        """
        cut = array.nbytes > CHUNK_BYTES and path[-1].key.endswith(_PACKED)
        axes = (*range(array.ndim - 5), array.ndim - 4) if cut else None
        options = self._api.options.ArrayOptions.Saving.StorageOptions
        return options(chunk_byte_size=CHUNK_BYTES, shard_axes=axes)


def write_specification(
    folder: Path, source: ModelFiles, overrides: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Write `spec.toml`, and next to it the specifications that it extends.

    Args:
        overrides: user tables laid over the source's.
        settings: tables that replace these, such as the whole `[quantization]`.
    """
    own = dict(source.own)
    if not source.describes_model:
        own = {"family": family_of(source), **own}
    over = {key: table for key, table in overrides.items() if key not in _PLACES}
    tables = with_families(own, source.path)
    if over.keys() <= set(_SETTINGS):
        tables[-1] = merge(own, over)
    else:  # a table of its own, because the format's part of the source's counts before it
        tables.append({**over, "family": ""})
    known = families()
    by_path = {str(path): name for name, path in known.items()}
    head = f"# Converted by jinfer quantize from {source.weights.name}.\n"
    name = SPEC_FILE
    replaced: dict[str, Any] = {"weights": ".", **settings}
    for number, table in enumerate(reversed(tables), start=1):
        family = table.get("family")
        copy = f"family-{number}.toml"
        whole = {key: value for key, value in table.items() if key not in _PLACES} | replaced
        if family is not None:
            whole = {"family": by_path.get(family, family if family in known else copy), **whole}
        (folder / name).write_text(head + toml_text(whole), encoding="utf-8")
        if family is None or family in known or family in by_path:
            return
        name, replaced = copy, {}


def copy_companions(folder: Path, source: ModelFiles, tokenizer: Path) -> dict[str, Any]:
    """Copy the files that are read with the weights: config.json, tokenizer files, pooling.

    Args:
        tokenizer: where the source's tokenizer is.

    Returns:
        The matching keys of the specification.
    """
    weights, format = source.weights, source.checkpoint.format
    patterns = {"gguf": (), "llama2c": _PATTERNS[-1:]}.get(format, _PATTERNS)
    _copy(_folder(weights), folder, patterns)
    _copy_pooling(_folder(source.checkpoint.path), folder)
    if tokenizer == weights:
        return {}
    _copy(_folder(tokenizer), folder / "tokenizer", _PATTERNS)
    return {"tokenizer": "tokenizer"}


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _copy(source: Path, target: Path, patterns: Iterable[str]) -> None:
    target.mkdir(exist_ok=True)
    for pattern in patterns:
        for path in source.glob(pattern):
            if path.is_file() and not path.name.endswith(_ABOUT_WEIGHTS):
                shutil.copyfile(path, target / path.name)
    more = source / _MORE_TEMPLATES
    if patterns and more.is_dir():
        _copy(more, target / _MORE_TEMPLATES, ("*.jinja",))


def _copy_pooling(source: Path, target: Path) -> None:
    """Copy sentence-transformers' modules, each in its own folder."""
    if not (source / "modules.json").is_file():
        return
    for pattern in ("modules.json", "sentence_*_config.json", "config_sentence_transformers.json"):
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)
    modules = read_json_value(source / "modules.json")
    names = [str(module.get("path", "")) for module in modules if isinstance(module, Mapping)]
    for name in names:
        if name and name.isprintable() and not set(name) & set("/\\:") and name != "..":
            _copy(source / name, target / name, ("*.json", "*.safetensors", "*.bin"))
