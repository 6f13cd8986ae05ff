"""Image encoder: runs the encoder of images, a model of its own, on tiles of one image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jinfer.engine.runner.compiled_programs import CompiledPrograms
from jinfer.engine.runner.model_runner import ModelRunner
from jinfer.engine.runner.step_key import Sizes, StepKey
from jinfer.nn.abstract_model import AbstractModel

if TYPE_CHECKING:
    import jax
    from jaxtyping import Float

    from jinfer.disk_cache import DiskCache

# Numbers of patches that there are programs for; beyond, multiples of the last one.
PATCHES: tuple[int, ...] = (64, 256, 576, 1024, 2048, 4096)
_TILES = 16  # tiles of a call, at most


class EncodedTiles(NamedTuple):
    """What the encoder gives for some tiles.

    Attributes:
        rows: features of all tiles, one tile after another.
        deepstack: further features of the same tokens, for layers of the decoder.
        newline: the learned vector of a line break; None: the model has none.
    """

    rows: Float[np.ndarray, "tokens hidden"]
    deepstack: Float[np.ndarray, "layers tokens hidden"]
    newline: Float[np.ndarray, " hidden"] | None


@dataclass(eq=False)
class ImageEncoder:
    """An encoder of images on its device.

    Attributes:
        runner: has its programs and weights.
    """

    runner: ModelRunner

    @classmethod
    def of(
        cls,
        model: AbstractModel,
        program_cache: DiskCache | None = None,
        device: jax.Device | None = None,
    ) -> ImageEncoder:
        """Makes an encoder whose weights are yet to be loaded.

        Args:
            device: where it runs; None: JAX's default device.
        """
        sizes = Sizes(1, 1, 0, {}, np.dtype(np.float32))
        return cls(ModelRunner(programs=CompiledPrograms(model, sizes, program_cache, device)))

    def encode(
        self, patches: Float[np.ndarray, "tiles patches values"], grids: Sequence[tuple[int, int]]
    ) -> EncodedTiles:
        """Computes the features of tiles.

        Args:
            patches: padded at the end of each tile.
            grids: rows and columns of each tile's patches.
        """
        found = [
            self._encode(patches[begin : begin + _TILES], grids[begin : begin + _TILES])
            for begin in range(0, len(grids), _TILES)
        ]
        rows, deepstack = (np.concatenate([part[i] for part in found], axis=-2) for i in range(2))
        return EncodedTiles(rows, deepstack, found[0].newline)

    def _encode(self, patches: np.ndarray, grids: Sequence[tuple[int, int]]) -> EncodedTiles:
        counts = [rows * columns for rows, columns in grids]
        size, tiles = padded_patches(max(counts)), 1 << (len(grids) - 1).bit_length()
        padded = np.zeros((tiles, size, patches.shape[2]), np.float32)
        padded[: len(grids), : patches.shape[1]] = patches[:, :size]
        sizes = np.ones((tiles, 2), np.int32)
        sizes[: len(grids)] = grids
        program = self.runner.programs.get(StepKey("encode_image", size, rows=tiles))
        results = {n: np.asarray(v) for n, v in program(self.runner.leaves, padded, sizes).items()}
        features = results["features"]
        merged = size // features.shape[1]  # patches of a feature

        def of_tiles(values: np.ndarray) -> np.ndarray:
            parts = (values[i, : count // merged] for i, count in enumerate(counts))
            return np.concatenate([*parts])

        rows, deep = of_tiles(features), np.zeros((0, 0, features.shape[2]), np.float32)
        if "deepstack" in results:
            deep = of_tiles(results["deepstack"]).reshape(len(rows), -1, rows.shape[1])
            deep = deep.swapaxes(0, 1)
        newline = results["newline"].reshape(-1) if "newline" in results else None
        return EncodedTiles(rows, deep, newline)


def padded_patches(count: int) -> int:
    """The number of patches of the program for a tile."""
    last = PATCHES[-1]
    return next((size for size in PATCHES if size >= count), -(-count // last) * last)
