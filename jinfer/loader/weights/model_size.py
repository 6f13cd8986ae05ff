"""Model size: how many parameters a model has, and the memory they take at each width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.quantization_table import QuantizationSpec, Role, default_format
from jinfer.modelspec.tensor_names import TensorMap
from jinfer.quant_format import QuantFormat, parse_format

if TYPE_CHECKING:
    from jinfer.nn.abstract_model import AbstractModel

WIDTHS = (2, 3, 3.5, 4, 5, 6, 8, 16, 32)
WIDTHS_NOTE = (
    "below 16 bits as with quantization.weights = q4 and so on: each block of 32 weights has a "
    "scale and, below 8 bits, a base of 16 bits, and rows are padded, at 3.5 bits to 128 weights; "
    "stored: bits of a weight with all of that; embeddings and heads have 6 bits or more; "
    "norms, biases and positions keep 16"
)


@dataclass(frozen=True)
class Sizes:
    """Numbers of a model's parameters, shared parameters once, and bytes of its cache.

    Attributes:
        embeddings: numbers in tables that are looked up by token.
        matrices: numbers in other matrices.
        heads: numbers in an untied vocabulary head.
        plain: numbers that are never quantized: norms, biases, tables of positions.
        cache_per_token: bytes of keys and values of a token, at 16 bits.
        cross_per_token: the same for a token of an encoder.
        shapes: role, [outputs, inputs] and number of matrices and tables; empty if only the
            totals are known.
    """

    embeddings: int = 0
    matrices: int = 0
    heads: int = 0
    plain: int = 0
    cache_per_token: int = 0
    cross_per_token: int = 0
    shapes: tuple[tuple[Role, tuple[int, int], int], ...] = ()

    @property
    def parameters(self) -> int:
        return self.embeddings + self.matrices + self.heads + self.plain

    def embedding_bytes(self, bits: float) -> int:
        """Return the bytes of tables at a width."""
        return self._bytes("table", self.embeddings, bits)

    def other_bytes(self, bits: float) -> int:
        """Return the bytes of other parameters at a width."""
        counts: dict[Role, int] = {"matrix": self.matrices, "head": self.heads, "plain": self.plain}
        return sum(self._bytes(role, count, bits) for role, count in counts.items())

    def total_bytes(self, bits: float) -> int:
        """Return the bytes of the model without a cache."""
        return self.embedding_bytes(bits) + self.other_bytes(bits)

    def matrix_bits(self, bits: float) -> float:
        """Bits of a weight of the matrices at a width, with its share of all that is stored."""
        if not self.matrices:
            return stored_bits(bits)
        return 8 * self._bytes("matrix", self.matrices, bits) / self.matrices

    def _bytes(self, role: Role, count: int, bits: float) -> int:
        own = [(shape, often) for use, shape, often in self.shapes if use == role]
        if bits >= 16 or role == "plain" or not own:
            return round(count * stored_bits(bits, role) / 8)
        # Here: who knows only counts needs no JAX.
        from jinfer.quant.quantized_tensor import abstract

        format = _format(bits, role)
        return sum(often * abstract(shape, format).nbytes for shape, often in own)


def stored_bits(bits: float, role: Role = "matrix") -> float:
    """Bits that a weight takes at a width, with its share of its block's numbers; no padding."""
    if bits >= 16 or role == "plain":
        return max(bits, 16)
    return _format(bits, role).bits_per_weight


def _format(bits: float, role: Role) -> QuantFormat:
    return parse_format(default_format(QuantizationSpec(f"q{bits:g}"), role))


def sizes_of(spec: ModelSpec, model: AbstractModel | None = None) -> Sizes:
    """The sizes of a model; `model` is what `build_abstract_model` makes of the specification."""
    # Here, so that to show sizes that are known needs no JAX.
    from jinfer.nn.abstract_model import build_abstract_model
    from jinfer.nn.lora_rows import is_adapter
    from jinfer.ops.attention.kv_cache import ENCODER

    model = model or build_abstract_model(spec, "float32")
    counts, shapes = Counter[Role](), Counter[tuple[Role, tuple[int, int]]]()
    seen = set[Hashable]()
    for name, parameter, role in zip(model.names, model.parameters, model.roles, strict=True):
        source = _source(spec.tensors, name, parameter.shape)
        if source not in seen and not is_adapter(name):
            seen.add(source)
            counts[role] += prod(parameter.shape)
            if role != "plain":
                *stack, outputs, inputs = parameter.shape
                shapes[role, (outputs, inputs)] += prod(stack)
    cache = Counter[bool]()
    for shape in model.caches.values():
        cache[shape.group == ENCODER] += 2 * shape.elements()
    return Sizes(
        embeddings=counts["table"],
        matrices=counts["matrix"],
        heads=counts["head"],
        plain=counts["plain"],
        cache_per_token=cache[False],
        cross_per_token=cache[True],
        shapes=tuple((role, shape, often) for (role, shape), often in shapes.items()),
    )


def _source(tensors: TensorMap, name: str, shape: tuple[int, ...]) -> Hashable:
    """Return a key that is equal for parameters with the same source, which are a single array."""
    place = tensors.source_of(name)
    if place is None:
        return name
    return shape, tuple(
        (
            *(choice.names, choice.groups, choice.axis, choice.transpose),
            choice.parts.index(name) if choice.parts else None,
        )
        for choice in place.candidates()
    )


def bytes_text(count: float) -> str:
    """1610612736 -> "1.50 GiB"."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"


def count_text(count: float) -> str:
    """6738415616 -> "6.74B"."""
    rounded = float(f"{count:.3g}")
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if rounded >= size:
            return f"{rounded / size:g}{unit}"
    return f"{count:.0f}"


def gib_text(count: float) -> str:
    """1610612736 -> "1.50": GiB in at most five characters."""
    gib = count / 2**30
    digits = 3 if gib < 0.0995 else 2 if gib < 9.995 else 1 if gib < 99.95 else 0
    return f"{gib:.{digits}f}"
