"""Prompts with images whose features are drawn at random from the images' digests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jinfer import LLM
from jinfer.engine.requests import ImageSpan
from jinfer.engine.runner.image_rows import EncodedImages, ImageFeatures

GOLDENS = Path(__file__).parents[1] / "goldens"


@dataclass(frozen=True)
class Drawn:
    """An image that is known by a number alone."""

    number: int
    tokens: int

    @property
    def digest(self) -> bytes:
        return f"image {self.number} of {self.tokens}".encode()


def features(images: EncodedImages, image: Drawn) -> ImageFeatures:
    rng = np.random.default_rng([image.number, image.tokens])
    shapes = images.shapes
    rows = rng.normal(size=(image.tokens, shapes.hidden)).astype(np.float32)
    size = shapes.deepstack, image.tokens, shapes.hidden
    return ImageFeatures(rows, rng.normal(size=size).astype(np.float32))


def open_model(name: str, **overrides: Any) -> LLM:
    """A golden that reads images, with drawn features in place of its encoder's."""
    llm = LLM(GOLDENS / f"vlm_{name}", dtype="float32", **overrides)
    images = llm.session.engine.runner.images
    assert images is not None, "it reads images"
    images.encode = lambda image: features(images, image)
    return llm


def placeholder(llm: LLM) -> int:
    spec = llm.session.opened.spec.image
    assert spec is not None, "it reads images"
    assert isinstance(spec.placeholder, int)
    return spec.placeholder


def span(begin: int, image: Drawn, columns: int = 1, cuts: int = 1) -> ImageSpan:
    """An image from a token on; of `cuts` runs with a token between them."""
    sizes = [len(part) for part in np.array_split(np.arange(image.tokens), cuts)]
    starts = [begin + sum(sizes[:n]) + n for n in range(cuts)]
    grid = image.tokens // columns, columns
    return ImageSpan(tuple(zip(starts, sizes, strict=True)), grid, image)


def laid(llm: LLM, parts: list[list[int] | tuple[Drawn, int, int]]) -> tuple[list[int], Any]:
    """A prompt of texts and images, the latter as (image, columns, cuts)."""
    ids, spans = list[int](), list[ImageSpan]()
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        one = span(len(ids), *part)
        end = sum(one.runs[-1])
        ids += [3] * (end - len(ids))
        for begin, count in one.runs:
            ids[begin : begin + count] = [placeholder(llm)] * count
        spans.append(one)
    return ids, tuple(spans)


def drawn_prompt(llm: LLM, rng: random.Random, longest: int = 150) -> tuple[list[int], Any]:
    """Texts and images in random order: few texts and images, so that many prompts begin alike."""
    grid = llm.session.engine.runner.images.shapes.grid  # type: ignore[union-attr]
    text = random.Random(rng.randrange(3))
    parts: list[Any] = []
    for _ in range(rng.randint(1, 5)):
        if rng.random() < 0.5:
            rows, columns = rng.choice([(1, 1), (2, 2), (3, 4), (5, 2), (8, 9)])
            cuts = 1 if grid else rng.choice([1, 1, min(3, rows * columns)])
            parts.append((Drawn(rng.randrange(4), rows * columns), columns, cuts))
        else:
            count = rng.choice([1, 5, 17, 40])
            parts.append([text.randrange(5, 200) for _ in range(count)])
    if isinstance(parts[-1], tuple) and rng.random() < 0.8:
        parts.append([7, 8])
    ids, spans = laid(llm, parts)
    if len(ids) <= longest:
        return ids, spans
    return drawn_prompt(llm, rng, longest)
