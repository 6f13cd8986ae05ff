"""Size rules: which sizes an image is resized to, and how it is cut into tiles.

A rule is a function of the image's size alone, so that tokens can be counted before pixels are
touched. The definitions are those of the processors in transformers, which models were trained
with, to the rounding of each side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jinfer.images.decode_image import ImageError
from jinfer.modelspec.image_table import (
    AreaTilesSpec,
    AspectTilesSpec,
    CanvasTilesSpec,
    CentreCropSpec,
    FixedSizeSpec,
    ImageSpec,
    LongestSideSpec,
    LongestTilesSpec,
    PatchLimitSpec,
    PinpointTilesSpec,
    SmartSizeSpec,
    SquarePadSpec,
    TokenBudgetSpec,
)

type Pair = tuple[int, int]  # (height, width), or (rows, columns)

MAX_RATIO = 200  # of the sides of an image whose tokens follow its ratio
MAX_AREA = 1 << 25  # pixels of an image while it is processed
_MAX_LONGEST = 4096  # pixels of a side before it is cut into tiles or padded


@dataclass(frozen=True)
class ResizeStep:
    """Resizes to a size without keeping the ratio."""

    size: Pair


@dataclass(frozen=True)
class PlaceStep:
    """Puts the image on a canvas, which may be smaller.

    Attributes:
        size: of the canvas.
        offset: of the image's upper left corner; negative where the image is cropped.
        mean: whether the canvas has the mean colour; else it is black.
    """

    size: Pair
    offset: Pair = (0, 0)
    mean: bool = False


@dataclass(frozen=True)
class CanvasPlan:
    """What is done to the image, and the grid of tiles that the result is cut into."""

    steps: tuple[ResizeStep | PlaceStep, ...]
    grid: Pair = (1, 1)

    @property
    def tile(self) -> Pair:
        """The size of a tile."""
        height, width = self.steps[-1].size
        return height // self.grid[0], width // self.grid[1]


@dataclass(frozen=True)
class ImagePlan:
    """The tiles of an image.

    Attributes:
        overview: the whole image in one tile; None if there are only tiles.
        tiles: None if there is only an overview.
        overview_first: whether the encoder gets the overview before the tiles.
        unpad: the size of the image whose padding is left out of the tiles' features; each row of
            them then ends with a learned vector.
    """

    overview: CanvasPlan | None
    tiles: CanvasPlan | None = None
    overview_first: bool = False
    unpad: Pair | None = None

    @property
    def canvases(self) -> tuple[CanvasPlan, ...]:
        """Overview and tiles, in the order in which the encoder gets them."""
        both = (self.overview, self.tiles) if self.overview_first else (self.tiles, self.overview)
        return tuple(canvas for canvas in both if canvas is not None)


def plan_image(size: Pair, spec: ImageSpec) -> ImagePlan:
    """Apply the rule of a specification.

    Args:
        size: height and width.

    Raises:
        ImageError: the image is too long and narrow for the rule.
    """
    plan = RULES[type(spec.resize)](size, spec.resize, spec)
    areas = (math.prod(step.size) for canvas in plan.canvases for step in canvas.steps)
    if max(areas) > MAX_AREA:
        raise _too_narrow(size)
    return plan


def _resized(*sizes: Pair) -> ImagePlan:
    return ImagePlan(_canvas(*sizes))


def _canvas(*sizes: Pair, grid: Pair = (1, 1)) -> CanvasPlan:
    return CanvasPlan(tuple(map(ResizeStep, sizes)), grid)


def _fixed(size: Pair, rule: FixedSizeSpec, spec: ImageSpec) -> ImagePlan:
    return _resized((rule.side, rule.side))


def _centre_crop(size: Pair, rule: CentreCropSpec, spec: ImageSpec) -> ImagePlan:
    height, width = size
    longer = int(rule.shortest * max(size) / min(size))
    resized = (rule.shortest, longer) if height <= width else (longer, rule.shortest)
    offset = (int((rule.crop - resized[0]) / 2), int((rule.crop - resized[1]) / 2))
    place = PlaceStep((rule.crop, rule.crop), offset)
    return ImagePlan(CanvasPlan((ResizeStep(resized), place)))


def _pad_square(size: Pair, rule: SquarePadSpec, spec: ImageSpec) -> ImagePlan:
    # A square of the longer side may be far larger than the image.
    shrunk = size if max(size) <= _MAX_LONGEST else _keeping_ratio(size, _MAX_LONGEST, even=False)
    side = max(shrunk)
    offset = ((side - shrunk[0]) // 2, (side - shrunk[1]) // 2)
    steps = (ResizeStep(shrunk), PlaceStep((side, side), offset, mean=True))
    return ImagePlan(CanvasPlan((*steps, ResizeStep((rule.side, rule.side)))))


def smart_size(size: Pair, rule: SmartSizeSpec) -> Pair:
    """Return the size that "smart" resizes to. Raises `ImageError` if the ratio is too large."""
    factor, (height, width) = rule.factor, size
    if rule.small == "floor" and min(size) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if rule.small == "round":
        if height < factor:
            height, width = factor, round(width * factor / height)
        if width < factor:
            height, width = round(height * factor / width), factor
    _check_ratio((height, width))
    sides = [round(side / factor) * factor for side in (height, width)]
    if rule.small == "clamp":
        sides = [max(factor, side) for side in sides]
    if sides[0] * sides[1] > rule.max_pixels:
        scale = math.sqrt(height * width / rule.max_pixels)
        sides = [math.floor(side / scale / factor) * factor for side in (height, width)]
    elif sides[0] * sides[1] < rule.min_pixels:
        scale = math.sqrt(rule.min_pixels / (height * width))
        sides = [math.ceil(side * scale / factor) * factor for side in (height, width)]
    return max(factor, sides[0]), max(factor, sides[1])


def _smart(size: Pair, rule: SmartSizeSpec, spec: ImageSpec) -> ImagePlan:
    return _resized(smart_size(size, rule))


def _budget(size: Pair, rule: TokenBudgetSpec, spec: ImageSpec) -> ImagePlan:
    factor, (height, width) = rule.factor, size
    scale = math.sqrt(rule.tokens * factor**2 / (height * width))
    high, wide = (math.floor(scale * side / factor) * factor for side in size)
    if high == 0:
        high, wide = factor, min(width // height, rule.tokens) * factor
    elif wide == 0:
        high, wide = min(height // width, rule.tokens) * factor, factor
    return _resized((high, wide))


def _longest(size: Pair, rule: LongestSideSpec, spec: ImageSpec) -> ImagePlan:
    ratio = max(1.0, max(size) / rule.longest)
    height, width = (max(1, math.floor(side / ratio)) for side in size)
    return _resized((_round_up(height, rule.factor), _round_up(width, rule.factor)))


def _patch_limit(size: Pair, rule: PatchLimitSpec, spec: ImageSpec) -> ImagePlan:
    patches = math.prod(max(1, side // spec.patch) for side in size)
    most = rule.side_patches * spec.patch
    scale = min(1.0, math.sqrt(rule.patches / patches), *(most / side for side in size))
    height, width = (min(max(1, int(side * scale)), most) for side in size)
    padded = (_round_up(height, rule.factor), _round_up(width, rule.factor))
    return ImagePlan(CanvasPlan((ResizeStep((height, width)), PlaceStep(padded))))


def _aspect_tiles(size: Pair, rule: AspectTilesSpec, spec: ImageSpec) -> ImagePlan:
    tile = rule.tile
    overview = (tile, tile) if rule.overview is None else smart_size(size, rule.overview)
    if rule.overview is not None and rule.large is not None:
        factor = rule.overview.factor
        area = math.prod(max(spec.patch, round(side / factor) * factor) for side in size)
        if area <= rule.overview.max_pixels * rule.large:
            return _resized(overview)
    rows, columns = _nearest_grid(size, rule)
    tiles = _canvas((rows * tile, columns * tile), grid=(rows, columns))
    if rows * columns == 1:
        return ImagePlan(tiles)
    return ImagePlan(_canvas(overview) if rule.thumbnail else None, tiles)


def _nearest_grid(size: Pair, rule: AspectTilesSpec) -> Pair:
    """The rows and columns of the nearest ratio; of equal ones more, if the image fills them."""
    height, width = size
    best, least = (1, 1), math.inf
    for columns, rows in _grids(rule.min_tiles, rule.max_tiles):
        difference = abs(width / height - columns / rows)
        filled = height * width > 0.5 * rule.tile**2 * columns * rows
        if difference < least or (difference == least and filled):
            best, least = (rows, columns), difference
    return best


def _grids(least: int, most: int) -> list[Pair]:
    """All (columns, rows) of so many tiles, by number of tiles."""
    sides = range(1, most + 1)
    grids = ((columns, rows) for columns in sides for rows in sides[: most // columns])
    return sorted((g for g in grids if g[0] * g[1] >= least), key=math.prod)


def _longest_tiles(size: Pair, rule: LongestTilesSpec, spec: ImageSpec) -> ImagePlan:
    tile, square = rule.tile, (rule.tile, rule.tile)
    first = _keeping_ratio(size, rule.longest, even=True)
    if max(first) > _MAX_LONGEST:
        first = _keeping_ratio(first, _MAX_LONGEST, even=False)
    if not rule.split:
        return _resized(first, square)
    longer = _round_up(max(first), tile)
    second = _keeping_ratio(first, longer, even=False)
    second = (_round_up(max(1, second[0]), tile), _round_up(max(1, second[1]), tile))
    grid = (second[0] // tile, second[1] // tile)
    if grid == (1, 1):
        return _resized(first, second)
    return ImagePlan(_canvas(first, second, square), _canvas(first, second, grid=grid))


def _keeping_ratio(size: Pair, longer: int, *, even: bool) -> Pair:
    """The size whose longer side is `longer`, the other one cut off, or rounded up to even."""
    height, width = size
    ratio = width / height
    other = int(longer / ratio) if width >= height else int(longer * ratio)
    other = max(1, other + other % 2 if even else other)
    return (other, longer) if width >= height else (longer, other)


def _area_tiles(size: Pair, rule: AreaTilesSpec, spec: ImageSpec) -> ImagePlan:
    grid = _area_grid(size, rule)
    overview = _canvas(_area_size(size, rule, enlarge=grid is None))
    if grid is None:
        return ImagePlan(overview)
    part = [max(round(side / n) * n, n) / n for side, n in zip(size, grid, strict=True)]
    height, width = _area_size((part[0], part[1]), rule, enlarge=True)
    tiles = _canvas((height * grid[0], width * grid[1]), grid=grid)
    return ImagePlan(overview, tiles, overview_first=True)


def _area_size(size: tuple[float, float], rule: AreaTilesSpec, *, enlarge: bool) -> Pair:
    """The size of the same ratio with the area of a tile; smaller ones stay unless enlarged."""
    height, width = size
    if height * width > rule.tile**2 or enlarge:
        ratio = width / height
        height = int(rule.tile / math.sqrt(ratio))
        width = int(height * ratio)
    factor = rule.factor
    high, wide = (max(round(side / factor) * factor, factor) for side in (height, width))
    return high, wide


def _area_grid(size: Pair, rule: AreaTilesSpec) -> Pair | None:
    """The (rows, columns) of the nearest ratio; None if one tile has the area."""
    height, width = size
    count = min(math.ceil(height * width / rule.tile**2), rule.max_tiles)
    if count <= 1:
        return None
    best, least = (1, 1), math.inf
    for tiles in (count - 1, count, count + 1):
        if tiles == 1 or tiles > rule.max_tiles:
            continue
        for rows in (n for n in range(1, tiles + 1) if tiles % n == 0):
            error = abs(math.log(width / height) - math.log(tiles // rows / rows))
            if error < least or (error == least and rows > best[0]):
                best, least = (rows, tiles // rows), error
    return best


def _pinpoint_tiles(size: Pair, rule: PinpointTilesSpec, spec: ImageSpec) -> ImagePlan:
    height, width = size

    def fit(canvas: Pair) -> Pair:
        """Pixels of the image that the canvas shows, and, negative, those that it wastes."""
        scale = min(canvas[1] / width, canvas[0] / height)
        shown = min(int(width * scale) * int(height * scale), height * width)
        return shown, shown - canvas[0] * canvas[1]

    canvas = max(rule.sizes, key=fit)  # of equal ones the first
    tall, broad = canvas[0] / height, canvas[1] / width
    if broad < tall:
        resized = (min(math.ceil(height * broad), canvas[0]), canvas[1])
    else:
        resized = (canvas[0], min(math.ceil(width * tall), canvas[1]))
    offset = ((canvas[0] - resized[0]) // 2, (canvas[1] - resized[1]) // 2)
    grid = (canvas[0] // rule.tile, canvas[1] // rule.tile)
    tiles = CanvasPlan((ResizeStep(resized), PlaceStep(canvas, offset)), grid)
    return ImagePlan(_canvas((rule.tile, rule.tile)), tiles, overview_first=True, unpad=size)


def _canvas_tiles(size: Pair, rule: CanvasTilesSpec, spec: ImageSpec) -> ImagePlan:
    tile, square = rule.tile, (rule.tile, rule.tile)
    grids = [(rows, columns) for columns, rows in _grids(1, rule.max_tiles)]
    # The processor compares scales in float32.
    scales = np.min(np.array(grids, np.float32) * tile / np.array(size, np.float32), axis=1)
    enlarging = scales[scales >= 1]
    pick = np.max if rule.enlarge or not len(enlarging) else np.min
    scale = pick(enlarging if len(enlarging) else scales)
    grid = min((g for g, s in zip(grids, scales, strict=True) if s == scale), key=math.prod)
    canvas = (grid[0] * tile, grid[1] * tile)
    target = canvas
    if not rule.enlarge:  # beyond the image's own size, but for a tile
        target = (min(max(size[0], tile), canvas[0]), min(max(size[1], tile), canvas[1]))
    tall, broad = target[0] / size[0], target[1] / size[1]
    if broad < tall:
        resized = (min(math.floor(size[0] * broad), target[0]), target[1])
    else:
        resized = (target[0], min(math.floor(size[1] * tall), target[1]))
    steps = (ResizeStep((max(1, resized[0]), max(1, resized[1]))), PlaceStep(canvas))
    tiles = CanvasPlan(steps, grid)
    if grid == (1, 1):
        return ImagePlan(tiles)
    return ImagePlan(_canvas(square), tiles)


RULES: dict[type, Callable[[Pair, Any, ImageSpec], ImagePlan]] = {
    FixedSizeSpec: _fixed,
    CentreCropSpec: _centre_crop,
    SquarePadSpec: _pad_square,
    SmartSizeSpec: _smart,
    TokenBudgetSpec: _budget,
    LongestSideSpec: _longest,
    PatchLimitSpec: _patch_limit,
    AspectTilesSpec: _aspect_tiles,
    LongestTilesSpec: _longest_tiles,
    AreaTilesSpec: _area_tiles,
    PinpointTilesSpec: _pinpoint_tiles,
    CanvasTilesSpec: _canvas_tiles,
}


def unpadded(grid: Pair, size: Pair) -> Iterator[range]:
    """Rows and columns of a grid that an image, padded to the grid's ratio, fills.

    Args:
        grid: rows and columns of features.
        size: height and width of the image.
    """
    (rows, columns), (height, width) = grid, size
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        yield range(padding, rows - padding)
        yield range(columns)
    else:
        padding = (columns - int(round(width * (rows / height), 7))) // 2
        yield range(rows)
        yield range(padding, columns - padding)


def _round_up(side: int, factor: int) -> int:
    return -(-side // factor) * factor


def _check_ratio(size: Pair) -> None:
    if max(size) / min(size) > MAX_RATIO:
        raise _too_narrow(size)


def _too_narrow(size: Pair) -> ImageError:
    shown = f"{size[1]} x {size[0]} pixels"
    return ImageError(f"the image is too long and narrow for the model ({shown}); crop it")
