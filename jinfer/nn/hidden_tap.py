"""Hidden tap: saves a layer's hidden state for an EAGLE or MTP draft head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec.draft_head import TapSpec
from jinfer.nn.forward_context import ForwardBatch
from jinfer.ops.attention.kv_cache import LayerCache

if TYPE_CHECKING:
    from jaxtyping import Float


class HiddenTap(nnx.Module):
    """Writes vectors to a cache, and passes them on unchanged."""

    def __init__(self, block: TapSpec, dtype: DTypeLike) -> None:
        self.block = block

    def __call__(
        self, x: Float[Array, "batch tokens hidden"], batch: ForwardBatch, cache: LayerCache
    ) -> tuple[Float[Array, "batch tokens hidden"], LayerCache]:
        """The vectors, and the cache with them."""
        return x, batch.write_vectors(x[0][:, None], cache)
