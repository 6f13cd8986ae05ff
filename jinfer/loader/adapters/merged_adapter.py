"""Merging a LoRA adapter: a checkpoint whose tensors have its terms in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from jinfer.loader.adapters.adapter_terms import (
    check_names,
    named_modules,
    read_magnitude,
    read_pair,
    saved_tensors,
)
from jinfer.loader.adapters.expert_terms import finite_sum, merged_stacks, with_lengths
from jinfer.loader.adapters.lora_adapter import LoraAdapter, LoraModule
from jinfer.loader.checkpoint import Checkpoint, Tensor
from jinfer.loader.checkpoint.native_checkpoint import NativeCheckpoint
from jinfer.loader.weights.tensor_mapping import LoadError, by_name
from jinfer.modelspec.blocks import HeadSpec
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.tensor_names import TensorMap, TensorSource
from jinfer.nn.abstract_model import AbstractModel


def merged(
    checkpoint: Checkpoint, adapter: LoraAdapter, model: AbstractModel, mapping: TensorMap
) -> Checkpoint:
    """The checkpoint with an adapter merged into its weights as they are read.

    W + scale B A of LoRA; DoRA's is that with rows of the magnitudes' lengths (arXiv 2402.09353).
    `modules_to_save` replace the model's tensors.

    Args:
        model: whose parameters say which tensors are transposed.

    Raises:
        LoadError: the adapter has a module or a shape that the checkpoint does not have.
    """
    if isinstance(checkpoint, NativeCheckpoint):
        raise LoadError(f"{checkpoint.path}: is quantized already; merge into what it was made of")
    check_names(adapter, checkpoint.format)
    tensors = by_name(checkpoint, mapping)
    transposed = set[str]()
    for name in model.names:
        place = mapping.source_of(name)
        for choice in () if place is None else place.candidates():
            transposed |= set(choice.names) if choice.transpose else set()
    changed = dict[str, Tensor]()
    matrices = named_modules(adapter, mapping)
    stacks, used = merged_stacks(adapter, model, mapping, matrices, tensors)
    changed |= {name: _computed(tensor, read) for name, (tensor, read) in stacks.items()}
    for name, module in adapter.modules.items():
        if name in used:
            continue
        known = [alias for alias, tensor in matrices.items() if tensor.name == f"{name}.weight"]
        found = next((alias for alias in known if alias in tensors), None)
        if found is None:
            raise LoadError(f"{adapter.path}: {name} is no matrix of {checkpoint.path}")
        turn = not transposed.isdisjoint(known)
        shape = module.shape[::-1] if turn else module.shape
        tensor = _as_plain(tensors[found]) if turn else tensors[found]
        if tensor.shape != shape:
            raise LoadError(
                f"{adapter.path}: {name} is for a matrix {list(module.shape)}, and that of "
                f"{checkpoint.path} is {list(tensor.shape)}: it belongs to another model"
            )
        read = partial(_merged_values, adapter, name, module, tensor.read, turn)
        changed[tensor.name] = _computed(tensor, read)
    for name, tensor in adapter.saved.items():
        known = [n for n in saved_tensors(adapter, mapping, name) if n in tensors]
        if not known:
            raise LoadError(f"{adapter.path}: {name} is no tensor of {checkpoint.path}")
        own = tensors[known[0]]
        if tensor.shape != own.shape:
            raise LoadError(
                f"{adapter.path}: {name} is {list(tensor.shape)}, and that of {checkpoint.path} "
                f"is {list(own.shape)}"
            )
        changed[own.name] = replace(tensor, name=own.name)
    digests = (*checkpoint.merged, adapter.digest)
    return replace(checkpoint, tensors={**checkpoint.tensors, **changed}, merged=digests)


def with_own_head(
    spec: ModelSpec, checkpoint: Checkpoint, adapter: LoraAdapter
) -> tuple[ModelSpec, Checkpoint]:
    """Untie the head of a model if an adapter that is merged changes the head.

    PEFT changes the head alone, even if it was tied to the embedding.
    """
    heads = {n: b for n, b in spec.shared if isinstance(b, HeadSpec) and b.tied}
    changed = {*named_modules(adapter, spec.tensors), *saved_tensors(adapter, spec.tensors)}
    tensors, table = by_name(checkpoint, spec.tensors), spec.tensors.source_of("embed.weight")
    embeds = [tensors[n] for n in _names(table) if n in tensors]
    for head, block in heads.items():
        own = [n for n in _names(spec.tensors.source_of(f"{head}.weight")) if n in changed]
        if own and embeds:
            untied = {**dict(spec.shared), head: replace(block, tied=False)}
            spec = replace(spec, shared=tuple(untied.items()))
            with_head = {**checkpoint.tensors, own[0]: replace(embeds[0], name=own[0])}
            checkpoint = replace(checkpoint, tensors=with_head)
    return spec, checkpoint


def _names(place: TensorSource | None) -> list[str]:
    return [] if place is None else [n for choice in place.candidates() for n in choice.names]


def _as_plain(tensor: Tensor) -> Tensor:
    """Transpose a quantized matrix: codes have outputs first, plain matrices here inputs."""
    if tensor.codes is None:
        return tensor
    return replace(tensor, shape=tensor.shape[::-1], read=lambda: tensor.read().T, codes=None)


def _computed(tensor: Tensor, read: Callable[[], np.ndarray]) -> Tensor:
    """A tensor of the same name and shape with other values, in float32."""

    def raw() -> np.ndarray:
        return np.ascontiguousarray(read()).reshape(-1).view(np.uint8)

    size = 4 * int(np.prod(tensor.shape))
    return replace(tensor, type="F32", nbytes=size, read=read, raw=raw, codes=None, scaled=None)


def _merged_values(
    adapter: LoraAdapter,
    name: str,
    module: LoraModule,
    read: Callable[[], np.ndarray],
    transposed: bool,
) -> np.ndarray:
    a, b = read_pair(adapter, name, module)
    weight = read().astype(np.float32)
    weight = weight.T if transposed else weight
    with np.errstate(over="ignore", invalid="ignore"):  # found by `finite_sum`
        term = np.float32(module.scale) * (b @ a)
    weight = finite_sum(weight, term, adapter, name)
    if module.magnitude is not None:
        weight = with_lengths(weight, read_magnitude(adapter, name, module), adapter, name)
    return weight.T if transposed else weight
