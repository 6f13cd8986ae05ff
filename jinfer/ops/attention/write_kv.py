"""KV cache write on a GPU, as one primitive of a traced function (vLLM: reshape_and_cache).

`jinfer.ops.fusion.fuse_gpu` finds the primitive, and fuses the matmul sums and rope before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jinfer.ops import gpu_backend
from jinfer.ops.attention.kv_cache import AttentionMetadata, LayerCache, write_cache

if TYPE_CHECKING:
    from jaxtyping import Float

WRITE_KV = Primitive("enter_cache")
WRITE_KV.multiple_results = True


def has_write_kernel(cache: LayerCache) -> bool:
    """Whether a kernel supports this cache here."""
    plain = isinstance(cache.keys, Array) and isinstance(cache.values, Array)
    return plain and gpu_backend.fuses_prologue()


def write_kv(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads value_dim"],
    cache: LayerCache,
    at: AttentionMetadata,
) -> tuple[Float[Array, "tokens heads head_dim"], LayerCache]:
    """The queries, and the cache after `jinfer.ops.attention.kv_cache.write_cache`."""
    q, keys, values = WRITE_KV.bind(q, k, v, cache.keys, cache.values, *at)
    return q, LayerCache(keys, values)


def _written(q: Array, k: Array, v: Array, *rest: Array) -> list[Any]:
    cache = write_cache(LayerCache(*rest[:2]), k, v, AttentionMetadata(*rest[2:]))
    return [q, cache.keys, cache.values]


@WRITE_KV.def_abstract_eval
def _shapes(q: Any, k: Any, v: Any, *rest: Any) -> list[Any]:
    del k, v
    return [q, *rest[:2]]


WRITE_KV.def_impl(jax.jit(_written))
mlir.register_lowering(WRITE_KV, mlir.lower_fun(_written, multiple_results=True))
