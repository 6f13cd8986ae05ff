"""Goldens of vision-language models: their `[image]`, and the patches in their pixel values."""

import json
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jinfer.images import PreparedImage, prepare_image
from jinfer.loader.config.config_json import language_model, with_image_processor
from jinfer.modelspec.config_lookup import lookup_in
from jinfer.modelspec.image_table import ImageSpec, read_image
from jinfer.modelspec.spec_values import SpecValues

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"
IMAGES = GOLDENS / "vlm_images"
NAMES = [
    *("gemma3", "gemma4", "glm4v", "internvl", "lfm2_vl", "llama4", "llava", "llava_next"),
    *("minicpmv4_6", "mistral3", "paddleocr_vl", "qwen2_vl", "qwen3_5", "qwen3_vl", "smolvlm"),
]


def golden(name: str) -> Path:
    """The folder of a golden."""
    return GOLDENS / f"vlm_{name}"


def read_spec(table: dict[str, Any], config: dict[str, Any], path: str = "spec.toml") -> ImageSpec:
    """A table `[image]` for a config.json."""
    values = SpecValues(path, {}, lookup_in(config), lambda pattern: True)
    spec = read_image(table, values)
    assert spec is not None
    return spec


@cache
def image_spec(name: str, file: str = "config.json") -> ImageSpec:
    """The `[image]` of a golden's family, for the golden's configuration."""
    config = json.loads((golden(name) / file).read_text())
    table = tomllib.loads((ROOT / "specs" / "vision" / f"{name}.toml").read_text())["image"]
    whole = language_model(with_image_processor(config, golden(name)))
    return read_spec(table, dict(whole), name)


def source(name: str, number: int) -> bytes:
    """The file of a golden's image 0 or 1."""
    small = number == 1 and name == "lfm2_vl"
    return (IMAGES / ("img1_small.png" if small else f"img{number}.png")).read_bytes()


@cache
def prepared(name: str) -> tuple[PreparedImage, ...]:
    """Both images of a golden."""
    return tuple(prepare_image(source(name, number), image_spec(name)) for number in (0, 1))


def expected(name: str) -> Any:
    """The arrays of a golden."""
    return np.load(golden(name) / "expected.npz")


def tiles(images: Sequence[PreparedImage]) -> list[np.ndarray]:
    """The patches of each tile of images, without padding."""
    return [
        tile[: rows * columns]
        for image in images
        for tile, (rows, columns) in zip(image.patches, image.grids, strict=True)
    ]


def expected_tiles(
    values: np.ndarray, images: Sequence[PreparedImage], patch: int
) -> list[np.ndarray]:
    """The same of the processor's pixel values, in whichever of its forms they are."""
    grids = [grid for image in images for grid in image.grids]
    ends = np.cumsum([rows * columns for rows, columns in grids])[:-1]
    area = patch * patch
    if values.ndim == 2:  # patches of all images, repeated in time
        twice = values.reshape(len(values), 3, 2, area)
        assert np.array_equal(twice[:, :, 0], twice[:, :, 1])
        return np.split(twice[:, :, 0].reshape(len(values), -1), ends)
    if values.ndim == 4 and values.shape[1:] == (3, patch, patch):
        return np.split(values.reshape(len(values), -1), ends)
    if values.shape[:3] == (1, 3, patch):  # patches side by side
        beside = values[0].reshape(3, patch, -1, patch).transpose(2, 0, 1, 3)
        return np.split(beside.reshape(len(beside), -1), ends)
    if values.ndim == 3:  # patches of tiles, padded
        return [tile[: rows * columns] for tile, (rows, columns) in zip(values, grids, strict=True)]
    if values.ndim == 5 and len(values) == len(images):  # tiles of each image, padded
        whole = [
            t for of, image in zip(values, images, strict=True) for t in of[: len(image.grids)]
        ]
    else:
        whole = list(values.reshape(-1, *values.shape[-3:]))
    found = []
    for tile, (rows, columns) in zip(whole, grids, strict=True):
        cut = tile[:, : rows * patch, : columns * patch]
        blocks = cut.reshape(3, rows, patch, columns, patch).transpose(1, 3, 0, 2, 4)
        found.append(blocks.reshape(rows * columns, -1))
    return found
