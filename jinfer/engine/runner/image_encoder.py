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
    from jaxtyping import Float, Int32

    from jinfer.disk_cache import DiskCache

# Numbers of patches that there are programs for; beyond, multiples of the last one.
PATCHES: tuple[int, ...] = (64, 256, 576, 1024, 2048, 4096)
_TILES = 16  # tiles of a call, at most


class EncodedTiles(NamedTuple):
    """What the encoder gives for some tiles.

    Attributes:
        features: of each tile's tokens, which come first.
        deepstack: further features of the same tokens, for layers of the decoder.
        newline: the learned vector of a line break; None: the model has none.
    """

    features: Float[np.ndarray, "tiles tokens hidden"]
    deepstack: Float[np.ndarray, "layers tiles tokens hidden"]
    newline: Float[np.ndarray, " hidden"] | None

    def rows(self, order: Int32[np.ndarray, "tokens 2"]) -> tuple[np.ndarray, np.ndarray]:
        """Returns features and deepstack features [layers, tokens, hidden] in an order.

        Args:
            order: as in `PreparedImage`.
        """
        tiles, places = np.maximum(order[:, 0], 0), order[:, 1]
        features, deepstack = self.features[tiles, places], self.deepstack[:, tiles, places]
        if self.newline is not None:
            features[order[:, 0] < 0] = self.newline
        return features, deepstack


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
        size = padded_patches(max(rows * columns for rows, columns in grids))
        found = [
            self._encode(patches[begin : begin + _TILES], grids[begin : begin + _TILES], size)
            for begin in range(0, len(grids), _TILES)
        ]
        features = np.concatenate([part.features for part in found])
        deepstack = np.concatenate([part.deepstack for part in found], axis=1)
        return EncodedTiles(features, deepstack, found[0].newline)

    def _encode(
        self, patches: np.ndarray, grids: Sequence[tuple[int, int]], size: int
    ) -> EncodedTiles:
        tiles, count = len(grids), 1 << (len(grids) - 1).bit_length()
        padded = np.zeros((count, size, patches.shape[2]), np.float32)
        padded[:tiles, : patches.shape[1]] = patches[:, :size]
        sizes = np.ones((count, 2), np.int32)
        sizes[:tiles] = grids
        program = self.runner.programs.get(StepKey("encode_image", size, rows=count))
        results = {n: np.asarray(v) for n, v in program(self.runner.leaves, padded, sizes).items()}
        features = results["features"][:tiles]
        deep = results.get("deepstack", features[..., :0])[:tiles]
        deep = deep.reshape(*features.shape[:2], -1, features.shape[2])
        newline = results["newline"].reshape(-1) if "newline" in results else None
        return EncodedTiles(features, np.moveaxis(deep, 2, 0), newline)


def padded_patches(count: int) -> int:
    """The number of patches of the program for a tile."""
    last = PATCHES[-1]
    return next((size for size in PATCHES if size >= count), -(-count // last) * last)
