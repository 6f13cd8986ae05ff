"""Batch invariance: a token's attention by the custom call does not depend on the
batch, the chunks in which its sequence came, the places of its blocks or the number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfer.cpu import build_library
from jinfer.ops.attention.kv_cache import AttentionMetadata, CacheShape, LayerCache
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.paged_attention import attend_text, extend
from jinfer.quant_format import FORMATS
from tests.arrays import on_device
from tests.cpu.helpers import isas
from tests.ops.paged import (
    SCALE,
    Run,
    attended,
    blocks_of,
    f32,
    filled,
    placed,
    random,
    sequences,
    tables_of,
    unwritten,
)
from tests.reference.numpy_blocks import Floats

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")

KINDS = ["f32", "bf16", "f16", *FORMATS]
SIZES = (1, 2, 3, 5, 17, 70, 200)  # tokens of a batch: few programs

step = jax.jit(
    lambda q, k, v, cache, at, rules, fixed: extend(
        q, k, v, cache, at, ScoreRules(SCALE, **dict(fixed), **rules)
    ),
    static_argnames="fixed",
)


class Work:
    """Sequences with queries for each of their tokens, and the rules of their attention."""

    def __init__(self, data: st.DataObject) -> None:
        draw = data.draw
        self.kind = draw(st.sampled_from(KINDS), "kind")
        self.shared = draw(st.booleans(), "latent")
        kv_heads, group = draw(st.integers(1, 2), "kv_heads"), draw(st.integers(1, 9), "group")
        dim, value_dim = draw(st.sampled_from([8, 24, 40, 64, 72, 120]), "dim"), 24
        near = st.integers(1, 150)
        lengths = draw(st.lists(near, min_size=1, max_size=3), "lengths")
        self.lengths = [*lengths, draw(st.sampled_from([1, 512, 513, 580, 1100]), "long")]
        heads = kv_heads * group
        self.shape = CacheShape(kv_heads, dim, 0 if self.shared else value_dim)
        self.q, self.k, self.v = (
            [random(seed + i, n, width, size) for i, n in enumerate(self.lengths)]
            for seed, width, size in (
                (0, heads, dim),
                (10, kv_heads, dim),
                (20, kv_heads, dim if self.shared else value_dim),
            )
        )
        self.fixed: dict[str, Any] = {}
        self.rules: dict[str, Any] = {}
        if draw(st.booleans(), "window"):
            self.fixed["window"] = draw(st.sampled_from([1, 50, 64, 600]), "size")
        if draw(st.booleans(), "softcap"):
            self.fixed["softcap"] = 1.5
        if draw(st.booleans(), "sinks"):
            self.rules["sinks"] = f32(random(30, heads))
        if draw(st.booleans(), "slopes"):
            self.rules["slopes"] = f32(np.abs(random(31, heads)) / 10)
        if draw(st.booleans(), "by distance"):
            self.rules["by_distance"] = f32(random(32, heads, 40))
            self.fixed["lowest"] = draw(st.sampled_from([0, -3]), "lowest")

    def empty(self) -> LayerCache:
        return unwritten(self.kind, self.shape, blocks_of(self.lengths))

    def extend(
        self, cache: LayerCache, runs: list[Run], tables: np.ndarray
    ) -> tuple[np.ndarray, LayerCache]:
        """A batch of these tokens, filled up with padding."""
        count = sum(run.length for run in runs)
        padding = next(size for size in SIZES if size >= count) - count
        at = placed([*runs, *([Run(-1, 0, padding)] if padding else [])], tables)

        def batch(parts: list[Floats]) -> Any:
            cut = [parts[run.row][run.start : run.start + run.length] for run in runs]
            return f32(np.concatenate([*cut, np.full((padding, *parts[0].shape[1:]), np.nan)]))

        v = None if self.shared else batch(self.v)
        fixed = tuple(self.fixed.items())
        out, cache = step(batch(self.q), batch(self.k), v, cache, at, self.rules, fixed)
        got = np.asarray(out)
        assert not got[count:].any()
        return got[:count], cache

    def schedule(self, chance: np.random.Generator, tables: np.ndarray) -> Any:
        """All tokens, in chunks of any size, in batches with any other sequences."""
        parts: list[list[np.ndarray]] = [[] for _ in self.lengths]
        done, cache = [0] * len(self.lengths), self.empty()
        while done != self.lengths:
            runs, room = [], int(chance.choice(SIZES))
            for row in chance.permutation(len(done)):
                left = min(self.lengths[row] - done[row], room)
                count = int(chance.integers(0, left + 1)) if left > 1 else left
                if count:
                    runs.append(Run(int(row), done[row], count))
                    room, done[row] = room - count, done[row] + count
            if not runs:
                continue
            got, cache = self.extend(cache, runs, tables)
            for run in runs:
                parts[run.row].append(got[: run.length])
                got = got[run.length :]
        return [np.concatenate(each) for each in parts], cache


@pytest.fixture(scope="module", params=isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with build_library.lowered_isa(request.param):
        yield request.param


@pytest.mark.usefixtures("isa")
@settings(max_examples=6)
@given(data=st.data())
def test_any_schedule_gives_the_same_bits(data: st.DataObject) -> None:
    """Against each token computed alone, in another order of blocks; and against the definition."""
    work = Work(data)
    chance = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    tables = tables_of(work.lengths, seed=1)
    got, cache = work.schedule(chance, tables)
    again, _ = work.schedule(chance, tables_of(work.lengths, seed=2, width=40))
    for a, b in zip(got, again, strict=True):
        assert np.array_equal(a, b)
    keys = sequences(cache.keys, tables, work.lengths)
    values = keys if work.shared else sequences(cache.values, tables, work.lengths)
    rules = {**work.rules, **work.fixed}
    group = work.q[0].shape[1] // work.shape.heads
    for row, length in enumerate(work.lengths):
        for t in {0, length // 2, length - 1}:
            run = Run(row, t)
            alone, _ = work.extend(cache, [run], tables)
            assert np.array_equal(alone[0], got[row][t])
            for head in {0, work.q[0].shape[1] - 1}:
                kv = keys[row][:, head // group], values[row][:, head // group]
                expected = attended(work.q[row][t, head], *kv, t, t, head, **rules)
                np.testing.assert_allclose(got[row][t, head], expected, atol=1e-5, rtol=1e-5)


PROGRAM = """
import hashlib, sys
import numpy as np
from tests.ops.paged import *
from tests.ops.test_attention_bits import step
lengths, kind = [3000, 40, 2100], sys.argv[1]
tables = tables_of(lengths)
keys, values = ([random(i + j, n, 1, 64) for j, n in enumerate(lengths)] for i in (0, 9))
cache = filled(kind, keys, values, tables)
at = placed([Run(0, 2996, 2), Run(1, 39), Run(2, 2098, 2)], tables)
new = (f32(random(i, 5, heads, 64)) for i, heads in enumerate((8, 1, 1)))
out, _ = step(*new, cache, at, {}, ())
print(hashlib.sha256(np.asarray(out).tobytes()).hexdigest())
"""


@pytest.mark.parametrize("kind", ["f32", "q4"])
def test_threads_do_not_change_bits(kind: str) -> None:
    """Long walks of few tokens are cut into parts where there are several threads."""

    def digest(threads: int) -> str:
        environment = {**os.environ, "NPROC": str(threads)}
        command = [sys.executable, "-c", PROGRAM, kind]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    alone = digest(1)
    assert len(alone) == 64
    assert digest(3) == alone


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("tokens", [20, 100, 700])
def test_text_is_independent_of_other_texts(tokens: int) -> None:
    """Padding and other sequences change no bit."""
    rules = ScoreRules(SCALE, window=90, ahead=90)
    q, k, v = random(1, 3, tokens, 4, 40), random(2, 3, tokens, 2, 40), random(3, 3, tokens, 2, 40)
    lengths = [tokens, tokens // 2, tokens - 3]
    text = jax.jit(lambda q, k, v, lengths: attend_text(q, k, v, lengths, rules))
    together = text(f32(q), f32(k), f32(v), on_device(lengths, jnp.int32))
    for row, length in enumerate(lengths):
        alone = [f32(x[row : row + 1, :length]) for x in (q, k, v)]
        got = text(*alone, on_device([length], jnp.int32))
        assert np.array_equal(got[0], together[row, :length])


@pytest.mark.usefixtures("isa")
def test_nan_in_another_sequence_does_not_change_bits() -> None:
    """A NaN among the tokens that come after in one's own batch is not seen, nor another's."""
    lengths = [70, 5]
    tables, shape = tables_of(lengths), CacheShape(1, 40, 40)
    q, k, v = random(1, 75, 4, 40), random(2, 75, 1, 40), random(3, 75, 1, 40)
    at: AttentionMetadata = placed([Run(0, 0, 70), Run(1, 0, 5)], tables)
    clean, _ = step(f32(q), f32(k), f32(v), unwritten("f32", shape, 3), at, {}, ())
    for part, place in ((k, 67), (v, 67), (q, 71)):
        before, part[place, 0, 3] = part[place, 0, 3], np.nan
        got, _ = step(f32(q), f32(k), f32(v), unwritten("f32", shape, 3), at, {}, ())
        broken = [71] if part is q else [67, 68, 69]
        assert np.isnan(np.asarray(got)[broken, 0]).any(axis=-1).all()
        rest = [t for t in range(75) if t not in broken]
        assert np.array_equal(np.asarray(got)[rest], np.asarray(clean)[rest])
        part[place, 0, 3] = before


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", ["f16", "q8"])
@pytest.mark.parametrize("sequences", [8, 70])
def test_decoded_tokens_are_independent(sequences: int, kind: str) -> None:
    """A token of each of many sequences, and padding; what is written is the same, too."""
    lengths = [1 + 37 * row % 200 for row in range(sequences)]
    tables = tables_of(lengths, width=4)
    keys, values = ([random(i + j, n, 2, 64) for j, n in enumerate(lengths)] for i in (0, 90))
    cache = filled(kind, keys, values, tables)
    new = [f32(random(i, sequences + 1, heads, 64)) for i, heads in enumerate((6, 2, 2))]
    order = [*np.random.default_rng(0).permutation(sequences).tolist(), -1]
    runs = [Run(row, max(lengths[row] - 1, 0)) for row in order]
    together, after = step(*new, cache, placed(runs, tables), {}, ())
    assert not np.asarray(together)[-1].any()
    for t in (0, 1, 5, sequences - 1):
        alone, one = step(*(x[t : t + 1] for x in new), cache, placed([runs[t]], tables), {}, ())
        assert np.array_equal(alone[0], together[t])
        block = tables[order[t], runs[t].start // 64]
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(after), strict=True):
            assert np.asarray(x[block]).tobytes() == np.asarray(y[block]).tobytes()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("position", [68, 63])
def test_token_sees_keys_written_in_the_same_call(position: int) -> None:
    """Rows may have the same blocks; tokens of both then are as those of one sequence."""
    tables, shape = np.array([[1, 0], [1, 0]], np.int32), CacheShape(2, 64, 64)
    count = position + 2
    new = [f32(random(i, count, heads, 64)) for i, heads in enumerate((6, 2, 2))]
    start = placed([Run(0, 0, position)], tables)
    _, cache = step(*(x[:position] for x in new), unwritten("f16", shape, 2), start, {}, ())
    at_one, at_two = ([Run(0, position, 2)], [Run(0, position), Run(1, position + 1)])
    one, two = (
        step(*(x[position:] for x in new), cache, placed(runs, tables), {}, ())[0]
        for runs in (at_one, at_two)
    )
    assert np.isfinite(one).all()
    assert np.array_equal(one, two)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", ["f16", "bf16", "q8"])
@pytest.mark.parametrize("window", [None, 1300])
def test_old_keys_of_a_long_text(kind: str, window: int | None) -> None:
    """Part of a prompt across the place where more keys become old, against each token alone and,
    as old keys may be rounded to bytes, roughly against the definition."""
    length, begin, count, heads = 2600, 2540, 40, 6
    tables = tables_of([length, 70])
    keys, values = ([random(i, length, 2, 64), random(i + 1, 70, 2, 64)] for i in (0, 2))
    keys[0] += 5 * random(4, 2, 64)  # far from 0
    cache = filled(kind, keys, values, tables)
    new = [f32(random(5, count + 1, heads, 64) / 3)]
    new += [f32(np.concatenate([x[0][begin : begin + count], x[1][-1:]])) for x in (keys, values)]
    runs = [Run(0, begin, count), Run(1, 69)]
    rules: dict[str, Any] = {"window": window} if window else {}
    fixed = tuple(rules.items())
    got, after = step(*new, cache, placed(runs, tables), {}, fixed)
    stored = [sequences(x, tables, [length, 70])[0] for x in (after.keys, after.values)]
    for t in (0, 19, 20, count - 1):
        alone, _ = step(
            *(x[t : t + 1] for x in new), after, placed([Run(0, begin + t)], tables), {}, fixed
        )
        assert np.array_equal(alone[0], got[t])
        for head in (0, heads - 1):
            kv = [x[:, head // 3] for x in stored]
            q, at = np.asarray(new[0][t, head], np.float64), begin + t
            expected = attended(q, kv[0], kv[1], at, at, head, **rules)
            np.testing.assert_allclose(got[t, head], expected, atol=0.01 * np.abs(stored[1]).max())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", ["f16", "q8"])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_nan_in_an_old_key_is_seen(kind: str, part: str) -> None:
    length = 2100
    tables = tables_of([length])
    keys, values = [random(0, length, 1, 64)], [random(1, length, 1, 64)]
    cache = filled(kind, keys, values, tables)
    place = int(tables[0, 300 // 64]), 0, 300 % 64, 1

    def broken(x: Any) -> Any:  # a number, or the scale of a block of codes
        return x if x.dtype == jnp.uint32 else x.at[place].set(jnp.nan)

    cache = cache._replace(**{part: jax.tree.map(broken, getattr(cache, part))})
    new = [f32(random(i, 1, heads, 64)) for i, heads in enumerate((2, 1, 1))]
    got, _ = step(*new, cache, placed([Run(0, length - 1)], tables), {}, ())
    assert np.isnan(np.asarray(got)).any(axis=-1).all()
