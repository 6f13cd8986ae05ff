"""Adapter terms: the low-rank matrices of a LoRA adapter for each projection of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from jinfer.loader.adapters.expert_terms import find_stack
from jinfer.loader.adapters.lora_adapter import DAMAGED, LoraAdapter, LoraModule
from jinfer.loader.checkpoint import Checkpoint, Tensor
from jinfer.loader.weights.tensor_mapping import (
    LoadError,
    Origin,
    Shapes,
    by_name,
    parameter_shapes,
)
from jinfer.modelspec.tensor_names import TensorMap, TensorSource
from jinfer.nn.lora_rows import DORA_NORMS, LORA_A, LORA_B, LORA_FACTORS, AdapterSlots
from jinfer.quant.quantized_tensor import copy_to_huge_pages

if TYPE_CHECKING:
    from jaxtyping import Float

    from jinfer.nn.abstract_model import AbstractModel


_MERGE = "can only be merged into the weights: set merge = true"
_MAX_CODE = 127  # largest int8 code, of either sign


@dataclass(frozen=True)
class AdapterTerm:
    """The low-rank term b @ a of a projection; b includes the adapter's factor.

    Terms of experts' projections have a first axis of experts.

    Attributes:
        magnitude: DoRA's lengths of rows; None: a LoRA without them.
        norms: the terms of `jinfer.ops.matmul.lora`, once the weight is known.
    """

    a: Float[np.ndarray, "*experts rank inputs"]
    b: Float[np.ndarray, "*experts outputs rank"]
    magnitude: Float[np.ndarray, " outputs"] | None = None
    norms: Float[np.ndarray, "terms outputs"] | None = None


def check_names(adapter: LoraAdapter, format: str) -> None:
    """Raise `LoadError` if the model's file has other names, and other orders of rows."""
    if (adapter.format == "gguf") != (format == "gguf"):
        own, other = ("GGUF", "Hugging Face's") if format == "gguf" else ("Hugging Face's", "GGUF")
        raise LoadError(
            f"{adapter.path}: the adapter has {other} names of tensors, and the model's weights "
            f"have {own}; take an adapter or weights of the other format"
        )


def adapter_terms(
    adapter: LoraAdapter, model: AbstractModel, mapping: TensorMap, format: str
) -> dict[str, AdapterTerm]:
    """Name of each projection that an adapter changes, such as "decoder.3.attn.q" -> its term.

    Args:
        model: with room for adapters.
        mapping, format: the names of the model's file, and its format.

    Raises:
        LoadError: a module or a shape that the model does not have, too high a rank, or what can
            only be merged.
        CheckpointError: the adapter's file is broken.
    """
    slots = model.modules.adapters
    assert slots is not None, "it has room for adapters"
    check_names(adapter, format)
    _check_there(adapter, saved_tensors(adapter, mapping), model, mapping)
    _check_terms(adapter, slots)
    tensors = named_modules(adapter, mapping)
    shapes, used, terms = parameter_shapes(model), set[str](), dict[str, AdapterTerm]()
    for parameter in model.names:
        projection, _, leaf = parameter.rpartition(".")
        if leaf != LORA_A:
            continue
        weight = f"{projection}.weight"
        if (place := mapping.source_of(weight)) is None:
            continue
        find = _of_experts if len(shapes[weight]) == 3 else _of_matrix
        found, term = find(adapter, weight, place, tensors, shapes)
        used |= found
        if term is not None:
            terms[projection] = term
    if left := sorted(adapter.modules.keys() - used):
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        if adapter.has_experts and not slots.experts:
            raise LoadError(
                f"{adapter.path}: {left[0]}{more} is of experts, for which there is no room; set "
                "engine.expert_adapters, or merge it (merge = true)"
            )
        others = {name: tensor for name, tensor in tensors.items() if _module_of(tensor) in left}
        _check_there(adapter, others, model, mapping)
        raise LoadError(f"{adapter.path}: {left[0]}{more} {_MERGE}")
    return terms


def _check_there(
    adapter: LoraAdapter, tensors: Mapping[str, Tensor], model: AbstractModel, mapping: TensorMap
) -> None:
    """Raise `LoadError` if a tensor, by all names of it, is none of the model's."""
    places = (mapping.source_of(name) for name in (*model.names, "logits.weight"))
    choices = (choice for place in places if place for choice in place.candidates())
    known = {name for choice in choices for name in choice.names}
    stacks = [name for name in known if "{e}" in name]
    known |= {n.replace("{e}", str(e)) for n in stacks for e in range(_max_experts(model))}
    there = {tensor.name for name, tensor in tensors.items() if name in known}
    if absent := sorted({tensor.name for tensor in tensors.values()} - there):
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        reason = f"{absent[0].removesuffix('.weight')}{more} is no matrix of this model"
        raise LoadError(f"{adapter.path}: {reason}: the adapter belongs to another one")


def _max_experts(model: AbstractModel) -> int:
    shapes = parameter_shapes(model).values()
    return max((shape[0] for shape in shapes if len(shape) == 3), default=0)


def _check_terms(adapter: LoraAdapter, slots: AdapterSlots) -> None:
    if adapter.rank > slots.rank:
        raise LoadError(
            f"{adapter.path}: its rank is {adapter.rank}, and there is room for {slots.rank}; "
            "set engine.max_adapter_rank"
        )
    if adapter.saved:
        raise LoadError(f"{adapter.path}: {min(adapter.saved)} (modules_to_save) {_MERGE}")
    if adapter.has_magnitudes and not slots.magnitudes:
        raise LoadError(
            f"{adapter.path}: there is no room for magnitudes (DoRA); set engine.dora_adapters, or "
            "merge it (merge = true)"
        )


def named_modules(adapter: LoraAdapter, mapping: TensorMap) -> dict[str, Tensor]:
    """The matrices that an adapter changes, by all names that they may have in a model's file."""
    matrices = {}
    for name, module in adapter.modules.items():
        full = f"{name}.weight"
        matrices[full] = Tensor(full, module.shape, "F32", 0, module.b.read, module.b.raw)
        if module.experts and adapter.format == "peft":  # a parameter's own name
            matrices[name] = replace(matrices.pop(full), name=name)
    return by_name(Checkpoint(adapter.path, "safetensors", matrices, {}), mapping)


def saved_tensors(adapter: LoraAdapter, mapping: TensorMap, name: str = "") -> dict[str, Tensor]:
    """Return the adapter's tensors that replace the model's, by all names, or those of a name."""
    saved = {n: replace(t, name=n) for n, t in adapter.saved.items() if name in ("", n)}
    return by_name(Checkpoint(adapter.path, "safetensors", saved, {}), mapping)


def _of_matrix(
    adapter: LoraAdapter,
    weight: str,
    place: TensorSource,
    tensors: Mapping[str, Tensor],
    shapes: Shapes,
) -> tuple[set[str], AdapterTerm | None]:
    """The module with a projection's term, and this."""
    for choice in place.candidates():
        for name in choice.names:
            if name in tensors:
                found = Origin(weight, (tensors[name],), False, choice, adapter.path)
                return {_module_of(tensors[name])}, _term(adapter, found, shapes)
    return set(), None


def _of_experts(
    adapter: LoraAdapter,
    weight: str,
    place: TensorSource,
    tensors: Mapping[str, Tensor],
    shapes: Shapes,
) -> tuple[set[str], AdapterTerm | None]:
    """The modules with terms of some experts' matrices, and all experts' together."""
    stack = find_stack(adapter, weight, place, tensors, shapes)
    if stack is not None and adapter.modules[stack.name].experts:
        return {stack.name}, AdapterTerm(*stack.own())
    experts, outputs, inputs = shapes[weight]
    for choice in place.candidates():
        for name in (name for name in choice.names if "{e}" in name):
            found_files = {e: tensors.get(name.replace("{e}", str(e))) for e in range(experts)}
            if not (
                there := {e: tensor for e, tensor in found_files.items() if tensor is not None}
            ):
                continue
            rank = max(adapter.modules[_module_of(tensor)].rank for tensor in there.values())
            a = np.zeros((experts, rank, inputs), np.float32)
            b = np.zeros((experts, outputs, rank), np.float32)
            for e, tensor in there.items():
                found = Origin(weight, (tensor,), True, choice, adapter.path)
                term = _term(adapter, found, shapes)
                if term.magnitude is not None:
                    raise LoadError(
                        f"{adapter.path}: {_module_of(tensor)} has magnitudes (DoRA), and is an "
                        f"expert's: it {_MERGE}"
                    )
                a[e, : len(term.a)], b[e, :, : len(term.a)] = term.a, term.b
            return {_module_of(tensor) for tensor in there.values()}, AdapterTerm(a, b)
    return set(), None


def _module_of(tensor: Tensor) -> str:
    return tensor.name.removesuffix(".weight")


def _term(adapter: LoraAdapter, found: Origin, shapes: Shapes) -> AdapterTerm:
    name, place = _module_of(found.tensors[0]), found.place
    module = adapter.modules[name]
    a, b = read_pair(adapter, name, module)
    if place.axis or place.pieces > 1 or place.layers:
        raise LoadError(
            f"{adapter.path}: {name} holds several matrices of the model side by side; merge the "
            "adapter (merge = true)"
        )
    length = None if module.magnitude is None else read_magnitude(adapter, name, module)
    if place.parts:
        b = found.part(found.tensors[0], b, shapes)
        length = None if length is None else found.part(found.tensors[0], length, shapes)
    expected = shapes[found.parameter][found.stacked :]
    if (b.shape[0], a.shape[1]) != tuple(expected):
        raise LoadError(
            f"{adapter.path}: {name} is for a matrix {[b.shape[0], a.shape[1]]}, and "
            f"{found.parameter} is {list(expected)}: it belongs to another model"
        )
    length = None if length is None else length[:, 0]
    return AdapterTerm(a, module.scaled(b), length)


def read_magnitude(
    adapter: LoraAdapter, name: str, module: LoraModule
) -> Float[np.ndarray, "outputs 1"]:
    """A module's lengths of rows. Raises `LoadError` if they are not finite, or too few."""
    assert module.magnitude is not None, "it is a DoRA"
    length = module.magnitude.read().astype(np.float32)
    if length.size != module.shape[0] or not np.isfinite(length).all():
        reason = f"magnitudes {list(length.shape)} are no finite lengths of {module.shape[0]} rows"
        raise LoadError(f"{adapter.path}: {name}: its {reason}")
    return length.reshape(-1, 1)


def with_norms(
    terms: Mapping[str, AdapterTerm], weight_of: Callable[[str], np.ndarray], path: object
) -> dict[str, AdapterTerm]:
    """The terms with what DoRA has to know of the weights.

    Args:
        weight_of: gives the matrix of a projection, dequantized.
        path: of the adapter, for errors.

    Raises:
        LoadError: a row with the adapter's term in it is zero.
    """
    found = dict(terms)
    for projection, term in terms.items():
        if term.magnitude is None:
            continue
        weight, added = weight_of(projection).astype(np.float32), term.b @ term.a
        square = [np.einsum("oi,oi->o", *pair) for pair in ((weight,) * 2, (added,) * 2)]
        twice = 2 * np.einsum("oi,oi->o", weight, added)
        norms = np.stack([term.magnitude, square[0], twice, square[1]]).astype(np.float32)
        if not ((norms[1:].sum(axis=0) > 0).all() and np.isfinite(norms).all()):
            raise LoadError(f"{path}: {projection} has rows without a length with its terms")
        found[projection] = replace(term, norms=norms)
    return found


def read_pair(
    adapter: LoraAdapter, name: str, module: LoraModule
) -> tuple[Float[np.ndarray, "rank inputs"], Float[np.ndarray, "outputs rank"]]:
    """A module's matrices in float32. Raises `LoadError` if they are not finite."""
    a, b = module.read_a(), module.read_b()
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise LoadError(f"{adapter.path}: {name} has numbers that are not finite; {DAMAGED}")
    return a, b


def stacked(
    terms: Mapping[str, AdapterTerm], slot: int, stacks: Mapping[str, np.ndarray], path: object
) -> dict[str, np.ndarray]:
    """The stacks of all projections with an adapter in a slot, from 0; others' are zeros there.

    Args:
        stacks: name of each parameter of adapters -> its values.
        path: of the adapter, for errors.

    Raises:
        LoadError: numbers that are too large for the parameters' type.
    """
    changed = {}
    for name, before in stacks.items():
        projection, _, leaf = name.rpartition(".")
        after = copy_to_huge_pages(before)
        after[slot] = 0
        term = terms.get(projection)
        if term is not None and leaf == DORA_NORMS:
            after[slot] = 0 if term.norms is None else term.norms
        elif term is not None:
            own = _of_leaf(term, leaf, after.dtype)
            if leaf == LORA_FACTORS:
                after[slot, ..., : own.shape[-1]] = own
            else:
                after[slot, ..., : own.shape[-2], :] = own
            # Other rows multiply this slot by zeros where there is no grouped product.
            if not np.isfinite(after[slot].astype(np.float32)).all():
                raise LoadError(f"{path}: {projection} {_too_large(term, after.dtype)}")
        changed[name] = after
    return changed


def _too_large(term: AdapterTerm, dtype: np.dtype) -> str:
    """Return the error for a term that is not finite in a parameter's type."""
    if np.isfinite(term.a).all() and np.isfinite(term.b).all():
        helps = 'set engine.adapter_dtype = "int8", which has scales in float32, or dtype'
        return f'has numbers that are too large for {dtype}; {helps} = "float32"'
    return "has numbers that are too large for float32, times its scale (lora_alpha); lower that"


def _of_leaf(term: AdapterTerm, leaf: str, dtype: np.dtype) -> np.ndarray:
    """Return the part of a term for a parameter: [*experts, rank, ..], or [*experts, 2, rank]."""
    a, b = term.a, term.b.swapaxes(-1, -2)
    if leaf == LORA_FACTORS:
        return np.stack([_factors(a), _factors(b)], axis=-2)
    own = b if leaf == LORA_B else a
    if dtype != np.int8:
        with np.errstate(over="ignore"):  # infinite numbers are found by the caller
            return own.astype(dtype)
    factors = _factors(own)[..., None]
    with np.errstate(invalid="ignore"):  # so are infinite factors
        codes = np.rint(own / np.where(factors > 0, factors, 1))
        return np.clip(codes, -_MAX_CODE, _MAX_CODE).astype(np.int8)


def _factors(matrix: Float[np.ndarray, "*rows size"]) -> Float[np.ndarray, " *rows"]:
    """Return the factor of the codes of each row, whose largest number becomes the last code."""
    return np.abs(matrix).max(axis=-1) / np.float32(_MAX_CODE)
