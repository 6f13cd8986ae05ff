"""Quantization plan: the type of each parameter, which are quantized, to which format, and how."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import DTYPES
from jinfer.loader.weights.gguf_blocks import repacked_format, repacked_tensor
from jinfer.loader.weights.grouped_blocks import (
    GroupedFormat,
    grouped_format,
    grouped_tensor,
    kept_blocks,
)
from jinfer.loader.weights.tensor_mapping import Origin, Shapes, parameter_shapes
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.quantization_table import (
    AUTO,
    PLAIN,
    QuantizationSpec,
    Role,
    RuleSpec,
    default_format,
)
from jinfer.modelspec.spec_errors import SpecError, nearest_hint
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.backend import backend
from jinfer.ops.matmul.dense import f16_as_int_is_faster, reads_16_bit_weights
from jinfer.quant import (
    OutlierTensor,
    QuantizedTensor,
    ReorderedTensor,
)
from jinfer.quant.calibration_stats import InputStats
from jinfer.quant.quantize_matrix import Method, quantize, quantize_with_outliers
from jinfer.quant.quantized_tensor import (
    MAX_COLUMNS,
    Activations,
    abstract,
    columns_of,
    with_columns,
)
from jinfer.quant.reordered_tensor import abstract_reordered
from jinfer.quant.scaled_tensor import abstract_scaled
from jinfer.quant.sparse_matrix import abstract_outliers, outlier_count
from jinfer.quant_format import F16_AS_INT, QuantFormat, parse_format

if TYPE_CHECKING:
    from jax.typing import DTypeLike


type Packed = QuantizedTensor | OutlierTensor | ReorderedTensor
_SIXTEEN_BITS = ("BF16", "F16")  # names of types in checkpoints


def columns_here(format: QuantFormat) -> int:
    """Columns of a superblock: what this machine's kernels read.

    The GPU's read whole superblocks of 1,024 weights.
    """
    if backend() == "gpu":
        return MAX_COLUMNS // format.per_code
    return columns_of(format)


def packed_for_target(values: Any) -> Any:
    """A parameter repacked for the kind of device in use (`jinfer.ops.backend.target_platform`)."""
    if isinstance(values, OutlierTensor | ReorderedTensor):
        return replace(values, rounded=packed_for_target(values.rounded))
    if isinstance(values, QuantizedTensor):
        repacked = with_columns(values, columns_here(values.format))
        return replace(repacked, activations=values.activations)
    return values


@dataclass(frozen=True)
class Storage:
    """How a parameter is stored as a `QuantizedTensor`.

    Attributes:
        format: format of its codes.
        as_in_file: whether the file has these codes.
        method: how other codes are found, see `jinfer.quant.quantize_matrix`.
        outliers: share of weights that are stored exactly.
        activations: see `QuantizedTensor`.
        lost: maximum error of a weight with the file's code, in steps.
        reordered: whether inputs are sorted by their groups, and their order is stored.
    """

    format: QuantFormat
    as_in_file: bool
    method: Method
    outliers: float
    activations: Activations
    lost: float = 0.0
    reordered: bool = False

    @property
    def columns(self) -> int:
        """See `columns_here`."""
        return columns_here(self.format)

    def abstract(self, shape: tuple[int, ...]) -> Packed:
        """Return the parameter's shapes and types; equal arguments return the same object."""
        return _abstract(self, shape, self.columns)

    def read(self, origin: Origin, shapes: Shapes) -> QuantizedTensor | ReorderedTensor:
        """A parameter with the file's codes, in NumPy's arrays. Raises `CheckpointError`."""
        rows = origin.rows(shapes)
        if origin.tensors[0].codes is not None:
            kept = GroupedFormat(self.format, self.lost, self.reordered)
            return self._activated(
                grouped_tensor(origin.tensors, origin.stacked, kept, rows, self.columns)
            )
        tensors = origin.tensors if origin.stacked else origin.tensors[0]
        halves = self.format == F16_AS_INT
        tensor = repacked_tensor(tensors, rows, columns=self.columns, halves=halves)
        assert tensor is not None, "the file has such codes"
        return self._activated(tensor)

    def quantize(
        self, values: np.ndarray, inputs: InputStats | None = None
    ) -> QuantizedTensor | OutlierTensor:
        """A parameter with these values, in NumPy's arrays.

        Args:
            inputs: what it is multiplied with, for `method` "gptq" or a weighted "mse".
        """
        known: dict[str, Any] = {"method": self.method, "columns": self.columns}
        if inputs is not None:
            known["importance"] = inputs.importance
            known["hessian"] = inputs.mean if self.method == "gptq" else None
        if self.outliers:
            return self._activated(
                quantize_with_outliers(values, self.format, self.outliers, **known)
            )
        return self._activated(quantize(values, self.format, **known))

    def _activated[T: Packed](self, tensor: T) -> T:
        if isinstance(tensor, OutlierTensor | ReorderedTensor):
            return replace(tensor, rounded=self._activated(tensor.rounded))
        return replace(tensor, activations=self.activations)


@lru_cache  # a model has hundreds of matrices, of few shapes
def _abstract(storage: Storage, shape: tuple[int, ...], columns: int) -> Packed:
    tensor = abstract(shape, storage.format, columns)
    if storage.reordered:
        return storage._activated(abstract_reordered(tensor))
    if not storage.outliers:
        return storage._activated(tensor)
    count = outlier_count(shape, storage.outliers)
    return storage._activated(abstract_outliers(tensor, count))


def plan_storages(
    model: AbstractModel, spec: ModelSpec, origins: Mapping[str, Origin], activations: Activations
) -> tuple[AbstractModel, dict[str, Storage]]:
    """The model in the types that its parameters are to have, and which of them are quantized.

    Args:
        model: as `build` gives it, all its parameters plain.
        activations: of products with quantized weights on a CPU.

    Raises:
        SpecError: a rule that matches nothing that could be quantized.
    """
    plain = in_stored_types(model, stored_types(model, spec.quantization, origins), activations)
    if reads_16_bit_weights():
        plain = with_fp8(plain, spec.quantization, origins)
    halves = as_whole_numbers(model.modules.dtype, activations)
    return plain, choose_storages(plain, spec.quantization, origins, activations, spec.path, halves)


def as_whole_numbers(dtype: DTypeLike, activations: Activations) -> bool:
    """Whether matrices in F16 are stored as integers here; see `jinfer.quant.f16_as_int`.

    Args:
        dtype: of the computation.
    """
    wider = np.dtype(dtype).itemsize > 2
    return wider and _are_rounded(activations) and reads_16_bit_weights() and f16_as_int_is_faster()


def in_stored_types(
    model: AbstractModel, types: Mapping[str, str], activations: Activations
) -> AbstractModel:
    """The model with its matrices in the checkpoint's types, where products read them so."""
    if not reads_16_bit_weights():
        return model
    return replace(with_types(model, types), rounded=_are_rounded(activations))


def _are_rounded(activations: Activations) -> bool:
    """Whether products with 16-bit matrices may round activations."""
    return activations in ("int8", "bf16")


def with_fp8(
    model: AbstractModel, spec: QuantizationSpec, origins: Mapping[str, Origin]
) -> AbstractModel:
    """The model with those matrices in FP8 that the checkpoint has so."""
    shapes = parameter_shapes(model)

    def kept(name: str, parameter: Any, role: Role) -> Any:
        if role == "plain" or name in model.normalized or _word(spec, name, role) != AUTO:
            return parameter
        origin = origins[name]
        blocks = {
            kept_blocks(tensor.scaled, tensor.shape[-1])
            for tensor in origin.tensors
            if tensor.shape
        }
        if not origin.is_rows(shapes) or len(blocks) != 1 or (count := blocks.pop()) is None:
            return parameter
        return abstract_scaled(parameter.shape, count)

    pairs = zip(model.names, model.parameters, model.roles, strict=True)
    return replace(model, parameters=tuple(kept(*pair) for pair in pairs))


def stored_types(
    model: AbstractModel, spec: QuantizationSpec, origins: Mapping[str, Origin]
) -> dict[str, str]:
    """Name of each parameter whose numbers may stay as they are -> their type in the checkpoint."""
    types = {}
    for name, role in zip(model.names, model.roles, strict=True):
        if name not in model.normalized and _word(spec, name, role) == AUTO:
            first, *others = {tensor.type for tensor in origins[name].tensors}
            if not others:
                types[name] = first
    return types


def with_types(model: AbstractModel, types: Mapping[str, str]) -> AbstractModel:
    """The model with its matrices in those of these types that have 16 bits, if its own is wider.

    What is not only multiplied with or looked up stays in the computation's type.

    Args:
        model: as `build` gives it, all its parameters plain.
        types: names of parameters -> types, as checkpoints name them.
    """

    def typed(name: str, parameter: Any, role: Role) -> Any:
        type_name = types.get(name)
        if role == "plain" or type_name not in _SIXTEEN_BITS or parameter.dtype.itemsize <= 2:
            return parameter
        return jax.ShapeDtypeStruct(parameter.shape, DTYPES[type_name])

    pairs = zip(model.names, model.parameters, model.roles, strict=True)
    return replace(model, parameters=tuple(typed(*pair) for pair in pairs))


def choose_storages(
    model: AbstractModel,
    spec: QuantizationSpec,
    origins: Mapping[str, Origin],
    activations: Activations,
    path: str,
    halves: bool = False,
) -> dict[str, Storage]:
    """Choose the parameters to quantize by rounding or search; `with_gptq` chooses for GPTQ.

    Args:
        activations: how products with them round activations.
        path: the specification's file, for errors.
        halves: see `repacked_format`.

    Raises:
        SpecError: a rule that matches no parameter that can be quantized, or too few bits.
    """
    storages, used, open_names = {}, set[RuleSpec](), list[str]()
    method: Method = "rtn" if spec.method == "rtn" else "mse"
    shapes = parameter_shapes(model)
    for name, parameter, role in zip(model.names, model.parameters, model.roles, strict=True):
        if role == "plain":
            continue
        rule = _rule_of(spec, name)
        if rule is not None:
            used.add(rule)
        elif prod(parameter.shape) < spec.threshold:
            continue
        outliers = spec.outliers
        if rule is not None and rule.outliers is not None:
            outliers = rule.outliers
        word = _word(spec, name, role)
        if word == AUTO:
            origin = origins[name]
            if not origin.is_rows(shapes) or name in model.normalized:
                continue
            tensors = origin.tensors if origin.stacked else origin.tensors[0]
            if (format := repacked_format(tensors, halves)) is not None:
                storages[name] = Storage(format, True, method, 0.0, activations)
            elif (found := grouped_format(origin.tensors, activations == "float")) is not None:
                kept = (found.lost, found.reordered)
                storages[name] = Storage(found.format, True, method, 0.0, activations, *kept)
        elif word != PLAIN:
            chosen = spec.budget is not None and word == spec.weights
            if chosen:
                open_names.append(name)
            format = candidates()[0] if chosen else parse_format(word)
            storages[name] = Storage(format, False, method, outliers, activations)
    for i, rule in enumerate(spec.rules):
        if rule not in used:
            names = {
                re.sub(r"\.\d+\.", ".*.", name).removesuffix(".weight")
                for name, role in zip(model.names, model.roles, strict=True)
                if role != "plain"
            }
            reason = f"{rule.match!r} matches no weight that the rules before it leave"
            raise SpecError(
                path,
                f"quantization.rules[{i}].match",
                f"{reason}; {nearest_hint(rule.match, names)}",
            )
    if spec.budget is None or not open_names:
        return storages
    try:
        return with_one_format(model, storages, open_names, spec.budget)
    except ValueError as error:
        raise SpecError(path, "quantization.weights", f"{spec.weights!r}: {error}") from None


def budgeted(model: AbstractModel, spec: QuantizationSpec) -> set[str]:
    """The parameters whose formats share a number of bits."""
    if spec.budget is None:
        return set()
    pairs = zip(model.names, model.roles, strict=True)
    return {n for n, role in pairs if role != "plain" and _word(spec, n, role) == spec.weights}


def with_one_format(
    model: AbstractModel, storages: Mapping[str, Storage], names: Collection[str], bits: float
) -> dict[str, Storage]:
    """Storages of these names in the widest format with which all together stay within the budget.

    Raises:
        ValueError: there is none.
    """
    every, least = matrices(model), 0.0
    for format in reversed(candidates()):
        own = {name: replace(storages[name], format=format) for name in names}
        least = _bits(model, {**storages, **own}, every)
        if least <= bits:
            return {**storages, **own}
    raise ValueError(f"the fewest bits are {least:.2f}, with scales and padding")


def matrices(model: AbstractModel) -> dict[str, tuple[int, ...]]:
    """The shapes of matrices, tables and heads by name."""
    pairs = zip(model.names, model.parameters, model.roles, strict=True)
    return {name: tuple(like.shape) for name, like, role in pairs if role != "plain"}


def _bits(
    model: AbstractModel, storages: Mapping[str, Storage], shapes: Mapping[str, tuple[int, ...]]
) -> float:
    """Bits of a weight."""
    size = sum(stored_size(model, storages, name) for name in shapes)
    return 8 * size / max(1, sum(map(prod, shapes.values())))


def stored_size(model: AbstractModel, storages: Mapping[str, Storage], name: str) -> int:
    """Bytes of a parameter."""
    like = model.parameters[model.names.index(name)]
    storage = storages.get(name)
    if storage is not None:
        return storage.abstract(like.shape).nbytes
    return sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(like))


def _rule_of(spec: QuantizationSpec, name: str) -> RuleSpec | None:
    return next((rule for rule in spec.rules if _matches(rule, name)), None)


def _word(spec: QuantizationSpec, name: str, role: Role) -> str:
    rule = _rule_of(spec, name)
    return rule.weights if rule is not None else default_format(spec, role)


def _matches(rule: RuleSpec, name: str) -> bool:
    """Rules name modules or parameters: "decoder.*.attn.v" is "decoder.*.attn.v.weight" as well."""
    return fnmatchcase(name, rule.match) or fnmatchcase(name.removesuffix(".weight"), rule.match)


# More widths, or blocks of 32 and 128 too, lower the divergence by less than 1%. The GPU's kernels
# look up tables of 16 values only.
_FORMATS = ("q2_b64_nl", "q3_b64_nl", "q4_b64_nl", "q5_b64_sym", "q6_b64_sym", "q8_b64")
_GPU_FORMATS = ("q2_b64", "q3_b64", *_FORMATS[2:])


def candidates() -> list[QuantFormat]:
    """Return the formats to choose from under a budget, in ascending order of their bits."""
    return [parse_format(name) for name in (_GPU_FORMATS if backend() == "gpu" else _FORMATS)]


def choose(sizes: np.ndarray, losses: np.ndarray, room: float) -> list[int]:
    """Choose formats under a budget: start with the narrowest, then widen where a bit gains most.

    Bits are the average over all matrices, embeddings and heads, with scales and padding.

    Args:
        sizes, losses: in bits and in divergence, [matrices, formats]; sizes ascend.
        room: sum of all sizes.
    """
    rows = np.arange(len(sizes))
    chosen = np.zeros(len(sizes), np.int64)
    while True:
        more = sizes - sizes[rows, chosen][:, None]
        gain = losses[rows, chosen][:, None] - losses
        left = room - sizes[rows, chosen].sum()
        rate = np.where((more > 0) & (more <= left), gain / np.maximum(more, 1), 0)
        best = int(rate.argmax())
        if rate.flat[best] <= 0:
            return chosen.tolist()
        chosen[best // sizes.shape[1]] = best % sizes.shape[1]


# Estimated seconds of a core, which progress bars count: for each byte that is read, each weight
# that is quantized, and with GPTQ each weight and token that is read: once to write it, twice to
# learn.
PER_BYTE, PER_PRODUCT, PASSES = 1e-9, 1.6e-10, 3
PER_WEIGHT: dict[Method, float] = {"rtn": 1e-8, "mse": 6e-8, "gptq": 4e-7}


def per_weight(storage: Storage | None) -> float:
    """Seconds of a core for each weight that is stored so.

    Args:
        storage: None: it is not quantized.
    """
    return 0.0 if storage is None or storage.as_in_file else PER_WEIGHT[storage.method]
