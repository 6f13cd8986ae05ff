"""Modules of image encoders against their definitions in NumPy."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jinfer.modelspec.attention_blocks import AttentionSpec
from jinfer.modelspec.image_blocks import (
    ClassTokenSpec,
    DropTokensSpec,
    GridPositionsSpec,
    LearnedVectorSpec,
    MergeSpec,
)
from jinfer.modelspec.position_blocks import GridRopeSpec
from jinfer.nn.attention_modules import Attention
from jinfer.nn.forward_context import ForwardBatch
from jinfer.nn.image_modules import (
    ClassToken,
    DropTokens,
    GridPositions,
    GridRotary,
    LearnedVector,
    Merge,
    PatchGrid,
)
from tests.arrays import on_device

RNG = np.random.default_rng(0)
SIZES = [(6, 4), (2, 8), (4, 4)]
PATCHES = 24

type Floats = np.ndarray[Any, np.dtype[Any]]


def patch_grid(group: int = 1) -> PatchGrid:
    return PatchGrid.of(on_device(np.array(SIZES, np.int32)), PATCHES, group)


def places(rows: int, columns: int, group: int) -> list[tuple[int, int]]:
    """Row and column of each patch, in the order in which patches come."""
    return [
        (r + i, c + j)
        for r in range(0, rows, group)
        for c in range(0, columns, group)
        for i in range(group)
        for j in range(group)
    ]


@pytest.mark.parametrize("group", [1, 2])
def test_places_of_patches(group: int) -> None:
    grid = patch_grid(group)
    for tile, (rows, columns) in enumerate(SIZES):
        count = rows * columns
        wanted = places(rows, columns, group)
        found = zip(*(np.asarray(a)[tile, :count] for a in (grid.rows, grid.columns)), strict=True)
        assert [(int(r), int(c)) for r, c in found] == wanted
        index = grid.index(grid.rows, grid.columns)
        assert_array_equal(np.asarray(index)[tile, :count], np.arange(count))


def triangle(x: Floats) -> Floats:
    return np.maximum(1 - np.abs(x), 0)


def keys_cubic(x: Floats, a: float) -> Floats:
    """Keys' convolution kernel."""
    x = np.abs(x)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def axis_weights(side: int, count: int, resize: str, corners: bool, antialias: bool) -> Floats:
    """[count, side]: what of each value of the table is in each value of the grid."""
    weights = np.zeros((count, side))
    for i in range(count):
        if resize == "nearest":
            weights[i, i * side // count] = 1
            continue
        if antialias:
            wide = max(side / count, 1.0)
            center = (i + 0.5) * side / count
            at = (np.arange(side) + 0.5 - center) / wide
            own = triangle(at) if resize == "linear" else keys_cubic(at, -0.5)
            weights[i] = own / own.sum()
            continue
        center = i * (side - 1) / max(count - 1, 1) if corners else (i + 0.5) * side / count - 0.5
        if resize == "linear":
            center = max(center, 0)
        for tap in range(int(np.floor(center)) - 1, int(np.floor(center)) + 3):
            kernel = triangle if resize == "linear" else lambda x: keys_cubic(x, -0.75)
            weights[i, np.clip(tap, 0, side - 1)] += kernel(np.array(center - tap))
    return weights


@pytest.mark.parametrize("class_row", ["none", "first", "last"])
@pytest.mark.parametrize(
    ("resize", "corners", "antialias"),
    [
        *(("nearest", False, False), ("linear", False, False), ("linear", True, False)),
        *(("linear", False, True), ("cubic", False, False), ("cubic", False, True)),
    ],
)
@pytest.mark.parametrize(("side", "group"), [(5, 1), (5, 2), (3, 2), (9, 1)])
def test_resized_positions(
    side: int, group: int, resize: Any, corners: bool, antialias: bool, class_row: Any
) -> None:
    block = GridPositionsSpec(
        kind="grid_positions",
        side=side,
        width=7,
        resize=resize,
        corners=corners,
        antialias=antialias,
        class_row=class_row,
    )
    module = GridPositions(block, jnp.float32)
    table = RNG.normal(size=(block.rows, 7))
    module.weight.set_value(on_device(table, jnp.float32))
    found = np.asarray(module(patch_grid(group)), np.float64)
    own = {"none": None, "first": table[0], "last": table[-1]}[class_row]
    square = (table[1:] if class_row == "first" else table[: side**2]).reshape(side, side, 7)
    for tile, (rows, columns) in enumerate(SIZES):
        down = axis_weights(side, rows, resize, corners, antialias)
        across = axis_weights(side, columns, resize, corners, antialias)
        whole = np.einsum("ri,cj,ijw->rcw", down, across, square)
        wanted = np.stack([whole[place] for place in places(rows, columns, group)])
        if own is not None:
            assert_allclose(found[tile, 0], own, rtol=0, atol=1e-6)
        patches = found[tile, own is not None :][: rows * columns]
        assert_allclose(patches, wanted, rtol=0, atol=2e-6)


def test_a_table_of_the_grids_size_is_unchanged() -> None:
    sizes = on_device(np.array([[5, 5]], np.int32))
    for resize in ("nearest", "linear", "cubic"):
        block = GridPositionsSpec(kind="grid_positions", side=5, width=7, resize=resize)
        module = GridPositions(block, jnp.float32)
        table = RNG.normal(size=(25, 7)).astype(np.float32)
        module.weight.set_value(on_device(table))
        assert_array_equal(np.asarray(module(PatchGrid.of(sizes, 25)))[0], table)


def rotated(x: Floats, row: int, column: int, **fields: Any) -> Floats:
    """A head [dim] rotated pair by pair."""
    dim, theta = len(x), fields.get("theta", 10000.0)
    pairs, quarter = fields.get("pairs", "halves"), len(x) // 4
    first, second = (row, column) if fields.get("order", "row") == "row" else (column, row)
    out = x.copy()
    for j in range(quarter):
        frequency = theta ** (-2 * j / (dim // 2))
        other = theta ** (-(2 * j + 1) / (dim // 2)) if fields.get("shifted") else frequency
        for k, (place, turn) in enumerate(((first, frequency), (second, other))):
            pair = 2 * j + k if fields.get("interleaved") else k * quarter + j
            if pairs == "halves":
                a, b = pair, pair + dim // 2
            elif pairs == "adjacent":
                a, b = 2 * pair, 2 * pair + 1
            else:
                a, b = k * dim // 2 + j, k * dim // 2 + j + quarter
            angle = (place + fields.get("offset", 0)) * turn
            out[a] = x[a] * np.cos(angle) - x[b] * np.sin(angle)
            out[b] = x[b] * np.cos(angle) + x[a] * np.sin(angle)
    return out


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"shifted": True},
        {"pairs": "adjacent", "order": "column", "offset": 1},
        {"pairs": "adjacent", "order": "column", "interleaved": True},
        {"pairs": "quarters", "order": "column", "theta": 100.0},
        {"interleaved": True, "shifted": True},
    ],
)
def test_rotation_in_two_dimensions(fields: dict[str, Any], group: int) -> None:
    module = GridRotary(GridRopeSpec(kind="grid_rope", dim=16, **fields))
    grid = patch_grid(group)
    x = RNG.normal(size=(len(SIZES), PATCHES + 1, 3, 16))  # a class token, three heads
    flat = on_device(x, jnp.float32).reshape(len(SIZES), PATCHES + 1, 48)
    found = np.asarray(module(flat, module.grid_cos_sin(grid, PATCHES + 1), 16), np.float64)
    found = found.reshape(x.shape)
    for tile, (rows, columns) in enumerate(SIZES):
        assert_allclose(found[tile, 0], x[tile, 0], rtol=0, atol=1e-6)
        for n, (row, column) in enumerate(places(rows, columns, group)):
            for head in range(3):
                wanted = rotated(x[tile, n + 1, head], row, column, **fields)
                assert_allclose(found[tile, n + 1, head], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("channels", ["last", "first"])
@pytest.mark.parametrize("group", [1, 2])
def test_merged_neighbours(group: int, channels: Any) -> None:
    module = Merge(MergeSpec(kind="merge", size=2, channels=channels), jnp.float32)
    x = RNG.normal(size=(len(SIZES), PATCHES, 5)).astype(np.float32)
    found = np.asarray(module(on_device(x), patch_grid(group)))
    for tile, (rows, columns) in enumerate(SIZES):
        image = np.zeros((rows, columns, 5), np.float32)
        for n, place in enumerate(places(rows, columns, group)):
            image[place] = x[tile, n]
        parts = image.reshape(rows // 2, 2, columns // 2, 2, 5)
        order = (0, 2, 1, 3, 4) if channels == "last" else (0, 2, 4, 1, 3)
        wanted = parts.transpose(order).reshape(-1, 20)
        assert_array_equal(found[tile, : len(wanted)], wanted)


@pytest.mark.parametrize(("group", "size"), [(1, 2), (1, 3), (2, 4)])
def test_attention_in_windows(group: int, size: int) -> None:
    """Each window is a text of its own; at the edges they are smaller."""
    fields: dict[str, Any] = {"inputs": 8, "outputs": 8, "heads": 2, "kv_heads": 2, "head_dim": 4}
    spec = AttentionSpec(kind="attention", grid_window=size, **fields)
    module = Attention(spec, jnp.float32)
    weights = {name: RNG.normal(size=(8, 8)) for name in "qkvo"}
    for name, values in weights.items():
        getattr(module, name).weight.set_value(on_device(values, jnp.float32))
    x = RNG.normal(size=(len(SIZES), PATCHES, 8))
    batch = ForwardBatch.of_patches(patch_grid(group), PATCHES)
    found = np.asarray(module(on_device(x, jnp.float32), batch, None)[0], np.float64)
    for tile, (rows, columns) in enumerate(SIZES):
        count = rows * columns
        window = [(r // size, c // size) for r, c in places(rows, columns, group)]
        q, k, v = ((x[tile, :count] @ weights[name].T).reshape(count, 2, 4) for name in "qkv")
        scores = np.einsum("qhd,khd->hqk", q, k) / 2
        seen = np.array([[a == b for b in window] for a in window])
        scores = np.where(seen, scores, -np.inf)
        exp = np.exp(scores - scores.max(-1, keepdims=True))
        heads = np.einsum("hqk,khd->qhd", exp / exp.sum(-1, keepdims=True), v)
        wanted = heads.reshape(count, 8) @ weights["o"].T
        assert_allclose(found[tile, :count], wanted, rtol=1e-4, atol=1e-4)


def test_class_tokens_come_first_and_are_dropped() -> None:
    x = RNG.normal(size=(2, 3, 4)).astype(np.float32)
    own = RNG.normal(size=4).astype(np.float32)
    module = ClassToken(ClassTokenSpec(kind="class_token", width=4), jnp.float32)
    module.weight.set_value(on_device(own))
    more = module(on_device(x))
    assert_array_equal(np.asarray(more), np.concatenate([np.tile(own, (2, 1, 1)), x], axis=1))
    drop = DropTokens(DropTokensSpec(kind="drop_tokens"), jnp.float32)
    assert_array_equal(np.asarray(drop(more)), x)
    vector = LearnedVector(LearnedVectorSpec(kind="learned_vector", width=4), jnp.float32)
    vector.weight.set_value(on_device(own))
    assert_array_equal(np.asarray(vector(on_device(x))), own[None, None])
