"""What attention sees and how its scores are changed, over a paged cache and in whole texts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.paged_attention import (
    attend,
    attend_text,
)
from jinfer.ops.attention.xla import attend_text_xla, attend_xla
from tests.arrays import on_device
from tests.ops.attention_reference import attend_reference, attend_text_reference
from tests.ops.paged import SCALE, Run, attended, expected, f32, filled, placed, random, tables_of
from tests.reference.numpy_blocks import Floats

HEAD_DIM = 8
LENGTHS, RUNS = [30, 290], [Run(1, 257, 3), Run(0, 0), Run(1, 3, 2), Run(0, 29)]


def text_by_xla(q: Any, k: Any, v: Any, lengths: Any, rules: ScoreRules) -> Any:
    return attend_text_xla(q, k.swapaxes(1, 2), v.swapaxes(1, 2), lengths, rules)


FORMS = pytest.mark.parametrize("form", [attend, attend_xla, attend_reference])
TEXTS = pytest.mark.parametrize("form", [attend_text, text_by_xla, attend_text_reference])

RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": f32([0.5, -1.0, 3.0, 0.0])},
    "softcap and sinks": {"softcap": 1.5, "sinks": f32([0.5, -1.0, 3.0, 0.0])},
    "slopes": {"slopes": f32([1.0, 0.3, 0.05, 0.001])},
    "by distance": {"by_distance": f32(random(1, 4, 21)), "lowest": -5},
    "by distance, causal": {"by_distance": f32(random(2, 4, 100)), "lowest": 0},
    "by distance, one column": {"by_distance": f32(random(3, 4, 1)), "lowest": 7},
    "all": {
        "softcap": 2.0,
        "by_distance": f32(random(4, 4, 130)),
        "lowest": -1,
        "slopes": f32([1.0, 0.3, 0.05, 0.001]),
        "sinks": f32([0.5, -1.0, 3.0, 0.0]),
        "window": 70,
    },
}


@FORMS
@pytest.mark.parametrize("name", RULES)
def test_rules_over_a_cache(form: Any, name: str) -> None:
    keys = [random(20 + i, n, 2, HEAD_DIM) for i, n in enumerate(LENGTHS)]
    values = [random(30 + i, n, 2, 3) for i, n in enumerate(LENGTHS)]
    tables = tables_of(LENGTHS)
    cache, at, q = filled("f32", keys, values, tables), placed(RUNS, tables), random(1, 7, 4, 8)
    got = jax.jit(lambda *x: form(*x, at.positions, ScoreRules(SCALE, **RULES[name])))(
        f32(q), *cache[:2], at
    )
    assert_allclose(got, expected(q, keys, values, RUNS, **RULES[name]), atol=3e-6)


def whole_texts(form: Any, tokens: int, lengths: list[int], **rules: Any) -> tuple[Floats, Floats]:
    """What the form gives, and the definition."""
    q, k = random(40, len(lengths), tokens, 4, HEAD_DIM), random(41, len(lengths), tokens, 2, 8)
    v = random(42, len(lengths), tokens, 2, 5)
    target = np.zeros((len(lengths), tokens, 4, 5))
    for row, length in enumerate(lengths):
        k[row, length:] = v[row, length:] = q[row, length:] = np.nan  # padding
        for t in range(length):
            for head in range(4):
                kv = k[row, :length, head // 2], v[row, :length, head // 2]
                target[row, t, head] = attended(q[row, t, head], *kv, t, length, head, **rules)
    got = jax.jit(lambda *x: form(*x, ScoreRules(SCALE, **rules)))(
        f32(q), f32(k), f32(v), on_device(lengths, jnp.int32)
    )
    return np.asarray(got, np.float64), target


@TEXTS
@pytest.mark.parametrize("name", RULES)
def test_rules_of_whole_texts(form: Any, name: str) -> None:
    """Every token sees every other one of its own text; padding gets zeros."""
    got, target = whole_texts(form, 20, [20, 7, 0, 13], **RULES[name])
    assert_allclose(got, target, atol=3e-6)


@TEXTS
@pytest.mark.parametrize(
    "window", [4, 1000, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 30))]
)
def test_looking_ahead(form: Any, window: int) -> None:
    """Each token sees as far ahead as back; texts longer than a step."""
    got, target = whole_texts(form, 301, [301, 64], window=window, ahead=window)
    assert_allclose(got, target, atol=3e-6)


@TEXTS
def test_a_bias_of_whole_texts(form: Any) -> None:
    """Any function of the distances, per text and head."""

    def bias(distance: Any) -> Any:
        by_head = jnp.arange(1, 5, dtype=jnp.float32)[None, :, None, None]
        return jnp.cos(distance[:, None].astype(jnp.float32)) * by_head

    def by_distance(lowest: int, largest: int) -> Any:
        return np.cos(np.arange(lowest, largest + 1))[None] * np.arange(1, 5)[:, None]

    q, k, v = random(1, 2, 20, 4, 8), random(2, 2, 20, 2, 8), random(3, 2, 20, 2, 8)
    arguments = f32(q), f32(k), f32(v), on_device([20, 9])
    got = form(*arguments, ScoreRules(SCALE, bias=bias))
    table = ScoreRules(SCALE, by_distance=f32(by_distance(-19, 19)), lowest=-19)
    assert_allclose(got, attend_text_reference(*arguments, table), atol=3e-6)


@FORMS
def test_query_without_keys_gives_zeros(form: Any) -> None:
    """Its window is before the end that it may see: it must not spoil the others."""
    keys, values, tables = [random(28, 12, 2, HEAD_DIM)], [random(29, 12, 2, HEAD_DIM)], [[0]]
    cache = filled("f32", keys, values, np.array(tables, np.int32))
    at = placed([Run(0, 0, 12)], np.array(tables, np.int32))
    rules = ScoreRules(SCALE, window=4, ahead=4)
    got = form(f32(random(27, 12, 2, HEAD_DIM)), *cache[:2], at, jnp.full(12, 6), rules)
    assert_allclose(got[10:], 0)
    assert np.abs(got[:10]).min() > 0
