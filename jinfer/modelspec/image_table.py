"""Images, specification: the table `[image]`, which makes patches and placeholder tokens of images.

Its values are read from config.json and, as `$image_processor.KEY`, from the checkpoint's
preprocessor_config.json or processor_config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from jinfer.modelspec.bounded_types import (
    Bounds,
    Count,
    NotNegative,
    Positive,
    Reader,
    Size,
    WrongValue,
    fields,
)
from jinfer.modelspec.spec_errors import SpecError, nearest_hint
from jinfer.modelspec.spec_values import SpecValues
from jinfer.modelspec.table_reader import read_value
from jinfer.modelspec.toml_tables import as_table, check_keys, check_text

MAX_SIDE = 1 << 15  # pixels of a side after resizing
_SIDES = ("height", "width", "shortest_edge", "longest_edge")
_PLACE = re.compile(r"\{(\w*)\}")


def _side(value: Any) -> int:
    """Reads a number, equal numbers in a list, or a table such as `{height, width}`."""
    sides = (
        [value[name] for name in _SIDES if name in value] if isinstance(value, Mapping) else value
    )
    sides = sides if isinstance(sides, list | tuple) else [sides]
    sides = [int(n) if isinstance(n, float) and n.is_integer() else n for n in sides]
    if len(set(map(str, sides))) != 1 or type(sides[0]) is not int or not 1 <= sides[0] <= MAX_SIDE:
        raise WrongValue(_SIDE, value)
    return sides[0]


def _sizes(value: Any) -> tuple[tuple[int, int], ...]:
    """Reads a list of [height, width]."""
    pairs = value if isinstance(value, list | tuple) else ()
    if not pairs or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise WrongValue(_SIZES, value)
    return tuple((_side(height), _side(width)) for height, width in pairs)


_SIDE = f"a side from 1 to {MAX_SIDE}, or a table of equal sides"
_SIZES = "a list of [height, width]"
Side = Annotated[int, Reader(_side, _SIDE)]
Sizes = Annotated[tuple[tuple[int, int], ...], Reader(_sizes, _SIZES)]


@dataclass(frozen=True)
class FixedSizeSpec:
    """Resizes to a square without keeping the ratio of the sides.

    Attributes:
        side: pixels of a side.
    """

    kind: Literal["fixed"]
    side: Side


@dataclass(frozen=True)
class CentreCropSpec:
    """Resizes the shorter side, then crops the centre to a square.

    Attributes:
        shortest: pixels of the shorter side.
        crop: pixels of a side that are kept.
    """

    kind: Literal["centre_crop"]
    shortest: Side
    crop: Side


@dataclass(frozen=True)
class SquarePadSpec:
    """Pads to a square with the mean colour, then resizes.

    Attributes:
        side: pixels of a side.
    """

    kind: Literal["pad_square"]
    side: Side


@dataclass(frozen=True)
class SmartSizeSpec:
    """Rounds sides to multiples of a factor; scales images of too many or too few pixels.

    Attributes:
        factor: pixels whose multiples the sides are.
        min_pixels: lower bound of height x width.
        max_pixels: its upper bound.
        small: of a side below `factor`: "keep" it, "clamp" its rounded value, or enlarge the image
            first, with sides rounded down ("floor") or to the nearest pixel ("round").
    """

    kind: Literal["smart"]
    factor: Size
    min_pixels: Positive
    max_pixels: Positive
    small: Literal["keep", "clamp", "floor", "round"] = "keep"


@dataclass(frozen=True)
class TokenBudgetSpec:
    """Scales up or down to as many tokens as fit, sides rounded down to multiples of a factor.

    Attributes:
        factor: pixels of a side of a token.
        tokens: the most tokens of an image.
    """

    kind: Literal["budget"]
    factor: Size
    tokens: Size


@dataclass(frozen=True)
class LongestSideSpec:
    """Shrinks a longer side to its limit; sides become multiples of a factor, rounded up.

    Attributes:
        longest: the most pixels of a side.
        factor: pixels whose multiples the sides are.
    """

    kind: Literal["longest"]
    longest: Side
    factor: Size


@dataclass(frozen=True)
class PatchLimitSpec:
    """Shrinks an image of too many patches, and pads it with black to multiples of a factor.

    Attributes:
        patches: the most patches of an image, before padding.
        side_patches: the most patches of a side.
        factor: pixels whose multiples the padded sides are.
    """

    kind: Literal["patch_limit"]
    patches: Size
    side_patches: Size
    factor: Size


@dataclass(frozen=True)
class AspectTilesSpec:
    """Cuts into the grid of tiles whose ratio is nearest; an overview follows.

    Attributes:
        tile: pixels of a tile's side.
        min_tiles: lower bound of the number of tiles, without the overview.
        max_tiles: its upper bound.
        overview: size of the overview; none: a tile.
        large: an image becomes tiles if its tokens are more than so many times those of
            `overview.max_pixels`; none: always.
        thumbnail: whether several tiles have an overview.
    """

    kind: Literal["aspect_tiles"]
    tile: Side
    min_tiles: Size
    max_tiles: Size
    overview: SmartSizeSpec | None = None
    large: NotNegative | None = None
    thumbnail: bool = True

    def check(self) -> tuple[str, str] | None:
        """The first value that is wrong: its key and the reason."""
        if not self.min_tiles <= self.max_tiles <= 256:
            return "max_tiles", f"{self.max_tiles} is not from min_tiles ({self.min_tiles}) to 256"
        return None


@dataclass(frozen=True)
class LongestTilesSpec:
    """Resizes the longer side, rounds both up to multiples of a tile, and cuts; overview last.

    Attributes:
        longest: pixels of the longer side.
        tile: pixels of a tile's side.
        split: whether there are tiles; else only the overview.
    """

    kind: Literal["longest_tiles"]
    longest: Side
    tile: Side
    split: bool = True


@dataclass(frozen=True)
class AreaTilesSpec:
    """Cuts into about as many tiles as fill the image's area, after an overview.

    Attributes:
        tile: side of the square that has a tile's area.
        factor: pixels whose multiples the sides of tiles are.
        max_tiles: the most tiles, without the overview.
    """

    kind: Literal["area_tiles"]
    tile: Side
    factor: Size
    max_tiles: Size


@dataclass(frozen=True)
class PinpointTilesSpec:
    """Pads to the best of listed sizes and cuts, after an overview.

    Features of the padding are left out, and each row of features ends with a learned vector.

    Attributes:
        tile: pixels of a tile's side.
        sizes: the [height, width] that there are.
    """

    kind: Literal["pinpoint_tiles"]
    tile: Side
    sizes: Sizes


@dataclass(frozen=True)
class CanvasTilesSpec:
    """Pads right and below to the grid of tiles that needs the least scaling; overview last.

    Attributes:
        tile: pixels of a tile's side.
        max_tiles: the most tiles, without the overview.
        enlarge: whether the image is enlarged to the largest grid.
    """

    kind: Literal["canvas_tiles"]
    tile: Side
    max_tiles: Annotated[int, Bounds(1, 256)]
    enlarge: bool = False


SIZE_RULES = (
    *(FixedSizeSpec, CentreCropSpec, SquarePadSpec, SmartSizeSpec, TokenBudgetSpec),
    *(LongestSideSpec, PatchLimitSpec, AspectTilesSpec, LongestTilesSpec, AreaTilesSpec),
    *(PinpointTilesSpec, CanvasTilesSpec),
)
AnySizeRule = (
    FixedSizeSpec
    | CentreCropSpec
    | SquarePadSpec
    | SmartSizeSpec
    | TokenBudgetSpec
    | LongestSideSpec
    | PatchLimitSpec
    | AspectTilesSpec
    | LongestTilesSpec
    | AreaTilesSpec
    | PinpointTilesSpec
    | CanvasTilesSpec
)


@dataclass(frozen=True)
class ImageLayoutSpec:
    """Texts around an image's placeholders: `[image.layout]`; they are not expressions.

    Attributes:
        marker: what the chat template writes for an image; none: the placeholder.
        image: what replaces it: `{features}` are all placeholders, `{tiles}` those of the tiles,
            `{overview}` those of the overview, `{number}` counts the images of a prompt from 0.
        single: the same for an image of one tile, which is its `{overview}`; none: as `image`.
        tile: the text of a tile, with `{features}`, `{row}`, `{column}` and `{tile}` from 1.
        between_tiles: what separates the tiles of a row.
        between_rows: what separates rows of tiles.
        between_lines: what separates rows of placeholders.
    """

    marker: str | None = None
    image: str = "{features}"
    single: str | None = None
    tile: str = "{features}"
    between_tiles: str = ""
    between_rows: str = ""
    between_lines: str = ""


_WHOLE = ("features", "tiles", "overview", "number")
_PLACES = {"image": _WHOLE, "single": _WHOLE, "tile": ("features", "row", "column", "tile")}


@dataclass(frozen=True)
class ImageSpec:
    """How images become patches and placeholder tokens: `[image]`.

    Attributes:
        placeholder: id or name of the token whose embedding a feature replaces.
        lookup: id of the token whose other embeddings, such as those of layers, a placeholder has;
            none: its own.
        resize: the rule of sizes and tiles.
        patch: pixels of a patch's side.
        merge: patches of a side that become one token.
        order: of patches: by "rows", or those that are "merged" into a token one after another.
        channel: where the three channels are in a patch's values: "first" or "last".
        resample: Pillow's number of the filter: 0 nearest, 1 Lanczos, 2 bilinear, 3 bicubic.
        factor: what bytes are multiplied by.
        mean: what is subtracted from each channel then.
        std: what each channel is divided by then.
        rounding: the type to which each of these three steps rounds.
        alpha: transparent pixels over "white", or "drop" what says that they are transparent.
        max_pixels: the most pixels of an image file, checked before it is decoded.
        position: of placeholders: "plain", or "grid" (M-RoPE: row and column).
        mask: whether placeholders are "causal", see each other within an "image", likewise but in
            layers with a sliding "window" alone, or all tokens of the "prompt" do.
        layout: texts around placeholders.
    """

    placeholder: Count | str
    resize: AnySizeRule
    patch: Side
    lookup: Count | None = None
    merge: Size = 1
    order: Literal["rows", "merged"] = "rows"
    channel: Literal["first", "last"] = "first"
    resample: Annotated[int, Bounds(0, 5)] = 3
    factor: Positive = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    rounding: Literal["float32", "bfloat16"] = "float32"
    alpha: Literal["white", "drop"] = "white"
    max_pixels: Size = 1 << 26
    position: Literal["plain", "grid"] = "plain"
    mask: Literal["causal", "image", "window", "prompt"] = "causal"
    layout: ImageLayoutSpec = ImageLayoutSpec()

    def check(self) -> tuple[str, str] | None:
        """The first value that is wrong: its key and the reason."""
        for key in ("mean", "std"):
            if len(getattr(self, key)) != 3:
                return key, f"{list(getattr(self, key))} is not a number for each of 3 channels"
        if min(self.std) <= 0:
            return "std", f"{min(self.std)} is not above 0"
        return None


def read_image(written: Any, values: SpecValues) -> ImageSpec | None:
    """Reads the table; None without one, or if its `when` is false. Raises `SpecError`."""
    table = dict(as_table(written, values.path, "image"))
    if not table:
        return None
    layout = _read_layout(table.pop("layout", {}), values.path)
    spec: ImageSpec | None = read_value(ImageSpec | None, table, values, "image")
    return spec and replace(spec, layout=layout)


def _read_layout(written: Any, path: object) -> ImageLayoutSpec:
    table = check_keys(written, fields(ImageLayoutSpec), path, "image.layout")
    for name, text in table.items():
        key = f"image.layout.{name}"
        for place in _PLACE.findall(check_text(text, path, key)):
            if place not in _PLACES.get(name, ()):
                hint = nearest_hint(place, _PLACES.get(name, ()))
                raise SpecError(path, key, f"unknown place {{{place}}}; {hint}")
    return ImageLayoutSpec(**table)
