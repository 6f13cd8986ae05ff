"""Checkpoint matching: which tensor is which parameter of a spec, and what is left over."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jinfer.cli.propose.checkpoint_layers import Shape, leaf_of, module_name, numbered
from jinfer.cli.propose.tensor_roles import roles_of
from jinfer.loader.checkpoint import Tensor
from jinfer.loader.checkpoint.native_checkpoint import NativeCheckpoint, PackedFormat
from jinfer.loader.checkpoint.orbax import OrbaxCheckpoint
from jinfer.loader.config.unused_config import consequences
from jinfer.loader.model_files import ModelFiles
from jinfer.loader.open_model import open_files
from jinfer.loader.resolve_model import family_of, resolve_model
from jinfer.loader.weights.grouped_blocks import described, grouped_format, kept_blocks
from jinfer.loader.weights.model_size import Sizes, sizes_of
from jinfer.loader.weights.tensor_mapping import (
    LoadError,
    Origin,
    by_name,
    differing_copies,
    lookup_origin,
    unused,
)
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import AbstractModel, build_abstract_model
from jinfer.quant_format import FORMATS, QuantFormat

_LEAF = re.compile(r"\.(weight|bias|gamma|beta)$")


@dataclass(frozen=True)
class ProposedLine:
    """A proposed line of a `[tensors]` table.

    Attributes:
        parameter: jinfer's name, with {i}.
        source: the file's name, with {i} and {e}.
        transpose: the file has the matrix as [inputs, outputs].
        reason: why it is proposed.
    """

    parameter: str
    source: str
    transpose: bool = False
    reason: str = "by its words"

    def __str__(self) -> str:
        plain = json.dumps(self.source, ensure_ascii=False)  # quoted as TOML does
        turned = f"{{ from = {plain}, transpose = true }}"
        return f'"{self.parameter}" = {turned if self.transpose else plain}'


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
    stored: Mapping[str, Any] = packed.format
    known = (
        f"q{stored.get('width')}" in FORMATS and stored.keys() <= QuantFormat.__annotations__.keys()
    )
    if not known:
        return "an unknown format"
    table = stored.get("codebook")
    format = QuantFormat(**{**stored, "codebook": tuple(table) if table else None})
    label = format.name
    label += " in two levels" if stored.get("two_level") else ""
    label += " of a table" if table and not format.can_be_requested else ""
    return label + (f", {packed.outliers} outliers" if packed.outliers is not None else "")


def _sources(spec: ModelSpec, model: AbstractModel, checkpoint: NativeCheckpoint) -> dict[str, str]:
    """Parameter name -> type of the tensor it was converted from."""
    files = by_name(checkpoint, spec.tensors)
    found = {}
    for name, parameter in zip(model.names, model.parameters, strict=True):
        place = spec.tensors.source_of(name)
        if place and (origin := lookup_origin(name, parameter.shape, place, files, checkpoint)[0]):
            found[name] = origin.tensors[0].type
    return found


def converted_facts(checkpoint: NativeCheckpoint) -> list[tuple[str, str]]:
    """Header lines of a converted checkpoint's report: (word, value)."""
    kind = "Orbax" if isinstance(checkpoint, OrbaxCheckpoint) else "safetensors"
    settings = ", ".join(f"{k} {v}" for k, v in checkpoint.settings.items() if v not in (None, []))
    return [
        ("format", f"converted, in {kind}; made from {checkpoint.format}"),
        ("made with", settings or "the usual settings"),
    ]


@dataclass
class TensorRow:
    """A tensor of the file.

    Attributes:
        parameters: the parameters it holds; "name[3]" is an index of a parameter's first axis.
        note: "", "unused", "ignored", "wrong shape" or "differs"; of a native one, its original
            type.
    """

    tensor: Tensor
    parameters: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def becomes(self) -> str:
        """What a matrix of a quantized checkpoint is in memory by default; "" for all others."""
        if not self.tensor.sources:
            return ""
        if kept_blocks(self.tensor.scaled, self.tensor.shape[-1]) is not None:
            return "kept"
        found = grouped_format([self.tensor], exact=False)
        return "decoded" if found is None else f"as {described(found.format)}"

    @property
    def type(self) -> str:
        """How it is stored, and what becomes of it."""
        return f"{self.tensor.type}, {self.becomes}" if self.becomes else self.tensor.type


@dataclass(frozen=True)
class MissingParameter:
    """A parameter without a tensor; `names` are those looked for, empty if unmapped."""

    parameter: str
    shape: tuple[int, ...]
    names: tuple[str, ...]


class CheckpointRows(NamedTuple):
    """Tensors, parameters without one, and tensors of a wrong shape, one clause each."""

    rows: tuple[TensorRow, ...]
    missing: tuple[MissingParameter, ...]
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointMatch:
    """Everything known of a checkpoint.

    Attributes:
        family: its name; "" if unknown.
        how: how the family was recognized.
        problem: why there is no specification.
        wrong: tensors of a wrong shape, one clause each.
        unread: keys of config.json or GGUF metadata that nothing looked up, with their values.
        consequences: those of them, with dots inside tables, that are known to change the
            computation -> their value, and how.
    """

    opened: ModelFiles
    family: str
    how: str
    problem: str = ""
    spec: ModelSpec | None = None
    sizes: Sizes | None = None
    rows: tuple[TensorRow, ...] = ()
    missing: tuple[MissingParameter, ...] = ()
    wrong: tuple[str, ...] = ()
    unread: Mapping[str, Any] = field(default_factory=dict)
    consequences: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    @property
    def unused(self) -> list[Tensor]:
        """Tensors the specification does not use."""
        return [row.tensor for row in self.rows if row.note == "unused"]

    @property
    def fits(self) -> bool:
        """Whether the model can be loaded."""
        misfits = self.unused or self.missing or self.wrong or self.refused
        return bool(self.spec) and not misfits

    @property
    def refused(self) -> bool:
        """Whether it is refused because of unsupported keys that change the computation."""
        return bool(self.consequences and self.spec and self.spec.trust_config == "refuse")


def describe(source: str | Path, overrides: Mapping[str, Any]) -> CheckpointMatch:
    """Describes a checkpoint as far as it is understood.

    Raises:
        SourceError, CheckpointError, SpecError: there is no checkpoint that can be opened.
    """
    opened = open_files(source, overrides)
    bare = tuple(TensorRow(tensor) for tensor in opened.checkpoint.tensors.values())
    family, how = "", ""
    try:
        family, how = _family(opened, overrides)
        spec, left = resolve_model(opened, overrides)
    except SpecError as error:
        problem = str(error).removeprefix(f"{opened.path}: ")
        return CheckpointMatch(opened, family, how, problem, rows=bare)
    model = build_abstract_model(spec, "float32")
    if isinstance(opened.checkpoint, NativeCheckpoint):
        rows, missing, wrong = match_converted(spec, model, opened.checkpoint)
    else:
        rows, missing, wrong = _match(opened, spec, model)
    sizes = sizes_of(spec, model)
    known = consequences(left, opened.config, spec)
    return CheckpointMatch(opened, family, how, "", spec, sizes, rows, missing, wrong, left, known)


def _family(opened: ModelFiles, overrides: Mapping[str, Any]) -> tuple[str, str]:
    if "family" in overrides:
        return Path(str(overrides["family"])).stem, "named on the command line"
    if "family" in opened.own:
        return Path(str(opened.own["family"])).stem, "named by the specification"
    if opened.describes_model:
        return opened.path.stem, "written out in the specification"
    found = Path(family_of(opened)).stem
    if opened.checkpoint.format == "llama2c":
        return found, "the family of llama2.c files"
    key = "architectures" if opened.config.get("architectures") else "model_type"
    key = "general.architecture" if opened.checkpoint.format == "gguf" else key
    return found, f"found by {key} = {', '.join(opened.architectures)}"


def _match(opened: ModelFiles, spec: ModelSpec, model: AbstractModel) -> CheckpointRows:
    checkpoint = opened.checkpoint
    rows = {name: TensorRow(tensor) for name, tensor in checkpoint.tensors.items()}
    files = by_name(checkpoint, spec.tensors)
    shapes = {n: p.shape for n, p in zip(model.names, model.parameters, strict=True)}
    origins: list[Origin] = []
    missing: list[MissingParameter] = []
    wrong: list[str] = []
    for name, shape in shapes.items():
        place = spec.tensors.source_of(name)
        origin, absent = (
            lookup_origin(name, shape, place, files, checkpoint) if place else (None, ())
        )
        if origin is None:
            missing.append(MissingParameter(name, shape, absent))
            continue
        origins.append(origin)
        for e, file in enumerate(origin.tensors):
            held = [part for part in origin.place.parts or (name,) if part in shapes]
            held = [f"{part}[{e}]" for part in held] if origin.stacked else held
            row = rows[file.name]
            row.parameters += [part for part in held if part not in row.parameters]
        try:
            origin.check(shapes)
        except LoadError as error:
            wrong.append(str(error).removeprefix(f"{checkpoint.path}: "))
            for file in origin.tensors:
                rows[file.name].note = "wrong shape"
    for tensor, reason in differing_copies(spec.tensors, files, origins):
        wrong.append(reason)
        rows[tensor.name].note = "differs"
    left = set(unused(model.names, spec.tensors, files, origins))
    for name, row in rows.items():
        if not row.parameters and not row.note:
            row.note = "unused" if name in left else "ignored"
    return CheckpointRows(tuple(rows.values()), tuple(missing), tuple(wrong))


def propose_lines(unused: list[Tensor], missing: Iterable[MissingParameter]) -> list[ProposedLine]:
    """Return lines for tensors that match a missing parameter, by name or else by shape."""
    missing_shapes: dict[str, dict[str, Shape]] = {}
    for item in missing:
        name = numbered(_LEAF.sub("", item.parameter), "i")
        missing_shapes.setdefault(name, {}).setdefault(leaf_of(item.parameter), item.shape)
    modules: dict[str, dict[str, Tensor]] = {}
    for tensor in unused:
        modules.setdefault(module_name(tensor.name), {}).setdefault(leaf_of(tensor.name), tensor)
    lines: dict[str, ProposedLine] = {}
    roles = roles_of(unused)
    for module, tensors in modules.items():
        role = roles.get(module, "")
        if role in missing_shapes and (
            fit := _fits(tensors, missing_shapes[role], "{e}" in module)
        ):
            lines[role] = ProposedLine(role, module, fit == "transposed")
    by_shape: dict[tuple[Shape, bool], list[str]] = {}
    for parameter, shapes in missing_shapes.items():
        if parameter not in lines:
            by_shape.setdefault((_first(shapes), "{i}" in parameter), []).append(parameter)
    taken = {line.source for line in lines.values()}
    free = {module: _first(t).shape for module, t in modules.items() if module not in taken}
    for (shape, in_layer), parameters in by_shape.items():
        alike = [m for m, own in free.items() if own == shape and ("{i}" in m) == in_layer]
        if len(alike) == len(parameters) == 1:
            lines[parameters[0]] = ProposedLine(parameters[0], alike[0], reason="by its shape")
    return list(lines.values())


def _first[T](of_leaves: Mapping[str, T]) -> T:
    """The line of the weight, if there is one."""
    return of_leaves.get("weight", next(iter(of_leaves.values())))


def _fits(tensors: Mapping[str, Tensor], missing_shapes: Mapping[str, Shape], stacked: bool) -> str:
    """Whether a module's tensors fit the missing parameters', as far as both have them."""
    found = set()
    for leaf in tensors.keys() & missing_shapes.keys():
        shape, own = missing_shapes[leaf][stacked:], tensors[leaf].shape
        found.add("as it is" if own == shape else "transposed" if own == shape[::-1] else "")
    return "" if "" in found or not found else "transposed" if "transposed" in found else "as it is"
