"""How many parameters a model has, and what memory it needs at each width."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from jinfer.model import AbstractModel, build
from jinfer.spec.blocks import LOOKUPS
from jinfer.spec.model import ModelSpec

WIDTHS = (2, 3, 3.5, 4, 5, 6, 8, 16, 32)
BLOCK = 32  # weights that share a scale and a base of 16 bits each, below a width of 16
WIDTHS_NOTE = (
    f"below 16 bits, each block of {BLOCK} weights has a scale and a base of 16 bits, "
    "which is one bit a weight; norms and biases keep 16 bits"
)


@dataclass(frozen=True)
class Sizes:
    """Counts of a model's parameters, and bytes of its cache.

    Attributes:
        embeddings: in tables that are looked up by token or position.
        matrices: in all other arrays of two axes or more, an untied head among them.
        vectors: in norms and biases.
        cache_per_token: bytes of keys and values of a token, at 16 bits.
        cross_per_token: the same of a token that an encoder has read.
    """

    embeddings: int
    matrices: int
    vectors: int
    cache_per_token: int = 0
    cross_per_token: int = 0

    @property
    def parameters(self) -> int:
        return self.embeddings + self.matrices + self.vectors

    def embedding_bytes(self, bits: float) -> int:
        """What the tables take at a width."""
        return round(self.embeddings * stored_bits(bits) / 8)

    def other_bytes(self, bits: float) -> int:
        """What all the rest takes."""
        vectors = self.vectors * max(bits, 16)
        return round((self.matrices * stored_bits(bits) + vectors) / 8)

    def total_bytes(self, bits: float) -> int:
        """What the whole model takes, without a cache."""
        return self.embedding_bytes(bits) + self.other_bytes(bits)


def stored_bits(bits: float) -> float:
    """Bits a weight takes with its share of its block's scale and base."""
    return bits if bits >= 16 else bits + 2 * 16 / BLOCK


def sizes_of(spec: ModelSpec, model: AbstractModel | None = None) -> Sizes:
    """The sizes of a model; `model` is what `build` makes of the specification."""
    model = model or build(spec, "float32")
    tables = set(_tables(spec))
    counts = {"embeddings": 0, "matrices": 0, "vectors": 0}
    for name, parameter in zip(model.names, model.parameters, strict=True):
        sort = "matrices" if len(parameter.shape) > 1 else "vectors"
        sort = "embeddings" if name.rpartition(".")[0] in tables else sort
        counts[sort] += prod(parameter.shape)
    cache = {"decoder": 0, "encoder": 0}
    for shape in model.caches.values():
        cache[shape.of] += 2 * shape.heads * (shape.key_dim + shape.value_dim)
    return Sizes(**counts, cache_per_token=cache["decoder"], cross_per_token=cache["encoder"])


def _tables(spec: ModelSpec) -> Iterator[str]:
    """Names of the modules that look rows up."""
    yield from (name for name, block in spec.shared if isinstance(block, LOOKUPS))
    for stack in spec.stacks:
        for name, block in stack.modules:
            if isinstance(block, LOOKUPS):
                yield f"{stack.name}.{name}"


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
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"
