"""Export: a quantized model as a GPTQ or compressed-tensors folder, or as a GGUF file.

Tensors keep the source's names. Those that the layout does not quantize, or that it could not hold
as they are stored, are copied.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jinfer.guard.safe_files import path_exists
from jinfer.loader.checkpoint import CheckpointError, Tensor
from jinfer.loader.checkpoint.gguf import raw_metadata
from jinfer.loader.checkpoint.safetensors import Writer
from jinfer.loader.config.config_json import config_path, read_json_value
from jinfer.loader.model_files import ModelFiles
from jinfer.loader.weights.plan_weights import WeightPlan
from jinfer.loader.weights.storage_plan import Storage
from jinfer.loader.weights.tensor_mapping import Origin, parameter_shapes
from jinfer.modelspec.quantization_table import AUTO, PLAIN, QuantizationSpec, Role
from jinfer.modelspec.spec_errors import SpecError
from jinfer.quant import QuantFormat, QuantizedTensor

from .export_layouts import (
    GGUF_FORMATS,
    SAFETENSORS_LAYOUTS,
    MatrixCodes,
    SafetensorsLayout,
    codes_of,
    gguf_blocks,
    gguf_type,
    joined,
)
from .write_gguf import GGUFWriter, StoredTensor, uint32

LAYOUTS = (*SAFETENSORS_LAYOUTS, "gguf")
_FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9}  # llama.cpp's LLAMA_FTYPE
_BLOCK_FORMAT = 2  # general.quantization_version
_WEIGHT, _WORD_BITS = ".weight", 32


class _Target(Protocol):
    """What is written to."""

    def add(self, tensor: Tensor, matrix: MatrixCodes) -> None:
        """Writes a tensor quantized."""

    def finish(self, copied: Iterable[Tensor]) -> None:
        """Writes the tensors that stay as they are, and what is said of all."""


def check_layout(layout: str, files: ModelFiles) -> None:
    """Raises `CheckpointError` for a checkpoint that is not exported in this layout."""
    checkpoint, reason = files.checkpoint, ""
    if any(tensor.codes is not None for tensor in checkpoint.tensors.values()):
        reason = "is quantized already; give the checkpoint that it was made from"
    elif layout == "gguf" and checkpoint.format != "gguf":
        reason = "is no GGUF file, whose metadata --layout gguf keeps; convert it to one in F16"
    elif layout != "gguf" and not _has_config(files):
        reason = f"has no config.json, which --layout {layout} needs; give a folder that has one"
    if reason:
        raise CheckpointError(checkpoint.path, reason)


def _has_config(files: ModelFiles) -> bool:
    known = files.checkpoint.format in ("safetensors", "pickle")
    return known and path_exists(config_path(files.weights))


def exported_quantization(layout: str | None, spec: QuantizationSpec) -> QuantizationSpec:
    """What a layout has in place of jinfer's own defaults: GGUF's tables and heads are Q8_0."""
    named = spec.weights in (AUTO, PLAIN) or spec.embedding is not None or spec.head is not None
    return spec if layout != "gguf" or named else replace(spec, embedding="q8")


def exported_storages(layout: str, plan: WeightPlan) -> dict[str, Storage]:
    """The storages of the parameters that the layout quantizes.

    Raises:
        SpecError: it does not hold a parameter's format, or formats differ where there is one.
    """
    shapes = parameter_shapes(plan.plain)
    roles = dict(zip(plan.plain.names, plan.plain.roles, strict=True))
    chosen = {
        name: storage
        for name, storage in plan.storages.items()
        if _is_taken(layout, plan.origins[name], roles[name], storage.format, shapes)
    }
    for name in list(chosen):  # a fused tensor is quantized as a whole
        parts = _origin(plan, name).place.parts
        if any(part not in chosen or chosen[part] != chosen[name] for part in parts):
            del chosen[name]
    path, key = plan.spec.path, "quantization.weights"
    for name, storage in chosen.items():
        format = storage.format
        holds = gguf_type(format) if layout == "gguf" else SAFETENSORS_LAYOUTS[layout].holds(format)
        if storage.outliers:
            raise SpecError(
                path, "quantization.outliers", f"{layout} has no outliers; leave it out"
            )
        if not holds:
            known = GGUF_FORMATS if layout == "gguf" else SAFETENSORS_LAYOUTS[layout].formats
            reason = f"{layout} does not hold {format.name} of {name}; it holds {known}"
            raise SpecError(path, key, reason)
    formats = {storage.format for storage in chosen.values()}
    if not chosen:
        raise SpecError(path, key, f"no matrix is one that {layout} quantizes; name a format")
    if layout != "gguf" and len(formats) > 1:
        names = " and ".join(sorted(format.name for format in formats))
        raise SpecError(path, "quantization.rules", f"{layout} is written with one format: {names}")
    return chosen


def _origin(plan: WeightPlan, name: str) -> Origin:
    origin = plan.origins[name]
    assert isinstance(origin, Origin), "no native checkpoint is exported"
    return origin


def _is_taken(
    layout: str, origin: Any, role: Role, format: QuantFormat, shapes: Mapping[str, Any]
) -> bool:
    place, file = origin.place, origin.files[0]
    whole = not place.parts or (place.groups == 1 and place.axis == 0 and not origin.stacked)
    if not origin.is_rows(shapes) or not whole or file.shape[-1] % format.block:
        return False
    if layout == "gguf":
        return len(file.shape) > 1
    # Names of modules are those of transformers' linear layers; of a stack each has its own.
    is_linear = role == "matrix" and len(file.shape) == 2 and file.name.endswith(_WEIGHT)
    return is_linear and all(size * format.code_bits % _WORD_BITS == 0 for size in file.shape)


def export(
    layout: str,
    folder: Path,
    files: ModelFiles,
    plan: WeightPlan,
    parameters: Iterable[tuple[str, Any]],
) -> Iterator[tuple[str, Any]]:
    """Writes a checkpoint to an empty folder, and passes the parameters on.

    Args:
        plan: with the storages of `exported_storages`.
        parameters: as they are to be stored, each once.
    """
    tensors = plan.checkpoint.tensors
    planned = {
        file.name: plan.storages[name].format
        for name in plan.storages
        for file in _origin(plan, name).files
    }
    copied = [tensor for name, tensor in tensors.items() if name not in planned]
    if layout != "gguf":
        target = _SafetensorsTarget(folder, files, SAFETENSORS_LAYOUTS[layout])
        yield from _written(target, plan, parameters, copied)
        return
    with _gguf_writer(folder, plan, planned) as writer:
        yield from _written(_GGUFTarget(writer), plan, parameters, copied)


def _written(
    target: _Target,
    plan: WeightPlan,
    parameters: Iterable[tuple[str, Any]],
    copied: Iterable[Tensor],
) -> Iterator[tuple[str, Any]]:
    waiting = defaultdict[str, dict[str, MatrixCodes]](dict)
    for name, parameter in parameters:
        if isinstance(parameter, QuantizedTensor) and name in plan.storages:
            origin = _origin(plan, name)
            for number, file in enumerate(origin.files):
                parts = origin.place.parts or (name,)
                own = parameter[number] if origin.stacked else parameter
                waiting[file.name][name] = codes_of(own)
                if waiting[file.name].keys() == set(parts):
                    there = waiting.pop(file.name)
                    target.add(file, joined([there[part] for part in parts]))
        yield name, parameter
    assert not waiting, "fused tensors are quantized as a whole"
    target.finish(copied)


class _SafetensorsTarget:
    """A folder with config.json."""

    def __init__(self, folder: Path, files: ModelFiles, layout: SafetensorsLayout) -> None:
        self._folder, self._files, self._layout = folder, files, layout
        self._writer = Writer(folder, native=False)
        self._format: QuantFormat | None = None

    def add(self, tensor: Tensor, matrix: MatrixCodes) -> None:
        module = tensor.name.removesuffix(_WEIGHT)
        arrays = self._layout.arrays(matrix)
        self._writer.add({f"{module}.{part}": array for part, array in arrays.items()})
        self._format = matrix.format

    def finish(self, copied: Iterable[Tensor]) -> None:
        plain = ["lm_head"]
        for tensor in copied:
            self._writer.add({tensor.name: np.asarray(tensor.read())})
            module = tensor.name.removesuffix(_WEIGHT)
            if len(tensor.shape) == 2 and module != tensor.name and "embed" not in module:
                plain.append(module)
        self._writer.finish({"format": "pt"})
        assert self._format is not None, "a matrix is quantized"
        path = self._folder / "config.json"
        config = read_json_value(path)
        config["quantization_config"] = self._layout.settings(
            self._format, list(dict.fromkeys(plain))
        )
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class _GGUFTarget:
    """A GGUF file."""

    def __init__(self, writer: GGUFWriter) -> None:
        self._writer = writer

    def add(self, tensor: Tensor, matrix: MatrixCodes) -> None:
        self._writer.write(tensor.name, gguf_blocks(matrix))

    def finish(self, copied: Iterable[Tensor]) -> None:
        for tensor in copied:
            self._writer.write(tensor.name, tensor.raw())


def _gguf_writer(folder: Path, plan: WeightPlan, planned: Mapping[str, QuantFormat]) -> GGUFWriter:
    """Of a file with the source's metadata."""
    types = {name: gguf_type(format) for name, format in planned.items()}
    stored = {
        name: StoredTensor(tensor.shape, types.get(name) or tensor.type)
        for name, tensor in plan.checkpoint.tensors.items()
    }
    most = max(types.values(), key=[*types.values()].count)
    metadata = {
        key: value
        for key, value in raw_metadata(plan.checkpoint.path).items()
        if not key.startswith("split.") and key != "general.alignment"
    }
    metadata["general.file_type"] = uint32(_FILE_TYPES[most or ""])
    metadata["general.quantization_version"] = uint32(_BLOCK_FORMAT)
    return GGUFWriter(folder / "model.gguf", metadata, stored)
