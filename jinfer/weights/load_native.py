"""Converted checkpoints: the parameters that they hold, checked against the model and loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np

from jinfer.checkpoint import CheckpointError, Tensor
from jinfer.checkpoint.dtypes import DTYPES
from jinfer.checkpoint.native_checkpoint import AGAIN, ConvertedCheckpoint, Packed
from jinfer.checkpoint.orbax import OrbaxCheckpoint, restore
from jinfer.modelspec.quant_format import FORMATS
from jinfer.modelspec.quantization_table import QuantizationSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import AbstractModel
from jinfer.quant import QuantFormat, QuantizedTensor
from jinfer.quant.quantized_tensor import Activations, abstract, with_columns
from jinfer.quant.sparse_matrix import OutlierTensor, SparseTensor
from jinfer.weights.load_weights import Place
from jinfer.weights.storage_plan import columns_here
from jinfer.weights.tensor_mapping import LoadError

# What `[quantization]` may say anew, because no stored number depends on it.
_FREE = ("activations", "kv_cache")
_BLOCKS = (16, 32, 64, 128)


def weight_settings(spec: QuantizationSpec) -> dict[str, Any]:
    """What stored numbers depend on, as JSON has it."""
    settings = {key: value for key, value in asdict(spec).items() if key not in _FREE}
    return {**settings, "rules": [dict(rule) for rule in settings["rules"]]}


def check_settings(spec: QuantizationSpec, checkpoint: ConvertedCheckpoint, path: object) -> None:
    """Raises `SpecError` if weights are asked for that the checkpoint does not have.

    Args:
        path: the specification's file, for errors.
    """
    usual = weight_settings(QuantizationSpec())
    for key, value in weight_settings(spec).items():
        made = checkpoint.settings.get(key, usual[key])
        if value not in (usual[key], made):
            raise SpecError(
                path,
                f"quantization.{key}",
                f"cannot be chosen here: {checkpoint.path} is converted already, with {made!r}; "
                f"{AGAIN}",
            )


def stored_as(
    model: AbstractModel, checkpoint: ConvertedCheckpoint, activations: Activations
) -> AbstractModel:
    """The model with its parameters as the checkpoint has them.

    Args:
        model: as `build` gives it, all its parameters plain.
        activations: of quantized parameters.

    Raises:
        CheckpointError: the checkpoint is damaged.
        LoadError: it is another model's.
    """
    parameters, used = list[Any](), set[str]()
    for name, parameter in zip(model.names, model.parameters, strict=True):
        first = checkpoint.same.get(name, name)
        packed = checkpoint.packed.get(first)
        if packed is not None:
            _check_shape(checkpoint, first, packed.shape, parameter.shape)
            parameter = _abstract(checkpoint, first, packed)
        for part, like in part_names(first, parameter):
            used.add(part)
            tensor = _part(checkpoint, part)
            if packed is None:
                _check_shape(checkpoint, part, tensor.shape, like.shape)
            elif tensor.shape != like.shape or DTYPES[tensor.type] != like.dtype:
                stored = f"{tensor.type} {list(tensor.shape)}"
                reason = f"{part} is {stored}, but has to be {like.dtype} {list(like.shape)}"
                raise CheckpointError(checkpoint.path, f"{reason}; {AGAIN}")
        parameters.append(parameter if packed is None else _as_here(parameter, activations))
    if left := sorted(checkpoint.parts.keys() - used):
        shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        raise LoadError(
            f"{checkpoint.path}: the specification has no place for {shown}; "
            f"use the spec.toml beside the weights, or {AGAIN}"
        )
    return replace(model, parameters=tuple(parameters))


def load_converted(model: AbstractModel, checkpoint: ConvertedCheckpoint) -> tuple[Any, ...]:
    """The parameters, in the order of `model.names`.

    Of safetensors files they are views of the memory map on a CPU: nothing is read before it is
    used. Orbax's are read, each shard by the process that holds it. A GPU's kernels may want them
    packed in another way than they are in the file.

    Args:
        model: of `stored_as`. An abstract array that has a `sharding` says where it is to be;
            others are put on the one device.
    """
    packings, wanted = dict[str, Any](), dict[str, Any]()
    for name, parameter in zip(model.names, model.parameters, strict=True):
        first = checkpoint.same.get(name, name)
        packed = checkpoint.packed.get(first)
        packings[first] = parameter if packed is None else _abstract(checkpoint, first, packed)
        wanted[first] = parameter
    restored = dict[str, Any]()
    if isinstance(checkpoint, OrbaxCheckpoint):
        restored = restore(checkpoint, _placed(packings, wanted))
    loaded: dict[str, Any] = {}
    for first, parameter in wanted.items():
        stored = packings[first]
        parts = [
            restored.pop(part) if part in restored else _read(checkpoint, part, like)
            for part, like in part_names(first, stored)
        ]
        values = jax.tree.unflatten(jax.tree.structure(stored), parts)
        if first in checkpoint.packed:
            values = _as_here(values, _activations(parameter))
        loaded[first] = jax.tree.map(_put, values, parameter)
    jax.block_until_ready(loaded)
    return tuple(loaded[checkpoint.same.get(name, name)] for name in model.names)


def _put(array: Any, like: Any) -> Any:
    return jax.device_put(array) if like.sharding is None else jax.device_put(array, like.sharding)


def place_converted(
    model: AbstractModel, checkpoint: ConvertedCheckpoint, place: Place, only: Collection[str]
) -> tuple[Any, ...]:
    """What `place` gives for each of some parameters, which it is given one after the other."""
    named: dict[str, list[str]] = {}
    for name in (name for name in model.names if name in only):
        named.setdefault(checkpoint.same.get(name, name), []).append(name)
    parameters = dict(zip(model.names, model.parameters, strict=True))
    placed: dict[str, Any] = {}
    for first, names in named.items():
        parameter, packed = parameters[names[0]], checkpoint.packed.get(first)
        stored = parameter if packed is None else _abstract(checkpoint, first, packed)
        values = _values(checkpoint, first, stored)
        if packed is not None:
            values = _as_here(values, _activations(parameter))
        placed[first] = place(names, values)
    return tuple(placed[checkpoint.same.get(name, name)] for name in model.names if name in only)


def _values(checkpoint: ConvertedCheckpoint, name: str, stored: Any) -> Any:
    """A parameter as the checkpoint has it, in NumPy's arrays."""
    if isinstance(checkpoint, OrbaxCheckpoint):
        like = {
            part: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=_host())
            for part, array in part_names(name, stored)
        }
        restored = restore(checkpoint, like)
        parts = [np.asarray(restored[part]) for part, _ in part_names(name, stored)]
    else:
        parts = [_read(checkpoint, part, array) for part, array in part_names(name, stored)]
    return jax.tree.unflatten(jax.tree.structure(stored), parts)


def _placed(
    packings: Mapping[str, Any], wanted: Mapping[str, Any]
) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a checkpoint, with the shardings of those that become of them.

    What is packed anew first goes to the host's memory.
    """
    placed = {}
    for name, stored in packings.items():
        arrays, here = part_names(name, stored), jax.tree.leaves(wanted[name])
        for (part, like), target in zip(arrays, here, strict=True):
            sharding = target.sharding if target.shape == like.shape else _host()
            placed[part] = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)
    return placed


def _host() -> jax.sharding.Sharding | None:
    try:
        return jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX was told to know no CPU
        return None


def part_names(name: str, parameter: Any) -> list[tuple[str, Any]]:
    """The arrays of a parameter, quantized or not, with their names in a converted checkpoint."""
    leaves = jax.tree.leaves_with_path(parameter)
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def _read(checkpoint: ConvertedCheckpoint, part: str, like: Any) -> np.ndarray:
    values = checkpoint.parts[part].read()
    return values if values.dtype == like.dtype else values.astype(like.dtype)


def _part(checkpoint: ConvertedCheckpoint, part: str) -> Tensor:
    if part not in checkpoint.parts:
        reason = f"has no tensor {part}: it is damaged, or not the specification's model"
        raise CheckpointError(checkpoint.path, f"{reason}; {AGAIN}")
    return checkpoint.parts[part]


def _check_shape(
    checkpoint: ConvertedCheckpoint, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    if shape != wanted:
        raise LoadError(
            f"{checkpoint.path}: {name} is {list(shape)}, but the specification says "
            f"{list(wanted)}; use the spec.toml beside the weights, or {AGAIN}"
        )


def packing(tensor: QuantizedTensor | OutlierTensor) -> Packed:
    """What a converted checkpoint says of a quantized parameter."""
    if isinstance(tensor, QuantizedTensor):
        return Packed(tensor.shape, tensor.columns, asdict(tensor.format))
    count = int(tensor.outliers.values.shape[-1])
    return replace(packing(tensor.rounded), outliers=count)


def _as_here[T: (QuantizedTensor, OutlierTensor)](tensor: T, activations: Activations) -> T:
    """A parameter, with arrays or without, as this machine's kernels want it."""
    if isinstance(tensor, OutlierTensor):
        return replace(tensor, rounded=_as_here(tensor.rounded, activations))
    columns = columns_here(tensor.format)
    if columns != tensor.columns:
        is_abstract = isinstance(tensor.words, jax.ShapeDtypeStruct)
        tensor = (
            abstract(tensor.shape, tensor.format, columns)
            if is_abstract
            else with_columns(tensor, columns)
        )
    return replace(tensor, activations=activations)


def _activations(tensor: QuantizedTensor | OutlierTensor) -> Activations:
    return (tensor.rounded if isinstance(tensor, OutlierTensor) else tensor).activations


def _abstract(
    checkpoint: ConvertedCheckpoint, name: str, packed: Packed
) -> QuantizedTensor | OutlierTensor:
    written = dict(packed.format)
    if isinstance(written.get("codebook"), list):
        written["codebook"] = tuple(written["codebook"])
    try:
        format = QuantFormat(**written)
        if not _is_known(format) or packed.columns not in (1, 2, 4, 8, 16, 32):
            raise ValueError
        rounded = abstract(packed.shape, format, packed.columns)
    except (TypeError, ValueError):
        known = f"{packed.format}, columns {packed.columns}"[:300]
        reason = f"{name} is in a format that is not known: {known}; update jinfer, or {AGAIN}"
        raise CheckpointError(checkpoint.path, reason) from None
    if packed.outliers is None:
        return rounded
    of = (*rounded.stack, packed.outliers)
    whole, real = jax.ShapeDtypeStruct(of, np.int32), jax.ShapeDtypeStruct(of, np.float32)
    sparse = SparseTensor(whole, whole, real, rounded.outputs, rounded.inputs)
    return OutlierTensor(rounded, sparse)


def _is_known(format: QuantFormat) -> bool:
    """Whether fields that a file gives are those of a format."""
    values = format.codebook
    return (
        isinstance(format.width, str)
        and f"q{format.width}" in FORMATS
        and format.block in _BLOCKS
        and all(isinstance(flag, bool) for flag in (format.symmetric, format.two_level))
        and (
            values is None
            or [type(value) is int and -128 <= value < 128 for value in values]
            == [True] * format.levels
        )
    )
