"""Activation edits of single rows: tables of vectors, and their use by rows of a flat batch.

Edits are data: one program serves all vectors, ranges of tokens and requests at the same places.
The edit of a row at one activation is y = factor * x + shift, plus (x . along) * back if a
direction is projected out; `jinfer.engine.activation_use` brings edits into this form. Rows without
edits keep their bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

# Keys among block tables: tables of edits by activation; names of captured activations; images.
EDITS, CAPTURE, IMAGES = "edits", "capture", "images"


class EditTable(NamedTuple):
    """The edits of some sequences at one activation.

    Attributes:
        ranges: of each sequence (first position, the one after the last, its vector, step): the
            vector of position p is vector + step * (p - first). The ranges of a sequence do not
            overlap; empty ones fill the table up.
        shift: vectors that are added.
        factor: multiplies the activation before the addition; None: 1.
        along, back: the directions that are projected out; None: none.
    """

    ranges: Int[Array, "sequences ranges 4"]
    shift: Float[Array, "vectors ..."]
    factor: Float[Array, "vectors ..."] | None = None
    along: Float[Array, "vectors ..."] | None = None
    back: Float[Array, "vectors ..."] | None = None


class RowEdit(NamedTuple):
    """The edit of each row at one activation, as `EditTable`; the shift of unedited rows is -0.0.

    Attributes:
        edited: mask of edited rows; None: all rows have a shift alone.
    """

    shift: Float[Array, "1 rows ..."]
    factor: Float[Array, "1 rows ..."] | None = None
    along: Float[Array, "1 rows ..."] | None = None
    back: Float[Array, "1 rows ..."] | None = None
    edited: Bool[Array, "1 rows"] | None = None

    def select_rows(self, rows: Int[Array, " chosen"]) -> RowEdit:
        """Selects the edits of some rows."""
        return jax.tree.map(lambda part: part[:, rows], self)

    def applied(self, value: Array) -> Array:
        """Edits the rows of a value; keeps its type.

        Args:
            value: rows of any axes but the batch's, which may be absent.
        """
        if self.factor is None:
            # A reshape would end a fused call.
            same = self.shift.shape == value.shape
            shift = self.shift if same else self.shift.reshape(value.shape)
            return (value + shift).astype(value.dtype)
        assert self.edited is not None, "a factor needs the mask of edited rows"
        count = self.edited.size
        rows, edited = value.reshape(count, -1), self.edited.reshape(count, 1)
        shift, factor = self.shift.reshape(count, -1), self.factor.reshape(count, -1)
        wide = rows.astype(jnp.float32)
        # Not multiplied by 0: a set value may replace a non-finite one.
        new = jnp.where(factor == 0, shift, factor * wide + shift)
        if self.along is not None and self.back is not None:
            along, back = self.along.reshape(count, -1), self.back.reshape(count, -1)
            new = new + _dot(wide, along) * back
        return jnp.where(edited, new.astype(value.dtype), rows).reshape(value.shape)


class EditsInTurn(NamedTuple):
    """Two edits of one activation."""

    first: RowEdit
    second: RowEdit

    def select_rows(self, rows: Int[Array, " chosen"]) -> EditsInTurn:
        """Selects the edits of some rows."""
        return EditsInTurn(self.first.select_rows(rows), self.second.select_rows(rows))

    def applied(self, value: Array) -> Array:
        """Edits the rows of a value; keeps its type."""
        return self.second.applied(self.first.applied(value))


class ImageRows(NamedTuple):
    """What images change for the rows of a flat batch.

    Attributes:
        edits: their features, by activation.
        shifts: rotary positions by time, row and column, minus positions in the sequence; None:
            they are equal.
        ranges: the first and the last token of the range within which a row attends both ways; -1:
            it only attends to earlier tokens. None: all do.
        window_ranges: likewise, in attentions with a window alone.
    """

    edits: dict[str, RowEdit]
    shifts: Int[Array, "3 rows"] | None = None
    ranges: Int[Array, "2 rows"] | None = None
    window_ranges: Int[Array, "2 rows"] | None = None

    def before(self, edits: Mapping[str, RowEdit]) -> Mapping[str, RowEdit | EditsInTurn]:
        """The features, then the requests' edits."""
        both = self.edits.keys() & edits.keys()
        return {
            **self.edits,
            **edits,
            **{name: EditsInTurn(self.edits[name], edits[name]) for name in both},
        }


def _dot(a: Float[Array, "rows width"], b: Float[Array, "rows width"]) -> Array:
    """Computes the dot product of each pair of rows, [rows, 1].

    Halves are added, so that the order does not depend on the number of rows.
    """
    products = lax.optimization_barrier(a * b)
    while (width := products.shape[1]) > 1:
        products = jnp.pad(products, ((0, 0), (0, width % 2)))
        products = products[:, : (width + 1) // 2] + products[:, (width + 1) // 2 :]
    return products


def is_of_head(name: str) -> bool:
    """Whether a decoder's activation is computed by its head, after its layers."""
    return name.startswith("decoder.head.") or (name != "embed" and "." not in name)


def take_row_edits(
    tables: dict[str, Any], rows: Int[Array, " tokens"], positions: Int[Array, " tokens"]
) -> tuple[tuple[str, ...], dict[str, RowEdit]]:
    """Extracts the captured names, and the edits by activation, from block tables."""
    capture, edits = tables.pop(CAPTURE, {}), tables.pop(EDITS, {})
    return tuple(capture), {name: row_edit(each, rows, positions) for name, each in edits.items()}


def row_edit(
    table: EditTable, rows: Int[Array, " tokens"], positions: Int[Array, " tokens"]
) -> RowEdit:
    """Returns the edits of the rows of a flat batch.

    Args:
        rows: the sequence of each row; -1: padding.
        positions: of each in its sequence.
    """
    ranges, at = table.ranges[jnp.maximum(rows, 0)], positions[:, None]
    begin, end, vector, step = (ranges[..., i] for i in range(4))
    inside = (begin <= at) & (at < end) & (rows >= 0)[:, None]
    # Ranges do not overlap, so that there is one term at most.
    found = jnp.sum(jnp.where(inside, vector + step * (at - begin), 0), axis=1)
    edited = jnp.any(inside, axis=1)
    # x + -0.0 is x for every x, -0.0 included.
    chosen = edited.reshape(-1, *(1,) * (table.shift.ndim - 1))
    shift = jnp.where(chosen[None], _gather_rows(table.shift, found), jnp.float32(-0.0))
    if table.factor is None:
        return RowEdit(shift)
    parts = table.factor, table.along, table.back
    factor, along, back = (None if part is None else _gather_rows(part, found) for part in parts)
    return RowEdit(shift, factor, along, back, edited[None])


def _gather_rows(vectors: Float[Array, "vectors ..."], at: Int[Array, " rows"]) -> Array:
    """Gathers rows of a table by valid indices, with a batch axis."""
    return vectors.at[at].get(mode="promise_in_bounds", wrap_negative_indices=False)[None]
