"""Image rows: the features of images in the prompts' chunks of one step, and what keeps them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jinfer.engine.prompt_images import ImageContent, Mask
from jinfer.engine.requests import EngineError
from jinfer.engine.scheduling.step_plan import PrefillChunk, StepPlan
from jinfer.nn.row_edits import IMAGES, ImageRows, RowEdit

if TYPE_CHECKING:
    from jaxtyping import Float


class ImageFeatures(NamedTuple):
    """What an encoder makes of an image.

    Attributes:
        rows: the hidden states at its placeholders.
        deepstack: what is added after each of the first layers (arXiv 2406.04334).
    """

    rows: Float[np.ndarray, "tokens hidden"]
    deepstack: Float[np.ndarray, "layers tokens hidden"]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.rows.nbytes + self.deepstack.nbytes


class ImageShapes(NamedTuple):
    """What a program's image rows have.

    Attributes:
        hidden: width of a feature.
        deepstack: number of layers after which features are added.
        grid: whether rows have rotary positions by time, row and column.
        mask: where rows attend to later ones.
        place: name of the activation that features replace.
    """

    hidden: int
    deepstack: int = 0
    grid: bool = False
    mask: Mask = "causal"
    place: str = "embed"

    def empty(self, rows: int) -> ImageRows:
        """Image rows without any image, in NumPy."""

        def features(filling: float) -> Any:
            return np.full((1, rows, self.hidden), filling, np.float32)

        # x + -0.0 is x for every x.
        names = [f"decoder.{layer}.x" for layer in range(self.deepstack)]
        edits: dict[str, Any] = {name: RowEdit(features(-0.0)) for name in names}
        factor: Any = np.zeros((1, rows, 1), np.float32)
        edited: Any = np.zeros((1, rows), np.bool_)
        edits[self.place] = RowEdit(features(0.0), factor, edited=edited)
        shifts: Any = np.zeros((3, rows), np.int32) if self.grid else None
        ranges: Any = None if self.mask == "causal" else np.full((2, rows), -1, np.int32)
        return ImageRows(edits, shifts, *((None, ranges) if self.mask == "window" else (ranges,)))


def abstract_image_rows(shapes: ImageShapes, rows: int) -> dict[str, Any]:
    """Abstract image rows, to stand among block tables."""
    return {IMAGES: jax.eval_shape(lambda: shapes.empty(rows))}


@dataclass(eq=False)
class EncodedImages:
    """The features of images, kept for requests with the same image.

    Attributes:
        shapes: of image rows.
        encode: the encoder.
        limit: bytes of features that are kept; those of the image in use are in addition.
        encoded: number of images that were encoded.
    """

    shapes: ImageShapes
    encode: Callable[[Any], ImageFeatures]
    limit: int
    encoded: int = 0
    _known: OrderedDict[bytes, ImageFeatures] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def features(self, image: ImageContent) -> ImageFeatures:
        """The features of an image. Raises `EngineError` for an encoder's wrong shapes."""
        if (known := self._known.get(image.digest)) is not None:
            self._known.move_to_end(image.digest)
            return known
        made, (_, hidden) = self.encode(image), (0, self.shapes.hidden)
        wanted = (image.tokens, hidden), (self.shapes.deepstack, image.tokens, hidden)
        if (made.rows.shape, made.deepstack.shape) != wanted:
            raise EngineError(
                f"an image's features have the shapes {made.rows.shape} and "
                f"{made.deepstack.shape}, but {wanted[0]} and {wanted[1]} are expected"
            )
        self.encoded += 1
        self._known[image.digest] = made
        self._bytes += made.nbytes
        while self._bytes > self.limit and len(self._known) > 1:
            self._bytes -= self._known.popitem(last=False)[1].nbytes
        return made

    def clear(self) -> None:
        """Drops all features."""
        self._known.clear()
        self._bytes = 0

    def rows_of(self, size: int, plan: StepPlan) -> ImageRows:
        """The image rows of a step of `size` rows: one of each decoding sequence, then chunks."""
        rows: Any = self.shapes.empty(size)
        for row, sequence in enumerate(plan.decoding):
            if rows.shifts is not None and sequence.block_tables is not None:
                rows.shifts[:, row] = sequence.block_tables.offset
        begin = len(plan.decoding)
        for chunk in plan.chunks:
            self._fill(rows, chunk, begin)
            begin += chunk.count
        return rows

    def _fill(self, rows: Any, chunk: PrefillChunk, begin: int) -> None:
        """Enters the images of one chunk, whose first row is `begin`."""
        images = chunk.sequence.request.images
        known = 0 if images is None else min(chunk.count, len(images.owner) - chunk.start)
        if rows.shifts is not None and images is not None:
            rows.shifts[:, begin : begin + chunk.count] = images.shift
        if images is None or known <= 0:
            return
        here, there = slice(begin, begin + known), slice(chunk.start, chunk.start + known)
        if rows.shifts is not None:
            rows.shifts[:, here] = images.shifts[:, there]
        for ranges in (rows.ranges, rows.window_ranges):
            if ranges is not None and images.ranges is not None:
                ranges[:, here] = images.ranges[:, there]
        owner, feature = images.owner[there], images.feature[there]
        place = self.shapes.place
        rows.edits[place].edited[0, here] = owner >= 0
        for index in np.unique(owner[owner >= 0]).tolist():
            found = self.features(images.spans[index].image)
            own = np.flatnonzero(owner == index)
            for name, values in ((place, found.rows), *_added(found)):
                rows.edits[name].shift[0, begin + own] = values[feature[own]]


def _added(found: ImageFeatures) -> list[tuple[str, Any]]:
    return [(f"decoder.{layer}.x", values) for layer, values in enumerate(found.deepstack)]
