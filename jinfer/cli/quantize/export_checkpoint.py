"""Export: a quantized model as a GPTQ or compressed-tensors folder, or as a GGUF file.

Tensors keep the source's names. Those that the layout does not quantize, or that it could not hold
as they are stored, are copied.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from jinfer.cli.quantize.write_gguf import GGUFWriter, StoredTensor, uint32
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
from jinfer.quant.quantized_tensor import to_codes
from jinfer.sandbox.safe_files import path_exists

if TYPE_CHECKING:
    from jaxtyping import Float16, UInt8


class MatrixCodes(NamedTuple):
    """A quantized matrix, or a stack of them, row by row.

    Attributes:
        codes: of the weights.
        numbers: scale of each block, and its base if the format has one.
        format: what they mean.
    """

    codes: UInt8[np.ndarray, "*stack outputs inputs"]
    numbers: Float16[np.ndarray, "*stack outputs blocks numbers"]
    format: QuantFormat


def codes_of(tensor: QuantizedTensor) -> MatrixCodes:
    """The codes and numbers of a tensor, without padding."""
    codes, numbers, _ = to_codes(tensor)
    blocks = -(-tensor.inputs // tensor.format.block)
    return MatrixCodes(codes[..., : tensor.inputs], numbers[..., :blocks, :], tensor.format)


def joined(parts: Sequence[MatrixCodes]) -> MatrixCodes:
    """Matrices of the same inputs, one below the other."""
    if len(parts) == 1:
        return parts[0]
    codes = np.concatenate([part.codes for part in parts], axis=-2)
    numbers = np.concatenate([part.numbers for part in parts], axis=-3)
    return MatrixCodes(codes, numbers, parts[0].format)


@dataclass(frozen=True)
class SafetensorsLayout:
    """A layout of folders that transformers and vLLM read.

    Attributes:
        holds: whether a format can be written without change.
        formats: those that can, for errors.
        arrays: the arrays of a matrix, by the last parts of their names.
        settings: `quantization_config` of config.json: from the format, and the names of the
            modules that are not quantized.
    """

    holds: Callable[[QuantFormat], bool]
    formats: str
    arrays: Callable[[MatrixCodes], dict[str, np.ndarray]]
    settings: Callable[[QuantFormat, Sequence[str]], dict[str, Any]]


def _evenly_symmetric(format: QuantFormat, widths: Sequence[str]) -> bool:
    plain = format.symmetric and not format.two_level and format.codebook is None
    return plain and format.width in widths


def _bit_stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, n] as int32 words [rows, ceil(n bits / 32)], the lowest bits first."""
    digits = codes[..., None] >> np.arange(bits, dtype=np.uint8) & np.uint8(1)
    flat = digits.reshape(len(codes), -1)
    flat = np.pad(flat, [(0, 0), (0, -flat.shape[1] % 32)])
    return np.packbits(flat, axis=1, bitorder="little").view("<i4")


def _gptq_arrays(matrix: MatrixCodes) -> dict[str, np.ndarray]:
    """Version 1 of the format, see `jinfer.loader.checkpoint.layouts.gptq_layout`."""
    format, (outputs, inputs) = matrix.format, matrix.codes.shape
    blocks = matrix.numbers.shape[1]
    zeros = np.full((blocks, outputs), format.zero - 1, np.uint8)
    return {
        "qweight": np.ascontiguousarray(_bit_stream(matrix.codes, format.code_bits).T),
        "qzeros": _bit_stream(zeros, format.code_bits),
        "scales": np.ascontiguousarray(matrix.numbers[..., 0].T),
        "g_idx": np.arange(inputs, dtype=np.int32) // np.int32(format.block),
    }


def _gptq_settings(format: QuantFormat, plain: Sequence[str]) -> dict[str, Any]:
    settings = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": format.code_bits,
        "group_size": format.block,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
    }
    rules: dict[str, Any] = {
        f"-:^{name.replace('.', chr(92) + '.')}$": {} for name in plain if name != "lm_head"
    }
    return settings | ({"dynamic": rules} if rules else {})


def _packed_arrays(matrix: MatrixCodes) -> dict[str, np.ndarray]:
    """pack-quantized, see `jinfer.loader.checkpoint.layouts.compressed_layout`."""
    return {
        "weight_packed": _bit_stream(matrix.codes, matrix.format.code_bits),
        "weight_scale": np.ascontiguousarray(matrix.numbers[..., 0]),
        "weight_shape": np.array(matrix.codes.shape, np.int64),
    }


def _packed_settings(format: QuantFormat, plain: Sequence[str]) -> dict[str, Any]:
    weights = {
        "num_bits": format.code_bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": format.block,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(plain),
    }


SAFETENSORS_LAYOUTS: Mapping[str, SafetensorsLayout] = {
    "gptq": SafetensorsLayout(
        lambda format: _evenly_symmetric(format, ("2", "3", "4", "8")),
        "q2, q3, q4 or q8, symmetric, such as q4_b128_sym",
        _gptq_arrays,
        _gptq_settings,
    ),
    "compressed-tensors": SafetensorsLayout(
        lambda format: _evenly_symmetric(format, ("4", "8")),
        "q4 or q8, symmetric, such as q4_b128_sym",
        _packed_arrays,
        _packed_settings,
    ),
}


def gguf_type(format: QuantFormat) -> str | None:
    """The GGML type that has the same grid as a format; None: there is none."""
    if format.block != 32 or format.two_level or format.codebook is not None:
        return None
    return _GGUF_TYPES.get((format.width, format.symmetric))


_GGUF_TYPES = {
    ("4", True): "Q4_0",
    ("4", False): "Q4_1",
    ("5", True): "Q5_0",
    ("5", False): "Q5_1",
    ("8", True): "Q8_0",
}
GGUF_FORMATS = "q4, q4_sym, q5, q5_sym or q8, in blocks of 32"


def gguf_blocks(matrix: MatrixCodes) -> UInt8[np.ndarray, "blocks bytes"]:
    """A matrix in blocks of GGML's types: numbers, fifth bits, codes."""
    format = matrix.format
    codes = matrix.codes.reshape(-1, 32)
    numbers = np.ascontiguousarray(matrix.numbers).reshape(len(codes), -1).view(np.uint8)
    if format.width == "8":
        return np.concatenate([numbers, (codes ^ np.uint8(128)).view(np.uint8)], axis=1)
    nibbles = (codes[:, :16] & 15) | (codes[:, 16:] & 15) << 4
    high = np.packbits(codes >> 4, axis=1, bitorder="little")
    parts = (numbers, high, nibbles) if format.width == "5" else (numbers, nibbles)
    return np.concatenate(parts, axis=1)


LAYOUTS = (*SAFETENSORS_LAYOUTS, "gguf")
_FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9}  # llama.cpp's LLAMA_FTYPE
_BLOCK_FORMAT = 2  # general.quantization_version
_WEIGHT, _WORD_BITS = ".weight", 32


class _Target(Protocol):
    """What is written to."""

    def add(self, tensor: Tensor, matrix: MatrixCodes) -> None:
        """Write a tensor quantized."""

    def finish(self, copied: Iterable[Tensor]) -> None:
        """Write the tensors that stay as they are, and the metadata."""


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
    place, file = origin.place, origin.tensors[0]
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
    """Write a checkpoint to an empty folder, and pass the parameters on.

    Args:
        plan: with the storages of `exported_storages`.
        parameters: as they are to be stored, each once.
    """
    tensors = plan.checkpoint.tensors
    planned = {
        file.name: plan.storages[name].format
        for name in plan.storages
        for file in _origin(plan, name).tensors
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
            for number, file in enumerate(origin.tensors):
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
    common = max(types.values(), key=[*types.values()].count)
    metadata = {
        key: value
        for key, value in raw_metadata(plan.checkpoint.path).items()
        if not key.startswith("split.") and key != "general.alignment"
    }
    metadata["general.file_type"] = uint32(_FILE_TYPES[common or ""])
    metadata["general.quantization_version"] = uint32(_BLOCK_FORMAT)
    return GGUFWriter(folder / "model.gguf", metadata, stored)
