"""Tensor mapping: the tensors of a checkpoint that a parameter is read from, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from jinfer.loader.checkpoint import Checkpoint, Tensor
from jinfer.loader.checkpoint.checkpoint_reader import DTYPES
from jinfer.loader.checkpoint.ggml_types import BLOCKS, PLAIN, decode
from jinfer.loader.checkpoint.mapped_file import release
from jinfer.modelspec.tensor_names import TensorMap, TensorSource
from jinfer.sandbox.sanitize import sanitized

if TYPE_CHECKING:
    from jinfer.nn.abstract_model import AbstractModel


# Of Mixtral's experts, which MLX names as others'.
_MLX_LEAVES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

type Shapes = Mapping[str, tuple[int, ...]]


class LoadError(ValueError):
    """Checkpoint and specification do not fit each other: names the file and the tensor."""

    def __init__(self, text: str) -> None:
        super().__init__(sanitized(text))


@dataclass(frozen=True)
class Origin:
    """The tensors of a parameter.

    Attributes:
        parameter: its name.
        tensors: a single tensor, or a tensor for each index of the parameter's first axis.
        stacked: whether it is the latter.
        place: the part of each tensor that belongs to the parameter.
        path: the checkpoint, for errors.
    """

    parameter: str
    tensors: tuple[Tensor, ...]
    stacked: bool
    place: TensorSource
    path: object

    @property
    def nbytes(self) -> int:
        """This parameter's share of what the tensors take in the file."""
        return sum(tensor.nbytes for tensor in self.tensors) // max(1, len(self.place.parts))

    def release(self) -> None:
        """Let the operating system take back the memory of the tensors' pages."""
        for tensor in self.tensors:
            for part in tensor.sources or (tensor,):
                release(part.raw())

    def source(self, shapes: Shapes) -> tuple[Any, ...]:
        """What `read` depends on: parameters of which this is equal have equal values."""
        parts = self.place.parts
        return (
            tuple(tensor.name for tensor in self.tensors),
            self.stacked,
            shapes[self.parameter],
            (self.place.groups, self.place.axis, self.place.transpose, self.place.pieces),
            self.place.sum,
            tuple(shapes.get(part) for part in parts),
            parts.index(self.parameter) if parts else None,
        )

    def read(self, shapes: Shapes, dtype: Any) -> np.ndarray:
        """Read the parameter's values; stacked tensors are converted to `dtype`.

        Args:
            shapes: of every parameter.

        Raises:
            LoadError: a tensor has another shape than in the specification.
            CheckpointError: the file is broken.
        """
        if not self.stacked:
            return self._read_tensor(self.tensors[0], shapes)
        values = np.empty(shapes[self.parameter], dtype)
        for e, tensor in enumerate(self.tensors):
            values[e] = self._read_tensor(tensor, shapes)
        return values

    def is_rows(self, shapes: Shapes) -> bool:
        """Whether each row of the parameter is a row of the tensors, in the same order."""
        dimensions = len(self.tensors[0].shape)
        return (
            not self._is_turned(self.tensors[0])
            and self.place.pieces == 1
            and dimensions + self.stacked == len(shapes[self.parameter])
            and (not self.place.parts or self.place.axis == dimensions - 2)
        )

    def rows(self, shapes: Shapes) -> np.ndarray | None:
        """Return the rows of each tensor that belong to the parameter, in order; None: all."""
        if not self.place.parts:
            return None
        tensor = self.tensors[0]
        numbers = np.arange(tensor.shape[-2]).reshape(*(1,) * (len(tensor.shape) - 2), -1, 1)
        return self.part(tensor, numbers, shapes).reshape(-1)

    def check(self, shapes: Shapes) -> None:
        """Raise `LoadError` if a tensor cannot be read, or has another shape than specified."""
        for tensor in self.tensors:
            if tensor.unreadable:
                raise LoadError(
                    f"{self.path}: {tensor.name}, which {self.parameter} is to be loaded from: "
                    f"{tensor.unreadable}; use weights of another type"
                )
            self._arranged(tensor, np.broadcast_to(np.int8(0), tensor.shape), shapes)

    def _read_tensor(self, tensor: Tensor, shapes: Shapes) -> np.ndarray:
        return self._arranged(tensor, tensor.read(), shapes)

    def _arranged(self, tensor: Tensor, values: np.ndarray, shapes: Shapes) -> np.ndarray:
        """A tensor's values as the parameter has them."""
        pieces = self.place.pieces
        if pieces > 1 and values.ndim and values.shape[0] % pieces == 0:
            values = values.reshape(pieces, -1, *values.shape[1:])
        # An entry for a module is for its bias as well, which has no inputs to change places with.
        if self._is_turned(tensor) and values.ndim > 1 and not self.parameter.endswith(".bias"):
            values = values.swapaxes(-1, -2)
        if self.place.parts:
            values = self.part(tensor, values, shapes)
        shape = shapes[self.parameter][self.stacked :]
        if self.place.sum and values.ndim > self.place.sum:
            values = values.sum(axis=self.place.sum, dtype=np.float32)
        # A convolution's kernel as a matrix, or a table of positions on a grid.
        if len(shape) == 2 < values.ndim and shape in (
            (values.shape[0], values[0].size),
            (values[..., 0].size, values.shape[-1]),
        ):
            values = values.reshape(shape)
        is_vector = len(shape) == 1 and values.size == shape[0]  # some have it in rows of groups
        if is_vector or _without_ones(values.shape) == _without_ones(shape):
            values = values.reshape(shape)
        if values.shape != shape:
            raise LoadError(
                f"{self.path}: {tensor.name} is {list(values.shape)} for {self.parameter}, "
                f"but the specification says {list(shape)}; "
                f"correct [dims], or how [{self.place.table}] maps it"
            )
        return values

    def _is_turned(self, tensor: Tensor) -> bool:
        """Whether a tensor has inputs first; codes of quantized checkpoints never have."""
        return self.place.transpose and tensor.codes is None

    def part(self, tensor: Tensor, values: np.ndarray, shapes: Shapes) -> np.ndarray:
        """The parameter's part of a fused tensor."""
        parts, groups, axis = self.place.parts, self.place.groups, self.place.axis
        # Each layer's part is as large; the model may have fewer layers than the file.
        same = shapes[self.parameter]
        alike = [part for part in parts if self.place.layers or part.endswith("._")]
        of_all = [shapes.get(part, same if part in alike else ())[self.stacked :] for part in parts]
        sizes = [shape[axis] for shape in of_all if len(shape) > axis]
        if values.shape[:1] == (len(parts),) and values.ndim == max(map(len, of_all)) + 1:
            values = values.reshape(-1, *values.shape[2:])  # on an axis of its own
        if (
            len(sizes) < len(parts)
            or values.shape[axis : axis + 1] != (sum(sizes),)
            or any(size % groups for size in sizes)
        ):
            along = f" along axis {axis}" if axis else ""
            raise LoadError(
                f"{self.path}: {tensor.name} is {list(values.shape)}, which does not split into "
                f"{' + '.join(map(str, sizes))} for {', '.join(parts)} in {groups} group(s){along}"
            )
        index = parts.index(self.parameter)
        begin, size = sum(sizes[:index]) // groups, sizes[index]
        before, after = values.shape[:axis], values.shape[axis + 1 :]
        grouped = values.reshape(*before, groups, -1, *after)
        every = (slice(None),) * (axis + 1)
        return grouped[(*every, slice(begin, begin + size // groups))].reshape(
            *before, size, *after
        )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without axes of length 1, which some files have and others leave out."""
    return tuple(size for size in shape if size != 1)


def parameter_shapes(model: AbstractModel) -> dict[str, tuple[int, ...]]:
    """Each parameter's name -> its shape."""
    return dict(zip(model.names, (p.shape for p in model.parameters), strict=True))


def find_origins(
    model: AbstractModel, checkpoint: Checkpoint, mapping: TensorMap
) -> dict[str, Origin]:
    """Find the tensors of each parameter of a model.

    Args:
        mapping: the checkpoint's names for the parameters.

    Raises:
        LoadError: a parameter without a tensor, a tensor without a parameter, or a shape or a copy
            that differs.
    """
    tensors = by_name(checkpoint, mapping)
    shapes = parameter_shapes(model)
    origins = {
        name: find_origin(name, shape, mapping, tensors, checkpoint)
        for name, shape in shapes.items()
    }
    # An unused tensor is a part of the model that the specification lacks.
    if left := unused(model.names, mapping, tensors, origins.values()):
        shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        raise LoadError(
            f"{checkpoint.path}: the specification has no place for {shown}; "
            f"map them in [{mapping.table}], or list them under {mapping.table}.ignore"
            f"{_by_when(mapping, left)}"
        )
    for origin in origins.values():  # before any of them is read
        origin.check(shapes)
    for _, reason in differing_copies(mapping, tensors, origins.values()):
        raise LoadError(f"{checkpoint.path}: {reason}")
    return origins


def _by_when(mapping: TensorMap, left: Sequence[str]) -> str:
    """Name the conditions without which these tensors would be used: a clause for an error."""
    owners = mapping.omitted_owners(left)[:3]
    conditions = [f'{owner.key} = "{owner.when}"' for owner in owners]
    return f"; left out by {' and '.join(conditions)}" if conditions else ""


def by_name(checkpoint: Checkpoint, mapping: TensorMap) -> dict[str, Tensor]:
    """Return the tensors by name, also without a prefix, and with the usual suffix."""
    tensors = dict(checkpoint.tensors)
    for prefix, usual in mapping.prefixes:
        for name, tensor in list(tensors.items()):  # a prefix may follow another
            if name.startswith(prefix) and (prefix or not name.startswith(usual)):
                tensors.setdefault(usual + name.removeprefix(prefix), tensor)
    for suffix, usual in mapping.suffixes:
        for name, tensor in list(tensors.items()):
            if name.endswith(f".{suffix}"):
                tensors.setdefault(name.removesuffix(suffix) + usual, tensor)
    return tensors


def unused(
    parameters: Iterable[str],
    mapping: TensorMap,
    tensors: Mapping[str, Tensor],
    origins: Iterable[Origin],
) -> list[str]:
    """Return the tensors without a parameter that are neither copies nor ignored."""
    used = {tensor.name for origin in origins for tensor in origin.tensors}
    copies = (name for _, names in mapping.copies for name in names)
    used |= {tensors[name].name for name in copies if name in tensors}
    if "logits.weight" not in parameters and (place := mapping.source_of("logits.weight")):
        names = (name for choice in place.candidates() for name in choice.names)
        used |= {tensors[name].name for name in names if name in tensors}
    return sorted({tensor.name for tensor in tensors.values()} - used - _ignored(mapping, tensors))


def _ignored(mapping: TensorMap, tensors: Mapping[str, Tensor]) -> set[str]:
    return {
        tensor.name
        for name, tensor in tensors.items()  # a pattern may be written with the prefix or without
        if any(fnmatchcase(name, pattern) for pattern in mapping.ignore)
    }


def find_origin(
    parameter: str,
    shape: tuple[int, ...],
    mapping: TensorMap,
    tensors: Mapping[str, Tensor],
    checkpoint: Checkpoint,
) -> Origin:
    """Find the tensors of a parameter.

    Args:
        mapping: the checkpoint's names for the parameters.
        tensors: its tensors by these names.

    Raises:
        LoadError: there is no name for it, or no tensor of that name.
    """
    place = mapping.source_of(parameter)
    if place is None:
        raise LoadError(
            f"{checkpoint.path}: the specification's [{mapping.table}] has no name for "
            f"{parameter}; add one"
        )
    found, missing = lookup_origin(parameter, shape, place, tensors, checkpoint)
    if found is None:
        raise LoadError(
            f"{checkpoint.path}: no tensor {' or '.join(missing)}, which {parameter} is to be "
            f"loaded from; {_alike(missing[0], tensors.values())}map it to another in "
            f"[{mapping.table}], or see whether a file is missing"
        )
    return found


def differing_copies(
    mapping: TensorMap, tensors: Mapping[str, Tensor], origins: Iterable[Origin]
) -> Iterator[tuple[Tensor, str]]:
    """Return the tensors that should be copies of a parameter but differ, with the reason.

    Raises:
        CheckpointError: the file is broken.
    """
    copies, ignored = dict(mapping.copies), _ignored(mapping, tensors)
    for origin in origins:
        for name in copies.get(origin.parameter, ()):
            own, copy = origin.tensors[0], tensors.get(name, origin.tensors[0])
            if copy is not own and copy.name not in ignored and not same_values(own, copy):
                yield (
                    copy,
                    f"{copy.name} differs from {own.name}, though the specification takes it "
                    f"for a copy; map it to a module of its own, or list it under "
                    f"{mapping.table}.ignore if it is not used",
                )


def _alike(name: str, tensors: Iterable[Tensor]) -> str:
    """Name the tensor of the same layer with the nearest name: a clause for an error."""
    numbers = re.findall(r"\d+", name)
    same = sorted({tensor.name for tensor in tensors if re.findall(r"\d+", tensor.name) == numbers})
    close = get_close_matches(name, same, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}? " if close else ""


def _constant(parameter: str, value: float) -> Tensor:
    """A number of the config as a tensor."""
    array = np.array([value], np.float32)
    name = f"{parameter} = {value}"  # by the names of its tensors, a parameter's values are known
    return Tensor(name, (1,), "F32", array.nbytes, lambda: array, lambda: array.view(np.uint8))


def _mlx_stack(name: str) -> str:
    """MLX's name for the stack of all experts' tensors: "block_sparse_moe.switch_mlp.up_proj"."""
    before, _, last = name.rpartition(".experts.{e}.")
    leaf, dot, end = last.partition(".")
    return f"{before}.switch_mlp.{_MLX_LEAVES.get(leaf, leaf)}{dot}{end}"


def lookup_origin(
    parameter: str,
    shape: tuple[int, ...],
    place: TensorSource,
    tensors: Mapping[str, Tensor],
    checkpoint: Checkpoint,
) -> tuple[Origin | None, tuple[str, ...]]:
    """The tensors of a parameter if the file has them; if not, a name it lacks of each choice."""
    missing = []
    if place.value is not None:
        given = _constant(parameter, place.value)
        return Origin(parameter, (given,), False, place, checkpoint.path), ()
    for choice, name in ((c, name) for c in place.candidates() for name in c.names):
        stacked = "{e}" in name
        full = [name.replace("{e}", str(e)) for e in range(shape[0] if stacked else 1)]
        absent = [name for name in full if name not in tensors]
        if not absent:
            found = tuple(tensors[name] for name in full)
            return Origin(parameter, found, stacked, choice, checkpoint.path), ()
        if stacked and (whole := tensors.get(_mlx_stack(name))) is not None:
            return Origin(parameter, (whole,), False, choice, checkpoint.path), ()
        missing.append(absent[0])
    return None, tuple(missing)


PIECE = 1 << 20  # weights


def row_reader(tensor: Tensor) -> Callable[[tuple[int, ...], Any], np.ndarray]:
    """A function of a matrix's index in its stack, and of rows: their values, float32.

    The index of a single matrix is ().
    """
    *stack, outputs, inputs = tensor.shape
    block = BLOCKS.get(tensor.type)
    plain = block is None or tensor.type in PLAIN or tensor.nbytes % block.bytes
    stored = tensor.read() if plain else tensor.raw().reshape(*stack, outputs, -1)

    def cut(index: tuple[int, ...], rows: Any) -> np.ndarray:
        part = stored[index][rows]
        size = (len(part), inputs)
        numbers = part.astype(np.float32) if plain else decode(tensor.type, part, size)
        release(part)
        return numbers

    return cut


def same_values(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same numbers; memory holds at most a few MB of each.

    Tensors of the same type are compared without decoding.

    Raises:
        CheckpointError: the file is broken.
    """
    if first.shape != second.shape or not first.shape:
        return False
    if first.type == second.type and (first.type in DTYPES or first.type in BLOCKS):
        return _same_bytes(first.raw(), second.raw())
    if len(first.shape) == 1:
        return np.array_equal(first.read().astype(np.float32), second.read().astype(np.float32))
    height = max(1, PIECE // first.shape[-1])
    read_first, read_second = row_reader(first), row_reader(second)
    return all(
        np.array_equal(read_first(index, rows), read_second(index, rows))
        for index in np.ndindex(*first.shape[:-2])
        for begin in range(0, first.shape[-2], height)
        for rows in [slice(begin, min(begin + height, first.shape[-2]))]
    )


def _same_bytes(first: np.ndarray, second: np.ndarray) -> bool:
    if first.size != second.size:
        return False
    if first.ctypes.data == second.ctypes.data:  # pickles store what is shared once
        return True
    for begin in range(0, first.size, 4 * PIECE):
        rows = slice(begin, begin + 4 * PIECE)
        if not np.array_equal(first[rows], second[rows]):
            return False
        release(first[rows])
        release(second[rows])
    return True
