"""Tensors of a quantized module: taken by their last names, checked, and joined to its weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import Checkpoint, CheckpointError, Tensor
from jinfer.loader.checkpoint.grouped_codes import GroupedCodes, ScaledValues, group_count

INSTEAD = "use the original weights, or the model as GGUF"


@dataclass(frozen=True)
class QuantSettings:
    """The quantization settings of a checkpoint (`quantization_config`).

    Attributes:
        table: its keys and values.
        path: the file, for errors.
        name: the table's key in the file, with dots; "": the file itself.
    """

    table: Mapping[str, Any]
    path: Path
    name: str = "quantization_config"

    def value(self, key: str) -> Any:
        """Return a value; None if there is none."""
        return self.table.get(key)

    def text(self, key: str, default: str = "") -> str:
        """A text, in small letters; "" or the default if there is none."""
        value = self.table.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "is not a text")
        return value.lower()

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.table.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "is not true or false")
        return value

    def number(self, key: str, *, among: Sequence[int] = (), default: int | None = None) -> int:
        """Return a whole number, which must be `among` these if they are given."""
        value = self.table.get(key, default)
        value = default if value is None else value
        if value is None:
            raise self.wrong(key, "is missing")
        if type(value) is not int or (among and value not in among):
            choices = f", expected {' or '.join(map(str, among))}" if among else ""
            raise self.wrong(key, f"is {str(value)[:40]!r}{choices}")
        return value

    def inner(self, key: str) -> QuantSettings | None:
        """A table of the table; None if there is none."""
        value = self.table.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, "is not a table")
        return QuantSettings(value, self.path, self._full(key))

    def wrong(self, key: str, reason: str) -> CheckpointError:
        """An error about a key."""
        return CheckpointError(self.path, f"{self._full(key)} {reason}")

    def refused(self, what: str) -> CheckpointError:
        """An error about a way to quantize that cannot be read."""
        name = self.name or "it"
        return CheckpointError(
            self.path, f"{name} says {what}, which jinfer does not read: {INSTEAD}"
        )

    def _full(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key


FLOATS = ("F16", "BF16", "F32")
WORDS = ("I32", "U32")
INDICES = ("I32", "I64")


class TensorTable:
    """The tensors of a checkpoint, where the tensors of a quantized module are joined."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._tensors = dict(checkpoint.tensors)

    @property
    def path(self) -> Path:
        """The checkpoint's, for errors."""
        return self._checkpoint.path

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the file."""
        return self._checkpoint.metadata

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The current tensors by name."""
        return self._tensors

    def checkpoint(self) -> Checkpoint:
        """The checkpoint with the tensors that there are now."""
        return replace(self._checkpoint, tensors=self._tensors)

    def modules(self, leaf: str, types: Sequence[str] = ()) -> Iterator[ModuleTensors]:
        """The modules that have a tensor of this last name, such as "qweight".

        Args:
            types: those that it may have; none: any.
        """
        for name, tensor in list(self._tensors.items()):
            if name.endswith(f".{leaf}") and (not types or tensor.type in types):
                yield ModuleTensors(self, name.removesuffix(leaf))

    def find(self, name: str) -> Tensor | None:
        """A tensor by its full name."""
        return self._tensors.get(name)

    def take(self, name: str) -> None:
        """Remove a tensor, if it is there."""
        self._tensors.pop(name, None)

    def drop(self, leaves: Iterable[str]) -> None:
        """Remove all tensors of these last names: what a model computes the same without."""
        ends = tuple(f".{leaf}" for leaf in leaves)
        for name in [name for name in self._tensors if f".{name}".endswith(ends)]:
            del self._tensors[name]

    def put(self, tensor: Tensor) -> None:
        """Add or replace a tensor."""
        self._tensors[tensor.name] = tensor

    def fail(self, name: str, reason: str) -> CheckpointError:
        """An error about a tensor."""
        return CheckpointError(self.path, f"tensor {name[:200]!r}: {reason}")


@dataclass(frozen=True)
class ModuleTensors:
    """The tensors of a module.

    Attributes:
        table: all tensors.
        prefix: the beginning of their names: "model.layers.0.self_attn.q_proj.".
    """

    table: TensorTable
    prefix: str

    def find(
        self, leaf: str, types: Sequence[str], shape: Sequence[int | None] | None = None
    ) -> Tensor | None:
        """A tensor of the module, if it has it.

        Args:
            types: those that it may have.
            shape: that it must have; None in it: any size. None: any shape.

        Raises:
            CheckpointError: it is another type or shape.
        """
        tensor = self.table.find(self.prefix + leaf)
        if tensor is None:
            return None
        if tensor.type not in types:
            raise self.fail(leaf, f"is {tensor.type}, expected {' or '.join(types)}")
        if shape is not None and not (
            len(tensor.shape) == len(shape)
            and all(size in (None, own) for size, own in zip(shape, tensor.shape, strict=True))
        ):
            expected = ", ".join("any" if size is None else str(size) for size in shape)
            reason = f"is {list(tensor.shape)}, but [{expected}] fits the other tensors"
            raise self.fail(leaf, reason)
        return tensor

    def need(
        self, leaf: str, types: Sequence[str], shape: Sequence[int | None] | None = None
    ) -> Tensor:
        """Return a tensor as `find` does; raise if it is missing."""
        tensor = self.find(leaf, types, shape)
        if tensor is None:
            raise self.fail(
                leaf, "is missing, but there are others of its module: is a file missing?"
            )
        return tensor

    def has(self, leaf: str) -> bool:
        """Whether the module has a tensor of this last name."""
        return self.table.find(self.prefix + leaf) is not None

    def fail(self, leaf: str, reason: str) -> CheckpointError:
        """Return an error about a tensor of the module."""
        return self.table.fail(self.prefix + leaf, reason)

    def group_size(self, leaf: str, inputs: int, groups: int, stated: Iterable[Any]) -> int:
        """Return the stated size that fits the number of groups, or the size of equal groups.

        Args:
            leaf: last name of the tensor of scales.
            stated: sizes in the settings; other values than sizes are ignored.
        """
        if groups == 1:
            return max(1, inputs)
        for size in stated:
            if type(size) is int and size > 0 and group_count(inputs, size) == groups:
                return size
        if not groups or inputs % groups:
            raise self.fail(leaf, f"has {groups} groups for {inputs} inputs, unlike group_size")
        return inputs // groups

    def input_groups(
        self, leaf: str, inputs: int, groups: int, group: int
    ) -> Callable[[], np.ndarray] | None:
        """Return the group of each input, if a tensor has others than input // group.

        All -1 is a placeholder for none.
        """
        indices = self.find(leaf, INDICES, (inputs,))
        order = None if indices is None else np.asarray(indices.read()).astype(np.int64)
        usual = np.arange(inputs) // group
        if order is None or (order == -1).all() or np.array_equal(order, usual):
            return None
        if not 0 <= int(order.min()) <= int(order.max()) < groups:
            raise self.fail(leaf, f"names a group that is not one of the {groups}")
        return lambda: order

    def join(
        self,
        type_name: str,
        parts: Sequence[Tensor | None],
        codes: GroupedCodes,
        *,
        unneeded: Iterable[str] = (),
        leaf: str = "weight",
    ) -> None:
        """Replace the parts by the matrix.

        Args:
            type_name: the storage type, for messages.
            unneeded: last names of other tensors, which are dropped.
        """
        self.join_values(
            type_name, parts, codes.shape, codes.dequantize, codes, unneeded=unneeded, leaf=leaf
        )

    def join_values(
        self,
        type_name: str,
        parts: Sequence[Tensor | None],
        shape: tuple[int, ...],
        read: Callable[[], np.ndarray],
        codes: GroupedCodes | None = None,
        *,
        unneeded: Iterable[str] = (),
        leaf: str = "weight",
        scaled: ScaledValues | None = None,
    ) -> None:
        """Replace the parts by a matrix that is decoded on reading, or kept as in `scaled`."""
        sources = tuple(part for part in parts if part is not None)
        for name in (
            *(part.name for part in sources),
            *(self.prefix + other for other in unneeded),
        ):
            self.table.take(name)
        # NaN and infinity are values like others.
        read = np.errstate(all="ignore")(read)
        if self.has(leaf):
            raise self.fail(leaf, f"exists as well as {sources[0].name[:200]!r}: which is meant?")
        self.table.put(
            Tensor(
                self.prefix + leaf,
                shape,
                type_name,
                sum(part.nbytes for part in sources),
                read,
                lambda: np.concatenate([part.raw() for part in sources]),
                codes=codes,
                scaled=scaled,
                sources=sources,
            )
        )


def as_float32(tensor: Tensor) -> np.ndarray:
    """Its values in float32."""
    return tensor.read().astype(np.float32)
