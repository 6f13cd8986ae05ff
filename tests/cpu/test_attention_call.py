"""The custom call for attention refuses what does not fit together, instead of reading beyond."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jinfer.cpu import build_library
from jinfer.cpu.attention_call import CacheOperands, KvFormat, Scores, attention, supported
from jinfer.cpu.isa import Isa
from jinfer.ops.attention.kv_cache import CacheShape, zero_cache
from jinfer.quant_format import parse_format
from tests.arrays import on_device
from tests.cpu.helpers import isas

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")

HEADS, KV_HEADS, DIM, BLOCKS, TOKENS = 4, 2, 40, 3, 5
Q8, Q4 = KvFormat(8, 256, 1, True), KvFormat(4, 16, 1, False)


def zeros(*shape: int, dtype: Any = jnp.float32) -> Array:
    return jnp.zeros(shape, dtype)


def arguments(kind: str = "f32") -> dict[str, Any]:
    """A call that is right: two sequences, of which one has a block before its window gone."""
    shape = CacheShape(KV_HEADS, DIM, DIM)
    cache = zero_cache({"a": shape}, BLOCKS, jnp.float32 if kind == "f32" else parse_format(kind))[
        "a"
    ]
    keys, values = (CacheOperands(tuple(jax.tree.leaves(part)), DIM) for part in cache[:2])
    return {
        "q": zeros(TOKENS, HEADS, DIM),
        "rows": on_device([0, 0, 1, 1, -1], jnp.int32),
        "positions": on_device([3, 4, 126, 127, 9999], jnp.int32),
        "last": on_device([3, 4, 126, 127, 9999], jnp.int32),
        "tables": on_device([[2, 77], [-5, 1]], jnp.int32),
        "keys": keys,
        "values": values,
        "coding": {"f32": None, "q8": Q8, "q4": Q4}[kind],
        "scores": Scores(0.3, window=60),
        "new": (zeros(TOKENS, KV_HEADS, DIM), zeros(TOKENS, KV_HEADS, DIM)),
    }


def scores(**changed: Any) -> dict[str, Any]:
    return {"scores": Scores(0.3, window=60)._replace(**changed)}


def ints(*numbers: int) -> Array:
    return on_device(numbers, jnp.int32)


PLAIN: dict[str, dict[str, Any]] = {
    "queries of another width": {"q": zeros(TOKENS, HEADS, DIM + 1)},
    "queries with two axes": {"q": zeros(TOKENS, HEADS * DIM)},
    "query heads that do not divide": {"q": zeros(TOKENS, 3, DIM)},
    "no query heads": {"q": zeros(TOKENS, 0, DIM)},
    "whole numbers as queries": {"q": zeros(TOKENS, HEADS, DIM, dtype=jnp.int32)},
    "too few rows": {"rows": ints(0, 0, 1)},
    "rows with two axes": {"rows": ints(0, 0, 1, 1, -1)[:, None]},
    "too few positions": {"positions": ints(3, 4)},
    "too few ends": {"last": ints(3)},
    "a row without a table": {"rows": ints(0, 0, 2, 2, -1)},
    "a row below -1": {"rows": ints(0, 0, 1, 1, -2)},
    "tables with one axis": {"tables": ints(2, 77, -5, 1)},
    "a position before the first": {"positions": ints(-1, 4, 126, 127, 0)},
    "a position beyond the table": {"positions": ints(3, 4, 127, 128, 0)},
    "a block that is not in the pool": {"tables": on_device([[2, 0], [0, BLOCKS]], jnp.int32)},
    "a block below 0": {"tables": on_device([[-1, 0], [0, 1]], jnp.int32)},
    "a block within the window": {"scores": Scores(0.3, window=64)},
    "no window, but a block is gone": {"scores": Scores(0.3)},
    "too few sinks": scores(sinks=zeros(HEADS - 1)),
    "sinks with two axes": scores(sinks=zeros(1, HEADS)),
    "too few slopes": scores(slopes=zeros(1)),
    "biases of too few heads": scores(by_distance=zeros(HEADS - 1, 10)),
    "a window below 0": scores(window=-2),
    "new keys of another width": {"new": (zeros(5, 2, DIM - 1), zeros(5, 2, DIM))},
    "new keys of too few tokens": {"new": (zeros(4, 2, DIM), zeros(5, 2, DIM))},
    "new values of too few heads": {"new": (zeros(5, 2, DIM), zeros(5, 1, DIM))},
    "new keys of another type": {"new": (zeros(5, 2, DIM, dtype=jnp.float16), zeros(5, 2, DIM))},
    "keys wider than said": {"keys": CacheOperands((zeros(BLOCKS, 2, 64, DIM + 1),), DIM)},
    "keys with three axes": {"keys": CacheOperands((zeros(BLOCKS, 64, DIM),), DIM)},
    "no key heads": {"keys": CacheOperands((zeros(BLOCKS, 0, 64, DIM),), DIM)},
    "keys of width 0": {"keys": CacheOperands((zeros(BLOCKS, 2, 64, 0),), 0)},
    "blocks of 60 tokens": {"keys": CacheOperands((zeros(BLOCKS, 2, 60, DIM),), DIM)},
    "values in fewer blocks": {"values": CacheOperands((zeros(BLOCKS - 1, 2, 64, DIM),), DIM)},
    "values of another type": {
        "values": CacheOperands((zeros(3, 2, 64, DIM, dtype=jnp.float16),), DIM)
    },
    "codes where there are none": {"coding": Q8},
    "int8 keys of too few blocks": {"int8_keys": zeros(BLOCKS - 1, 2, 4416, dtype=jnp.uint8)},
    "int8 keys of other bytes": {"int8_keys": zeros(BLOCKS, 2, 4352, dtype=jnp.uint8)},
    "int8 keys of another type": {"int8_keys": zeros(BLOCKS, 2, 4416, dtype=jnp.int8)},
    "int8 keys of whole vectors": {"int8_keys": zeros(BLOCKS, 2, 4416, dtype=jnp.uint8)},
}
CODED: dict[str, dict[str, Any]] = {
    "words of another width": {
        "keys": CacheOperands((zeros(3, 2, 64, 15, dtype=jnp.uint32),), DIM)
    },
    "too few numbers": {
        "values": CacheOperands(
            (zeros(3, 2, 64, 16, dtype=jnp.uint32), zeros(3, 2, 64, 1, dtype=jnp.float16)), DIM
        )
    },
    "numbers of another type": {
        "values": CacheOperands((zeros(3, 2, 64, 16, dtype=jnp.uint32), zeros(3, 2, 64, 2)), DIM)
    },
    "codes of 9 bits": {"coding": KvFormat(9, 512, 1, True)},
    "codes of 1 bit": {"coding": KvFormat(1, 2, 1, True)},
    "more levels than bits": {"coding": KvFormat(4, 256, 1, True)},
    "vectors wider than the words": {"keys": CacheOperands((), 500)},
    "codes without a coding": {"coding": None},
    "int8 keys": {"int8_keys": zeros(3, 2, 4416, dtype=jnp.uint8)},
}


def call(given: dict[str, Any]) -> Any:
    assert supported(HEADS, KV_HEADS)
    return jax.block_until_ready(jax.jit(lambda: attention(**given))())


@pytest.mark.parametrize("kind", ["f32", "q8", "q4"])
@pytest.mark.parametrize("isa", isas())
def test_valid_operands_are_accepted(kind: str, isa: Isa) -> None:
    with build_library.lowered_isa(isa):
        (out,), *_ = call(arguments(kind))
    assert np.array_equal(out, zeros(TOKENS, HEADS, DIM))


@pytest.mark.parametrize("name", PLAIN)
def test_invalid_operands_are_errors(name: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="jinfer_attention: "):
        call({**arguments(), **PLAIN[name]})


@pytest.mark.parametrize("name", CODED)
def test_invalid_codes_are_errors(name: str) -> None:
    given = arguments("q8")
    changed = dict(CODED[name])
    if "keys" in changed:
        missing = given["keys"].arrays[len(changed["keys"].arrays) :]
        changed["keys"] = CacheOperands((*changed["keys"].arrays, *missing), changed["keys"].dim)
    with pytest.raises(jax.errors.JaxRuntimeError, match="jinfer_attention: "):
        call({**given, **changed})


def test_empty_batch_gives_empty_output() -> None:
    given = arguments()
    for name in ("q", "rows", "positions", "last"):
        given[name] = given[name][:0]
    given["new"] = tuple(x[:0] for x in given["new"])
    assert call(given)[0][0].shape == (0, HEADS, DIM)
