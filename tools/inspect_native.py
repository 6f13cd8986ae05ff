"""Inspect a native (converted) checkpoint: its contents beside its specification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinfer.loader.checkpoint import Tensor
from jinfer.loader.checkpoint.native_checkpoint import NativeCheckpoint, PackedFormat
from jinfer.loader.checkpoint.orbax import OrbaxCheckpoint
from jinfer.loader.weights.tensor_mapping import by_name, lookup_origin
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.quant_format import FORMATS, QuantFormat
from jinfer.nn.abstract_model import AbstractModel

from .inspect_rows import CheckpointRows, MissingParameter, TensorRow


def match_converted(
    spec: ModelSpec, model: AbstractModel, checkpoint: NativeCheckpoint
) -> CheckpointRows:
    """A row for each stored parameter, however many arrays it consists of."""
    held = _held(checkpoint)
    rows = {name: TensorRow(tensor) for name, tensor in held.items()}
    sources = _sources(spec, model, checkpoint)
    missing, wrong = list[MissingParameter](), list[str]()
    for name, parameter in zip(model.names, model.parameters, strict=True):
        first = checkpoint.same.get(name, name)
        row = rows.get(first)
        if row is None:
            missing.append(MissingParameter(name, parameter.shape, (first,)))
            continue
        row.parameters.append(name)
        if row.tensor.shape != parameter.shape:
            row.note = "wrong shape"
            shapes = f"{list(row.tensor.shape)}, but the specification says {list(parameter.shape)}"
            wrong.append(f"{name} is {shapes}")
        elif name in sources:
            row.note = f"was {sources[name]}"
    for row in rows.values():
        row.note = row.note if row.parameters else "unused"
    return CheckpointRows(tuple(rows.values()), tuple(missing), tuple(wrong))


def _held(checkpoint: NativeCheckpoint) -> dict[str, Tensor]:
    """The parameters, in file order: quantized ones, and those with scales, as one tensor each."""
    held: dict[str, Tensor] = {}
    for name, part in checkpoint.parts.items():
        whole = next((p for p in _prefixes(name) if p in checkpoint.packed), None)
        owner = name.rpartition(".")[0]
        if whole is None and (numbers := checkpoint.parts.get(f"{owner}.numbers")):
            size = numbers.nbytes + checkpoint.parts[f"{owner}.scales"].nbytes
            kind = f"{numbers.type} scaled"
            held[owner] = Tensor(owner, numbers.shape, kind, size, part.read, part.raw)
            continue
        if whole is None:
            held[name] = part
            continue
        packed, before = checkpoint.packed[whole], held.get(whole)
        nbytes = part.nbytes + (before.nbytes if before else 0)
        held[whole] = Tensor(whole, packed.shape, _label(packed), nbytes, part.read, part.raw)
    return held


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _label(packed: PackedFormat) -> str:
    """A short name of a quantized parameter's format."""
    said: Mapping[str, Any] = packed.format
    known = f"q{said.get('width')}" in FORMATS and said.keys() <= QuantFormat.__annotations__.keys()
    if not known:
        return "an unknown format"
    table = said.get("codebook")
    format = QuantFormat(**{**said, "codebook": tuple(table) if table else None})
    label = format.name
    label += " in two levels" if said.get("two_level") else ""
    label += " of a table" if table and not format.can_be_requested else ""
    return label + (f", {packed.outliers} outliers" if packed.outliers is not None else "")


def _sources(spec: ModelSpec, model: AbstractModel, checkpoint: NativeCheckpoint) -> dict[str, str]:
    """Parameter name -> type of the tensor it was converted from."""
    files = by_name(checkpoint, spec.tensors)
    found = {}
    for name, parameter in zip(model.names, model.parameters, strict=True):
        place = spec.tensors.source_of(name)
        if place and (origin := lookup_origin(name, parameter.shape, place, files, checkpoint)[0]):
            found[name] = origin.files[0].type
    return found


def converted_facts(checkpoint: NativeCheckpoint) -> list[tuple[str, str]]:
    """Header lines of a converted checkpoint's report: (word, value)."""
    kind = "Orbax" if isinstance(checkpoint, OrbaxCheckpoint) else "safetensors"
    settings = ", ".join(f"{k} {v}" for k, v in checkpoint.settings.items() if v not in (None, []))
    return [
        ("format", f"converted, in {kind}; made from {checkpoint.format}"),
        ("made with", settings or "the usual settings"),
    ]
