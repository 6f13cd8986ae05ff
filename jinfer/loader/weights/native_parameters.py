"""Native checkpoints: the parameters in them, checked against the model, and read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from jinfer.loader.checkpoint import Checkpoint, CheckpointError, Tensor
from jinfer.loader.checkpoint.checkpoint_reader import DTYPES
from jinfer.loader.checkpoint.native_checkpoint import AGAIN, NativeCheckpoint, PackedFormat
from jinfer.loader.checkpoint.orbax import OrbaxCheckpoint, restored_tensors
from jinfer.loader.weights.storage_plan import columns_here, in_stored_types
from jinfer.loader.weights.tensor_mapping import LoadError, Origin, Shapes
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.quantization_table import QuantizationSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.matmul.dense import reads_16_bit_weights
from jinfer.quant import QuantFormat, QuantizedTensor
from jinfer.quant.quantized_tensor import Activations, abstract, with_columns
from jinfer.quant.reordered_tensor import ReorderedTensor, abstract_reordered
from jinfer.quant.scaled_tensor import ScaledTensor, abstract_scaled, block_of
from jinfer.quant.sparse_matrix import OutlierTensor, abstract_outliers
from jinfer.quant_format import FORMATS

# Keys of `[quantization]` that no stored number depends on.
_FREE = ("activations", "kv_cache")
_BLOCKS = (16, 32, 64, 128)
Packed = QuantizedTensor | OutlierTensor | ReorderedTensor
_BATCH_BYTES = 256 << 20  # bytes of Orbax's arrays that are restored at a time


def weight_settings(spec: QuantizationSpec) -> dict[str, Any]:
    """Return the settings that stored numbers depend on, for JSON."""
    settings = {key: value for key, value in asdict(spec).items() if key not in _FREE}
    return {**settings, "rules": [dict(rule) for rule in settings["rules"]]}


@dataclass(frozen=True)
class NativeOrigin:
    """The arrays of a native checkpoint for a parameter.

    Attributes:
        first: their name: the parameter's, or that of another parameter with the same array.
        stored: abstract arrays of the parameter in the checkpoint.
        loaded: abstract arrays of the parameter for this machine's kernels.
        parts: the checkpoint's arrays by name.
    """

    first: str
    stored: Any
    loaded: Any
    parts: Mapping[str, Tensor]
    nbytes = 0  # none takes time to read: files are mapped, and read on use

    def source(self, shapes: Shapes) -> str:
        """Return a key that is equal for parameters with the same array; see `Origin.source`."""
        return self.first

    def read(self) -> Any:
        """The parameter in NumPy's arrays, of safetensors files views of the memory map."""
        arrays = [
            self.parts[name].read().astype(like.dtype, copy=False)
            for name, like in part_names(self.first, self.stored)
        ]
        values: Any = jax.tree.unflatten(jax.tree.structure(self.stored), arrays)
        if isinstance(values, ScaledTensor) and not isinstance(self.loaded, ScaledTensor):
            return values.dequantize(self.loaded.dtype)
        quantized = isinstance(self.loaded, Packed)
        return _as_here(values, _activations(self.loaded)) if quantized else values


type Source = Origin | NativeOrigin


def native_origins(
    model: AbstractModel,
    spec: ModelSpec,
    checkpoint: NativeCheckpoint,
    activations: Activations,
) -> tuple[AbstractModel, dict[str, NativeOrigin]]:
    """Return the model in the checkpoint's types, and the origin of each parameter.

    Args:
        model: a model whose parameters are all plain.
        spec: a specification with the same weights as the checkpoint.
        activations: how products with quantized parameters round activations.

    Raises:
        SpecError: the checkpoint has other weights.
        CheckpointError: the checkpoint is damaged.
        LoadError: the checkpoint belongs to another model.
    """
    _check_settings(spec, checkpoint)
    model = in_stored_types(model, _plain_types(model, checkpoint), activations)
    origins, used = dict[str, NativeOrigin](), set[str]()
    for name, parameter in zip(model.names, model.parameters, strict=True):
        first = checkpoint.same.get(name, name)
        packed = checkpoint.packed.get(first)
        stored = parameter
        if packed is not None:
            _check_shape(checkpoint, first, packed.shape, parameter.shape)
            stored = _abstract(checkpoint, first, packed)
        elif (scales := checkpoint.parts.get(f"{first}.scales")) is not None:
            stored = _abstract_scaled(checkpoint, first, parameter.shape, scales)
        for part, like in part_names(first, stored):
            used.add(part)
            tensor = _part(checkpoint, part)
            if packed is None:
                _check_shape(checkpoint, part, tensor.shape, like.shape)
            elif tensor.shape != like.shape or DTYPES[tensor.type] != like.dtype:
                found = f"{tensor.type} {list(tensor.shape)}"
                reason = f"{part} is {found}, but has to be {like.dtype} {list(like.shape)}"
                raise CheckpointError(checkpoint.path, f"{reason}; {AGAIN}")
        loaded = stored if packed is None else _as_here(stored, activations)
        if isinstance(stored, ScaledTensor) and not reads_16_bit_weights():
            loaded = parameter
        origins[name] = NativeOrigin(first, stored, loaded, checkpoint.parts)
    if left := sorted(checkpoint.parts.keys() - used):
        shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        raise LoadError(
            f"{checkpoint.path}: the specification has no place for {shown}; "
            f"use the spec.toml in the folder of the weights, or {AGAIN}"
        )
    return model, origins


def _check_settings(spec: ModelSpec, checkpoint: NativeCheckpoint) -> None:
    """Raise `SpecError` if the specification has other weights than the checkpoint."""
    usual = weight_settings(QuantizationSpec())
    for key, value in weight_settings(spec.quantization).items():
        made = checkpoint.settings.get(key, usual[key])
        if value not in (usual[key], made):
            raise SpecError(
                spec.path,
                f"quantization.{key}",
                f"cannot be chosen here: {checkpoint.path} is converted already, with {made!r}; "
                f"{AGAIN}",
            )


def _plain_types(model: AbstractModel, checkpoint: NativeCheckpoint) -> dict[str, str]:
    """Name of each parameter that is not quantized -> its type in the checkpoint."""
    firsts = {name: checkpoint.same.get(name, name) for name in model.names}
    parts = checkpoint.parts
    return {name: parts[first].type for name, first in firsts.items() if first in parts}


def batches(
    checkpoint: Checkpoint, origins: Mapping[str, Source]
) -> Iterator[Mapping[str, Source]]:
    """Divide origins into the batches that are read together.

    All are a single batch, except Orbax's: it restores many arrays in the time of one, here to the
    host's memory.
    """
    if not isinstance(checkpoint, OrbaxCheckpoint):
        yield origins
        return
    batch, size = dict[str, NativeOrigin](), 0
    for name, origin in origins.items():
        assert isinstance(origin, NativeOrigin), "the checkpoint is native"
        batch[name] = origin
        size += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(origin.stored))
        if size >= _BATCH_BYTES:
            yield _restored(checkpoint, batch)
            batch, size = {}, 0
    if batch:
        yield _restored(checkpoint, batch)


def _restored(
    checkpoint: OrbaxCheckpoint, batch: Mapping[str, NativeOrigin]
) -> dict[str, NativeOrigin]:
    arrays = (part_names(origin.first, origin.stored) for origin in batch.values())
    parts = restored_tensors(checkpoint, {name for own in arrays for name, _ in own})
    return {name: replace(origin, parts=parts) for name, origin in batch.items()}


def part_names(name: str, parameter: Any) -> list[tuple[str, Any]]:
    """The arrays of a parameter, quantized or not, with their names in a native checkpoint."""
    leaves = jax.tree.leaves_with_path(parameter)
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def _part(checkpoint: NativeCheckpoint, part: str) -> Tensor:
    if part not in checkpoint.parts:
        reason = f"has no tensor {part}: it is damaged, or not the specification's model"
        raise CheckpointError(checkpoint.path, f"{reason}; {AGAIN}")
    return checkpoint.parts[part]


def _check_shape(
    checkpoint: NativeCheckpoint, name: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    if shape != expected:
        raise LoadError(
            f"{checkpoint.path}: {name} is {list(shape)}, but the specification says "
            f"{list(expected)}; use the spec.toml in its folder, or {AGAIN}"
        )


def packing(tensor: Packed) -> PackedFormat:
    """Return the entry of a quantized parameter in a native checkpoint."""
    if isinstance(tensor, QuantizedTensor):
        return PackedFormat(tensor.shape, tensor.columns, asdict(tensor.format))
    if isinstance(tensor, ReorderedTensor):
        return replace(packing(tensor.rounded), reordered=True)
    count = int(tensor.outliers.values.shape[-1])
    return replace(packing(tensor.rounded), outliers=count)


def _as_here[T: (QuantizedTensor, OutlierTensor, ReorderedTensor)](
    tensor: T, activations: Activations
) -> T:
    """A parameter, with arrays or without, as this machine's kernels want it."""
    if isinstance(tensor, OutlierTensor | ReorderedTensor):
        return replace(tensor, rounded=_as_here(tensor.rounded, activations))
    columns = columns_here(tensor.format)
    if isinstance(tensor.words, jax.ShapeDtypeStruct):
        tensor = abstract(tensor.shape, tensor.format, columns)
    else:
        tensor = with_columns(tensor, columns)
    return replace(tensor, activations=activations)


def _activations(tensor: Packed) -> Activations:
    return (tensor if isinstance(tensor, QuantizedTensor) else tensor.rounded).activations


def _abstract(checkpoint: NativeCheckpoint, name: str, packed: PackedFormat) -> Packed:
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
    if packed.reordered:
        return abstract_reordered(rounded)
    return rounded if packed.outliers is None else abstract_outliers(rounded, packed.outliers)


def _abstract_scaled(
    checkpoint: NativeCheckpoint, name: str, shape: tuple[int, ...], scales: Tensor
) -> ScaledTensor:
    blocks = scales.shape[-1] if scales.shape else 0
    numbers = _part(checkpoint, f"{name}.numbers").type
    if numbers != "F8_E4M3" or scales.type != "F32" or block_of(shape[-1], blocks) is None:
        found = f"{numbers} with scales in {scales.type} {list(scales.shape)}"
        reason = f"{name} is in a format that is not known: {found}; update jinfer, or {AGAIN}"
        raise CheckpointError(checkpoint.path, reason)
    return abstract_scaled(shape, blocks)


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
