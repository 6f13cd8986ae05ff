"""Sizes of images and grids of tiles, by their definitions."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfer.images import ImageError, prepare_image
from jinfer.images.size_rules import (
    MAX_AREA,
    RULES,
    ImagePlan,
    PlaceStep,
    ResizeStep,
    plan_image,
    unpadded,
)
from jinfer.modelspec.image_table import SIZE_RULES, ImageSpec
from tests.hostile import many
from tests.images.image_goldens import NAMES, image_spec, read_spec

SIDES = st.one_of(st.integers(1, 64), st.integers(1, 5000), st.sampled_from([1, 2, 336, 20000]))
SMALLER: dict[str, Any] = {"factor": 32, "min_pixels": 65536, "max_pixels": 262144}
RULE_TABLES: dict[str, dict[str, Any]] = {
    "fixed": {"side": 32},
    "centre_crop": {"shortest": 36, "crop": 32},
    "pad_square": {"side": 32},
    "smart": {"factor": 28, "min_pixels": 3136, "max_pixels": 1003520},
    "budget": {"factor": 48, "tokens": 280},
    "longest": {"longest": 1540, "factor": 28},
    "patch_limit": {"patches": 4096, "side_patches": 512, "factor": 28},
    "aspect_tiles": {"tile": 448, "min_tiles": 1, "max_tiles": 12},
    "longest_tiles": {"longest": 2048, "tile": 512},
    "area_tiles": {"tile": 448, "factor": 56, "max_tiles": 9},
    "pinpoint_tiles": {"tile": 336, "sizes": [[336, 672], [672, 336], [672, 672], [1008, 336]]},
    "canvas_tiles": {"tile": 336, "max_tiles": 16},
}


def spec_of(kind: str, patch: int = 14, **keys: Any) -> ImageSpec:
    """A specification with a rule of sizes."""
    resize = {"kind": kind, **RULE_TABLES[kind], **keys}
    return read_spec({"placeholder": 5, "patch": patch, "resize": resize}, {})


def planned(size: tuple[int, int], spec: ImageSpec) -> ImagePlan | None:
    """The plan of an image; None if it is too long and narrow."""
    try:
        return plan_image(size, spec)
    except ImageError:
        assert max(size) / min(size) > 50
        return None


def final(size: tuple[int, int], spec: ImageSpec) -> tuple[int, int] | None:
    """The size of the only tile of an image."""
    plan = planned(size, spec)
    if plan is None:
        return None
    assert plan.tiles is None
    assert plan.overview is not None
    return plan.overview.steps[-1].size


def test_each_rule_has_a_function_and_a_test() -> None:
    assert {*RULES} == {*SIZE_RULES}
    assert len(RULE_TABLES) == len(RULES)


@pytest.mark.parametrize("kind", RULE_TABLES)
@many(60)
@given(SIDES, SIDES)
def test_tiles_are_whole_and_bounded(kind: str, height: int, width: int) -> None:
    spec = spec_of(kind)
    plan = planned((height, width), spec)
    if plan is None:
        return
    assert plan.canvases
    for canvas in plan.canvases:
        for step in canvas.steps:
            assert min(step.size) >= 1
            assert math.prod(step.size) <= MAX_AREA
        rows, columns = canvas.grid
        high, wide = canvas.steps[-1].size
        assert high % rows == wide % columns == 0
        assert min(canvas.tile) >= 14


@many(100)
@given(SIDES, SIDES, st.sampled_from(["keep", "clamp", "floor", "round"]))
def test_smart_sizes(height: int, width: int, small: str) -> None:
    size = final((height, width), spec_of("smart", small=small))
    if size is None:
        return
    assert all(side % 28 == 0 for side in size)
    pixels = size[0] * size[1]
    rounded = (round(height / 28) * 28, round(width / 28) * 28)
    if max(height, width) < 10 * min(height, width):
        assert 3136 <= pixels <= 1003520
    if small in ("keep", "clamp") and math.prod(rounded) >= 3136:
        assert size == rounded or pixels <= rounded[0] * rounded[1]
    if 56 <= height <= 900 and 56 <= width <= 900:
        assert all(abs(new - old) <= 14 for new, old in zip(size, (height, width), strict=True))


@many(100)
@given(SIDES, SIDES)
def test_budget_sizes(height: int, width: int) -> None:
    size = final((height, width), spec_of("budget"))
    assert size is not None
    assert all(side % 48 == 0 for side in size)
    rows, columns = size[0] // 48, size[1] // 48
    assert rows * columns <= 280
    if max(height, width) <= 4 * min(height, width):  # no larger multiple would fit
        scale = math.sqrt(280 * 48**2 / (height * width))
        assert (rows, columns) == (int(scale * height / 48), int(scale * width / 48))
        assert (rows + 1) * (columns + 1) > 280


@many(100)
@given(SIDES, SIDES)
def test_longest_sizes(height: int, width: int) -> None:
    size = final((height, width), spec_of("longest"))
    assert size is not None
    ratio = max(1.0, height / 1540, width / 1540)
    for new, old in zip(size, (height, width), strict=True):
        assert new % 28 == 0
        shrunk = max(1, math.floor(old / ratio))
        assert new - 28 < shrunk <= new


@many(100)
@given(SIDES, SIDES)
def test_patch_limit_sizes(height: int, width: int) -> None:
    plan = planned((height, width), spec_of("patch_limit"))
    assert plan is not None
    assert plan.overview is not None
    resized, placed = plan.overview.steps
    assert isinstance(placed, PlaceStep)
    assert placed.offset == (0, 0)
    assert max(resized.size) <= 512 * 14
    assert resized.size <= (max(height, 1), max(width, 1))
    rows, columns = resized.size[0] / 14, resized.size[1] / 14
    assert rows * columns <= 4096 + rows + columns + 1
    for padded, side in zip(placed.size, resized.size, strict=True):
        assert padded % 28 == 0
        assert 0 <= padded - side < 28


@many(100)
@given(SIDES, SIDES)
def test_aspect_tiles_have_the_nearest_ratio(height: int, width: int) -> None:
    plan = planned((height, width), spec_of("aspect_tiles"))
    assert plan is not None
    assert plan.tiles or plan.overview
    rows, columns = plan.tiles.grid if plan.tiles else (1, 1)
    grids = [(r, c) for r in range(1, 13) for c in range(1, 13) if r * c <= 12]
    distances = [abs(width / height - c / r) for r, c in grids]
    assert abs(width / height - columns / rows) == min(distances)
    equal = sorted(r * c for (r, c), d in zip(grids, distances, strict=True) if d == min(distances))
    filled = [n for n in equal if height * width > 0.5 * 448 * 448 * n]
    assert rows * columns == (filled[-1] if filled else equal[0])
    assert (plan.overview is not None) == (rows * columns > 1) or plan.tiles is None


@many(100)
@given(SIDES, SIDES)
def test_small_images_have_no_tiles(height: int, width: int) -> None:
    keys = {
        "min_tiles": 2,
        "max_tiles": 10,
        "tile": 512,
        "large": 2.0,
        "overview": {"kind": "smart", **SMALLER},
    }
    plan = planned((height, width), spec_of("aspect_tiles", **keys, patch=16))
    if plan is None:
        return
    rounded = [max(16, round(side / 32) * 32) for side in (height, width)]
    assert (plan.tiles is None) == (rounded[0] * rounded[1] <= 2 * 262144)
    assert plan.overview is not None
    assert plan.overview.tile == final((height, width), spec_of("smart", **SMALLER))


@many(100)
@given(SIDES, SIDES)
def test_longest_tiles_cover_the_longer_side(height: int, width: int) -> None:
    plan = planned((height, width), spec_of("longest_tiles"))
    assert plan is not None
    assert plan.tiles is not None
    rows, columns = plan.tiles.grid
    assert max(rows, columns) == 4
    first, second = plan.tiles.steps
    assert isinstance(first, ResizeStep)
    assert max(first.size) == 2048
    assert second.size == (rows * 512, columns * 512)
    shorter = min(height, width) / max(height, width) * 2048
    assert abs(min(first.size) - max(1, shorter)) <= 2
    assert min(rows, columns) in {math.ceil(side / 512) for side in range(*_around(first.size))}
    assert plan.overview is not None
    assert plan.overview.tile == (512, 512)


def _around(size: tuple[int, int]) -> tuple[int, int]:
    return min(size) - 1, min(size) + 2


def test_image_without_splitting_has_one_tile() -> None:
    plan = plan_image((300, 500), spec_of("longest_tiles", split=False))
    assert plan.tiles is None
    assert [step.size for step in plan.canvases[0].steps] == [(1228, 2048), (512, 512)]


@many(100)
@given(SIDES, SIDES)
def test_area_tiles(height: int, width: int) -> None:
    plan = planned((height, width), spec_of("area_tiles"))
    if plan is None:
        return
    assert plan.overview is not None
    area = plan.overview.tile[0] * plan.overview.tile[1]
    assert all(side % 56 == 0 for canvas in plan.canvases for side in canvas.tile)
    if max(height, width) < 3 * min(height, width):
        assert area < 1.4 * 448 * 448
    if height * width <= 448 * 448:
        assert plan.tiles is None
        return
    assert plan.tiles is not None
    assert plan.canvases[0] is plan.overview
    rows, columns = plan.tiles.grid
    wanted = min(math.ceil(height * width / 448**2), 9)
    assert 2 <= rows * columns <= 9
    assert abs(rows * columns - wanted) <= 1

    def error(grid: tuple[int, int]) -> float:
        return abs(math.log(width / height * grid[0] / grid[1]))

    counts = [n for n in (wanted - 1, wanted, wanted + 1) if 1 < n <= 9]
    grids = [(r, n // r) for n in counts for r in range(1, n + 1) if n % r == 0]
    assert math.isclose(error((rows, columns)), min(map(error, grids)), abs_tol=1e-9)


@many(100)
@given(SIDES, SIDES)
def test_pinpoint_tiles_show_most_of_the_image(height: int, width: int) -> None:
    spec = spec_of("pinpoint_tiles")
    plan = planned((height, width), spec)
    assert plan is not None
    assert plan.tiles is not None
    resized, placed = plan.tiles.steps
    assert isinstance(placed, PlaceStep)
    canvas = placed.size
    assert list(canvas) in RULE_TABLES["pinpoint_tiles"]["sizes"]
    for new, whole, offset in zip(resized.size, canvas, placed.offset, strict=True):
        assert 0 <= whole - new - 2 * offset <= 1

    def shown(size: list[int]) -> int:
        scale = min(size[0] / height, size[1] / width)
        return min(int(height * scale) * int(width * scale), height * width)

    sizes = RULE_TABLES["pinpoint_tiles"]["sizes"]
    assert shown(list(canvas)) == max(map(shown, sizes))


@many(100)
@given(st.integers(1, 40), st.integers(1, 40), SIDES, SIDES)
def test_padding_is_left_out(rows: int, columns: int, height: int, width: int) -> None:
    used_rows, used_columns = unpadded((rows, columns), (height, width))
    assert len(used_rows) == rows or len(used_columns) == columns
    for used, whole in ((used_rows, rows), (used_columns, columns)):
        assert used.start == whole - used.stop
    if min(rows, columns) > 4 and used_rows and used_columns:
        scale = min(rows / height, columns / width)
        assert abs(len(used_rows) - height * scale) <= 2
        assert abs(len(used_columns) - width * scale) <= 2


@many(100)
@given(SIDES, SIDES, st.booleans())
def test_canvas_tiles_scale_least(height: int, width: int, enlarge: bool) -> None:
    plan = planned((height, width), spec_of("canvas_tiles", enlarge=enlarge))
    assert plan is not None
    tiles = plan.tiles or plan.overview
    assert tiles is not None
    grids = [(r, c) for r in range(1, 17) for c in range(1, 17) if r * c <= 16]
    scales = {
        grid: min(np.float32(grid[0] * 336) / np.float32(height), np.float32(grid[1] * 336) / width)
        for grid in grids
    }
    larger = [scale for scale in scales.values() if scale >= 1]
    best = (max if enlarge else min)(larger) if larger else max(scales.values())
    assert math.isclose(scales[tiles.grid], best, rel_tol=1e-6)
    area = tiles.grid[0] * tiles.grid[1]
    assert area == min(r * c for (r, c), s in scales.items() if math.isclose(s, best, rel_tol=1e-6))
    resized, placed = tiles.steps
    assert placed.size == (tiles.grid[0] * 336, tiles.grid[1] * 336)
    if not enlarge:
        assert all(
            new <= max(old, 336) for new, old in zip(resized.size, (height, width), strict=True)
        )


@pytest.mark.parametrize(("side", "merge"), [(13, 1), (42, 2)])
def test_tiles_are_whole_tokens(side: int, merge: int) -> None:
    resize = {"kind": "fixed", "side": side}
    spec = read_spec({"placeholder": 5, "patch": 14, "merge": merge, "resize": resize}, {})
    with pytest.raises(ImageError, match=f"a tile of {side} x {side} pixels is not whole tokens"):
        prepare_image(np.zeros((50, 50, 3), np.uint8), spec)


def test_centre_crop() -> None:
    for size, resized, offset in (
        ((100, 200), (36, 72), (-2, -20)),
        ((201, 100), (72, 36), (-20, -2)),
        ((50, 51), (36, 36), (-2, -2)),
    ):
        plan = plan_image(size, spec_of("centre_crop"))
        first, place = plan.canvases[0].steps
        assert first.size == resized
        assert place == PlaceStep((32, 32), offset)
    smaller = plan_image((9, 10), spec_of("centre_crop", shortest=9, crop=14))
    assert smaller.canvases[0].steps[-1] == PlaceStep((14, 14), (2, 2))


def test_square_has_the_mean_colour() -> None:
    table = {"placeholder": 5, "patch": 1, "factor": 1.0, "mean": [0.5, 0.25, 1.0]}
    spec = read_spec({**table, "resize": {"kind": "pad_square", "side": 4}}, {})
    image = prepare_image(np.zeros((2, 4, 3), np.uint8), spec)
    rows = image.patches.reshape(4, 4, 3) + np.array([0.5, 0.25, 1.0])
    assert rows[0].tolist() == rows[3].tolist() == [[127, 63, 255]] * 4
    assert rows[1:3].max() == 0


@pytest.mark.parametrize(
    ("kind", "size"),
    [("smart", (1, 5000)), ("centre_crop", (10**7, 1))],
)
def test_narrow_images_are_refused(kind: str, size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match="too long and narrow"):
        plan_image(size, spec_of(kind))


def test_a_long_image_is_shrunk_before_it_is_padded() -> None:
    first, second, _ = plan_image((100, 60000), spec_of("pad_square")).canvases[0].steps
    assert first.size == (6, 4096)
    assert second == PlaceStep((4096, 4096), (2045, 0), mean=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(1, 1), (1, 190), (190, 1), (8, 500), (33, 31), (640, 480)])
def test_images_of_any_size_have_features(name: str, size: tuple[int, int]) -> None:
    spec = image_spec(name)
    image = prepare_image(np.full((*size, 3), 200, np.uint8), spec)
    areas = [rows * columns for rows, columns in image.grids]
    assert image.patches.shape == (len(areas), max(areas), 3 * spec.patch**2)
    assert image.patches.dtype == np.float32
    assert all(rows % spec.merge == columns % spec.merge == 0 for rows, columns in image.grids)
    assert image.tokens == sum(piece for piece in image.layout if isinstance(piece, int))
    for tile, place in image.order:
        assert place < (areas[tile] // spec.merge**2 if tile >= 0 else 1)
