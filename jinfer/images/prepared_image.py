"""Prepared image: patches for the encoder, and the placeholders for the prompt."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from jinfer.images.decode_image import (
    ImageError,
    ImageLimits,
    ImageSource,
    decode_image,
    pillow,
)
from jinfer.images.size_rules import CanvasPlan, ImagePlan, Pair, ResizeStep, plan_image, unpadded
from jinfer.modelspec.image_table import ImageLayoutSpec, ImageSpec

if TYPE_CHECKING:
    from jaxtyping import Float32, Int32, UInt8
    from PIL.Image import Image

NUMBER = "{number}"  # in a layout's texts: the number of the image in its prompt, from 0
_PLACE = re.compile(r"\{(\w+)\}")

type _Parts = Mapping[str, Sequence[str | int]]  # places of a text -> what they become


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """An image as the encoder and the prompt take it.

    Attributes:
        patches: in the encoder's order; tiles of fewer patches are padded with zeros.
        grids: rows and columns of each tile's patches.
        token_grid: rows and columns of the features of an image of one tile, else (1, tokens).
        order: tile and place in the tile of the feature of each placeholder; tile -1 is the learned
            vector that ends a row of features.
        layout: texts and numbers of placeholders that replace the image's marker.
    """

    patches: Float32[np.ndarray, "tiles patches values"]
    grids: tuple[Pair, ...]
    token_grid: Pair
    order: Int32[np.ndarray, "tokens 2"]
    layout: tuple[str | int, ...]

    @property
    def tokens(self) -> int:
        """The number of placeholders."""
        return len(self.order)

    @cached_property
    def digest(self) -> bytes:
        """A hash of all that features follow from, apart from the weights."""
        shapes = repr((self.patches.shape, self.grids, self.token_grid, self.layout))
        hashed = hashlib.blake2b(shapes.encode(), digest_size=32)
        hashed.update(np.ascontiguousarray(self.patches))
        hashed.update(np.ascontiguousarray(self.order))
        return hashed.digest()


def prepare_image(
    source: ImageSource, spec: ImageSpec, limits: ImageLimits | None = None
) -> PreparedImage:
    """Decode an image, resize and cut it by the rule of a specification, and make patches.

    Args:
        source: an encoded image, an image of Pillow's, or UInt8[height, width], [..., 3] or
            [..., 4] (RGBA).

    Raises:
        ImageError: Pillow is not installed, or the image cannot be used.
    """
    limits = limits or ImageLimits()
    most = spec.max_pixels if limits.max_pixels is None else limits.max_pixels
    image = decode_image(source, ImageLimits(limits.max_bytes, most), spec.alpha)
    plan = plan_image((image.height, image.width), spec)
    grids = patch_grids(plan, spec)
    tiles = [_patches(t, spec) for canvas in plan.canvases for t in _cut(image, canvas, spec)]
    longest = max(map(len, tiles))
    padded = [np.pad(tile, ((0, longest - len(tile)), (0, 0))) for tile in tiles]
    token_grids = [(rows // spec.merge, columns // spec.merge) for rows, columns in grids]
    order = _feature_order(plan, token_grids)
    return PreparedImage(
        patches=np.stack(padded),
        grids=grids,
        token_grid=token_grids[0] if len(grids) == 1 else (1, len(order)),
        order=order,
        layout=_layout(plan, token_grids, len(order), spec.layout),
    )


def patch_grids(plan: ImagePlan, spec: ImageSpec) -> tuple[Pair, ...]:
    """Return rows and columns of the patches of each tile, in the encoder's order.

    Raises:
        ImageError: the rule of sizes does not fit the sizes of patches and tokens.
    """
    grids: list[Pair] = []
    for canvas in plan.canvases:
        height, width = canvas.tile
        grid = (height // spec.patch, width // spec.patch)
        if not all(side and side % spec.merge == 0 for side in grid):
            token = f"{spec.merge} x {spec.merge} patches of {spec.patch} pixels"
            raise ImageError(f"a tile of {height} x {width} pixels is not whole tokens of {token}")
        grids += [grid] * math.prod(canvas.grid)
    return tuple(grids)


def _cut(
    image: Image, canvas: CanvasPlan, spec: ImageSpec
) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    """Apply the steps of a plan and yield the tiles, row by row."""
    module = pillow()
    for step in canvas.steps:
        height, width = step.size
        if isinstance(step, ResizeStep):
            # Columns first, as torchvision does: the result is rounded to bytes in between, and
            # versions of Pillow take the two passes in different orders.
            for size in ((width, image.height), (width, height)):
                image = image.resize(size, module.Resampling(spec.resample))
            continue
        colour = tuple(int(mean * 255) for mean in spec.mean) if step.mean else (0, 0, 0)
        whole = module.new("RGB", (width, height), colour)
        whole.paste(image, (step.offset[1], step.offset[0]))
        image = whole
    pixels, (height, width) = np.asarray(image), canvas.tile
    for row in range(canvas.grid[0]):
        for column in range(canvas.grid[1]):
            yield pixels[row * height :, column * width :][:height, :width]


def _patches(
    tile: UInt8[np.ndarray, "height width 3"], spec: ImageSpec
) -> Float32[np.ndarray, "patches values"]:
    """Make a tile patches, rows of `channel`, height and width, and normalize them."""
    rows, columns = tile.shape[0] // spec.patch, tile.shape[1] // spec.patch
    merge = spec.merge if spec.order == "merged" else 1
    last = spec.channel == "last"
    shape = (rows // merge, merge, spec.patch, columns // merge, merge, spec.patch, 3)
    blocks = tile[: rows * spec.patch, : columns * spec.patch].reshape(shape)
    blocks = blocks.transpose(0, 3, 1, 4, *((2, 5, 6) if last else (6, 2, 5)))
    kind = ml_dtypes.bfloat16 if spec.rounding == "bfloat16" else np.float32
    pixels = blocks.reshape(rows * columns, *((-1, 3) if last else (3, -1)))
    values = (pixels * np.float32(spec.factor)).astype(kind, copy=False)
    mean, std = (np.array(each, kind) for each in (spec.mean, spec.std))
    values -= mean if last else mean[:, None]
    values /= std if last else std[:, None]
    return values.reshape(rows * columns, -1).astype(np.float32, copy=False)


def _feature_order(plan: ImagePlan, grids: list[Pair]) -> Int32[np.ndarray, "tokens 2"]:
    """Find the features of the placeholders."""
    if plan.unpad is None or plan.tiles is None:
        tiles = [np.full(math.prod(grid), k) for k, grid in enumerate(grids)]
        places = [np.arange(math.prod(grid)) for grid in grids]
        return np.stack([np.concatenate(tiles), np.concatenate(places)], 1).astype(np.int32)
    (rows, columns), (height, width) = plan.tiles.grid, grids[-1]
    found = [(0, place) for place in range(math.prod(grids[0]))]
    used_rows, used_columns = unpadded((rows * height, columns * width), plan.unpad)
    for row in used_rows:
        for column in used_columns:
            tile = 1 + row // height * columns + column // width
            found.append((tile, row % height * width + column % width))
        found.append((-1, 0))
    return np.array(found, np.int32)


def _layout(
    plan: ImagePlan, grids: Sequence[Pair], tokens: int, layout: ImageLayoutSpec
) -> tuple[str | int, ...]:
    """Return what replaces an image's marker.

    Args:
        grids: rows and columns of each tile's features, in the encoder's order.
        tokens: the number of placeholders of the whole image.
    """
    single = len(grids) == 1
    text = layout.single if single and layout.single is not None else layout.image
    first = int(plan.overview_first)
    overview = grids[0] if plan.overview_first or single else grids[-1]
    parts: _Parts = {
        "number": [NUMBER],
        "tiles": [] if single or plan.tiles is None else _tiles(grids[first:], plan.tiles, layout),
        "overview": _lines(overview, layout) if single or plan.overview else [],
        "features": _lines(overview, layout) if single else [tokens],
    }
    return _joined(_filled(text, parts))


def _tiles(grids: Sequence[Pair], canvas: CanvasPlan, layout: ImageLayoutSpec) -> list[str | int]:
    pieces: list[str | int] = []
    for number, grid in enumerate(grids[: math.prod(canvas.grid)]):
        row, column = divmod(number, canvas.grid[1])
        if number:
            pieces.append(layout.between_tiles if column else layout.between_rows)
        counts = {"row": row, "column": column, "tile": number}
        names = {name: [str(count + 1)] for name, count in counts.items()}
        pieces += _filled(layout.tile, {"features": _lines(grid, layout), **names})
    return pieces


def _lines(grid: Pair, layout: ImageLayoutSpec) -> list[str | int]:
    lines: list[str | int] = [layout.between_lines, grid[1]] * grid[0]
    return lines[1:]


def _filled(text: str, parts: _Parts) -> Iterator[str | int]:
    """Yield a text whose places are filled."""
    for number, piece in enumerate(_PLACE.split(text)):
        yield from parts[piece] if number % 2 else [piece]


def _joined(pieces: Iterator[str | int]) -> tuple[str | int, ...]:
    """Join adjacent texts, and add up adjacent numbers."""
    kept = (piece for piece in pieces if piece != "")
    groups = groupby(kept, lambda piece: isinstance(piece, int))
    return tuple(sum(map(int, g)) if counts else "".join(map(str, g)) for counts, g in groups)
