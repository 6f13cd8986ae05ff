"""Encoders of images of the goldens, and the patches of their processors."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jinfer.api.build_engine import load_image_encoder, plan_images
from jinfer.engine.runner.image_encoder import ImageEncoder
from jinfer.images import PreparedImage
from jinfer.loader.open_model import Opened, open_model
from tests.images.image_goldens import expected_tiles, golden, prepared


def opened(source: Path, **overrides: Any) -> tuple[Opened, ImageEncoder]:
    """A model in a folder, with its encoder of images."""
    model = open_model(source, {"dtype": "float32", **overrides})
    plan = plan_images(model)
    assert plan is not None
    encoder = ImageEncoder.of(plan.model)
    load_image_encoder(encoder, plan)
    return model, encoder


@cache
def encoder_of(name: str) -> tuple[Opened, ImageEncoder]:
    """A golden and its encoder."""
    return opened(golden(name))


@cache
def expected(name: str) -> dict[str, np.ndarray]:
    """The arrays of a golden."""
    with np.load(golden(name) / "expected.npz") as arrays:
        return dict(arrays)


def padded(tiles: Sequence[np.ndarray]) -> np.ndarray:
    """Tiles of patches, each with zeros at the end."""
    longest = max(map(len, tiles))
    return np.stack([np.pad(tile, ((0, longest - len(tile)), (0, 0))) for tile in tiles])


def processor_tiles(name: str, prompt: str) -> list[tuple[PreparedImage, np.ndarray]]:
    """The images of a golden's prompt, with patches from its processor's pixel values."""
    images = prepared(name)[: 1 if prompt == "a" else 2]
    values = expected(name)[f"pixel_values_{prompt}"]
    spec = encoder_of(name)[0].spec.image
    assert spec is not None
    tiles = expected_tiles(values, images, spec.patch)
    found = []
    for image in images:
        own, tiles = tiles[: len(image.grids)], tiles[len(image.grids) :]
        found.append((image, padded(own)))
    return found


def features(name: str, prompt: str, encoder: ImageEncoder) -> tuple[np.ndarray, np.ndarray]:
    """Features and deepstack features of the images of a golden's prompt, in their order."""
    parts = [
        encoder.encode(patches, image.grids).rows(image.order)
        for image, patches in processor_tiles(name, prompt)
    ]
    rows, deepstack = zip(*parts, strict=True)
    return np.concatenate(rows), np.concatenate(deepstack, axis=1)
