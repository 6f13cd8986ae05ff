"""Int8 keys in addition to a cache: the same bits as without, for any contents before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.cpu import build_library
from jinfer.cpu.isa import own_isa
from jinfer.ops.attention.kv_cache import (
    BLOCK,
    AttentionMetadata,
    CacheShape,
    LayerCache,
    abstract_cache,
    write_cache,
)
from tests.cpu.helpers import isas
from tests.ops.paged import Run, f32, placed, random, unwritten
from tests.ops.test_attention_bits import step
from tests.reference.numpy_blocks import Floats

HAS_INT8 = own_isa() in ("avx512", "avx512bf16", "amx")
pytestmark = [
    pytest.mark.skipif(not build_library.available(), reason="no C++ compiler"),
    pytest.mark.skipif(not HAS_INT8, reason="needs AVX-512 VNNI"),
]

SHAPE = CacheShape(2, 64, 64, int8_keys=True)
BLOCKS = 50


@pytest.fixture(scope="module", params=isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with build_library.lowered_isa(request.param):
        yield request.param


# A fixture of the module lasts until another variant is asked for.
WITH_INTEGERS = pytest.mark.parametrize("isa", ["avx512"], indirect=True)


def pool(kind: str, shape: CacheShape = SHAPE, *, int8_keys: bool = True) -> LayerCache:
    """A pool of any content, in which int8 keys look as if they were there."""
    cache = unwritten(kind, shape, BLOCKS)
    assert cache.int8_keys is not None
    return cache if int8_keys else cache._replace(int8_keys=None)


def int8_blocks(cache: LayerCache) -> set[int]:
    """Blocks whose int8 keys are there, of all heads."""
    digests = np.asarray(cache.int8_keys)[..., :8]
    return set(np.flatnonzero(digests.any(axis=2).all(axis=1)).tolist())


class Texts:
    """Sequences [tokens, heads, 64] of queries, keys and values."""

    def __init__(self, lengths: Sequence[int], shift: float = 4.0) -> None:
        heads = (6, 2, 2)
        self.parts = [
            [random(7 * i + j, n, width, 64) for j, n in enumerate(lengths)]
            for i, width in enumerate(heads)
        ]
        for each in self.parts[1]:
            each += shift * random(90, 2, 64)  # far from 0

    def extend(
        self, caches: Sequence[LayerCache], runs: Sequence[Run], tables: np.ndarray
    ) -> tuple[Floats, list[LayerCache]]:
        """A batch in each of some caches: the output, which must be the same, and the caches."""
        at: AttentionMetadata = placed(runs, tables)
        new = [
            f32(np.concatenate([part[r.row][r.start : r.start + r.length] for r in runs]))
            for part in self.parts
        ]
        found = [step(*new, cache, at, {}, ()) for cache in caches]
        outs = [np.asarray(out) for out, _ in found]
        for out in outs[1:]:
            assert np.array_equal(out, outs[0])
        return outs[0], [cache for _, cache in found]


def table(*blocks: int) -> np.ndarray:
    return np.array([blocks], np.int32)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_int8_keys_do_not_change_bits(kind: str) -> None:
    """Of a prompt in chunks, and of tokens after it; complete splits alone have int8 keys."""
    texts, order = Texts([2200]), np.random.default_rng(1).permutation(BLOCKS)[:35]
    tables = table(*order.tolist())
    caches = [pool(kind), pool(kind, int8_keys=False)]
    for begin, end in ((0, 700), (700, 1023), (1023, 1700), (1700, 2190)):
        _, caches = texts.extend(caches, [Run(0, begin, end - begin)], tables)
    for position in range(2190, 2200):
        out, caches = texts.extend(caches, [Run(0, position)], tables)
        assert np.isfinite(out).all()
    unused = set(range(BLOCKS)) - set(order.tolist())
    integers = build_library.isa() in ("avx512", "avx512bf16", "amx")
    assert int8_blocks(caches[0]) - unused == (set(order[:32].tolist()) if integers else set())


@WITH_INTEGERS
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("length", [600, 1023])
def test_short_texts_have_no_int8_keys(length: int) -> None:
    tables = table(*range(17))
    _, (cache,) = Texts([length]).extend([pool("f16")], [Run(0, 0, length)], tables)
    assert int8_blocks(cache) == set(range(-(-length // BLOCK), BLOCKS))


@pytest.mark.usefixtures("isa")
def test_sequences_that_share_blocks_of_a_split() -> None:
    """The later blocks differ, so that one's int8 keys are not the other's."""
    texts, shared = Texts([1700, 1700]), 12 * BLOCK
    for each in texts.parts[1:]:
        each[1][:shared] = each[0][:shared]
    texts.parts[1][1][shared:] *= 2  # another range
    one, other = [*range(27)], [*range(12), *range(30, 45)]
    tables = np.array([one, other], np.int32)
    caches = [pool("f16"), pool("f16", int8_keys=False)]
    _, caches = texts.extend(caches, [Run(0, 0, 1020)], tables)
    _, caches = texts.extend(caches, [Run(1, shared, 1020 - shared)], tables)
    for at in range(1020, 1030):  # both complete the split with the same step
        _, caches = texts.extend(caches, [Run(0, at), Run(1, at)], tables)
    _, caches = texts.extend(caches, [Run(0, 1030, 600), Run(1, 1030, 600)], tables)
    for at in range(1630, 1640):
        _, caches = texts.extend(caches, [Run(1, at), Run(0, at)], tables)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("begin", [1000, 1400, 1023])
def test_rewritten_keys_invalidate_int8_keys(begin: int) -> None:
    """As after drafts that were rejected: what was there before is not used."""
    texts, tables = Texts([1700]), table(*range(27))
    caches = [pool("f16"), pool("f16", int8_keys=False)]
    _, caches = texts.extend(caches, [Run(0, 0, 1600)], tables)
    for each in texts.parts[1:]:
        each[0][begin:] *= -3
    _, caches = texts.extend(caches, [Run(0, begin, 1)], tables)
    _, caches = texts.extend(caches, [Run(0, begin + 1, 1699 - begin - 1)], tables)
    texts.extend(caches, [Run(0, 1699)], tables)


@WITH_INTEGERS
@pytest.mark.usefixtures("isa")
def test_restored_blocks_without_int8_keys() -> None:
    """As from a file, which has a block as it was before its split was complete."""
    texts, tables = Texts([1700]), table(*range(27))
    _, (cache,) = texts.extend([pool("f16")], [Run(0, 0, 1660)], tables)
    assert cache.int8_keys is not None
    lacking = cache._replace(int8_keys=cache.int8_keys.at[3:12].set(0))
    assert int8_blocks(lacking) >= set(range(24)) - set(range(3, 12))
    _, (after, _) = texts.extend([lacking, cache], [Run(0, 1660, 10)], tables)
    assert int8_blocks(after) >= set(range(24))


@WITH_INTEGERS
@pytest.mark.usefixtures("isa")
def test_other_writes_clear_int8_keys() -> None:
    texts, tables = Texts([1600]), table(*range(25))
    _, (cache,) = texts.extend([pool("f16")], [Run(0, 0, 1600)], tables)
    before = int8_blocks(cache)
    new = [f32(random(i, 2, 2, 64)) for i in (1, 2)]
    after = jax.jit(write_cache)(cache, *new, placed([Run(0, 130), Run(-1, 700)], tables))
    assert before >= set(range(24))
    assert int8_blocks(after) == before - {2}


@pytest.mark.parametrize("kind", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_caches_of_16_bits_have_them(kind: type) -> None:
    made = abstract_cache({"a": SHAPE, "b": CacheShape(2, 64, 64)}, 3, jnp.dtype(kind))
    assert made["b"].int8_keys is None
    if kind == jnp.float32:
        assert made["a"].int8_keys is None
    else:
        assert (made["a"].int8_keys.shape, made["a"].int8_keys.dtype) == ((3, 2, 4416), jnp.uint8)
