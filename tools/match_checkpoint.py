"""Checkpoint matching: which tensor is which parameter of a spec, and what is left over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinfer.loader.checkpoint import Tensor
from jinfer.loader.checkpoint.native_checkpoint import NativeCheckpoint
from jinfer.loader.config.unused_config import consequences
from jinfer.loader.model_files import ModelFiles
from jinfer.loader.open_model import open_files
from jinfer.loader.resolve_model import family_of, resolve_model
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

from .inspect_native import match_converted
from .inspect_rows import CheckpointRows, MissingParameter, TensorRow


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
        for e, file in enumerate(origin.files):
            held = [part for part in origin.place.parts or (name,) if part in shapes]
            held = [f"{part}[{e}]" for part in held] if origin.stacked else held
            row = rows[file.name]
            row.parameters += [part for part in held if part not in row.parameters]
        try:
            origin.check(shapes)
        except LoadError as error:
            wrong.append(str(error).removeprefix(f"{checkpoint.path}: "))
            for file in origin.files:
                rows[file.name].note = "wrong shape"
    for tensor, reason in differing_copies(spec.tensors, files, origins):
        wrong.append(reason)
        rows[tensor.name].note = "differs"
    left = set(unused(model.names, spec.tensors, files, origins))
    for name, row in rows.items():
        if not row.parameters and not row.note:
            row.note = "unused" if name in left else "ignored"
    return CheckpointRows(tuple(rows.values()), tuple(missing), tuple(wrong))
