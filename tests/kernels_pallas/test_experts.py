"""Products of a mixture of experts against NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfer.quant.format import QuantFormat
from kernels_pallas.experts import expert_matmul, group
from tests.kernels_pallas.helpers import assert_near, random_matrix, random_rows

run = functools.partial(jax.jit, static_argnames=("backend", "gated", "interpret"))(expert_matmul)


@settings(max_examples=40)
@given(st.lists(st.integers(-1, 6), min_size=8, max_size=8), st.sampled_from([1, 2, 4]))
def test_every_row_has_its_place(experts: list[int], size: int) -> None:
    count = 6  # 6 itself is outside, as is -1
    groups = jax.jit(group, static_argnums=(1, 2))(jnp.asarray(experts, jnp.int32), count, size)
    place, which = np.asarray(groups.place), np.asarray(groups.which)
    taken = [p for p in place if p >= 0]
    assert len(set(taken)) == len(taken)
    assert which[1].sum() == len(taken)
    for row, expert in enumerate(experts):
        if not 0 <= expert < count:
            assert place[row] == -1
            continue
        tile = place[row] // size
        assert which[0, tile] == expert
        assert place[row] % size < which[1, tile]
        assert groups.source[place[row]] == row


@pytest.mark.parametrize("backend", ["triton", "xla"])
def test_each_row_with_its_expert(backend: str) -> None:
    matrix, values = random_matrix(QuantFormat("4"), (2, 5, 40, 600))
    tokens, each = 4, 2
    x = random_rows(tokens, 600)
    experts = np.asarray([0, 3, 3, 4, 1, 3, -1, 0], np.int32)
    (y,) = run(
        jnp.asarray(x),
        jnp.asarray(experts),
        [matrix],
        index=jnp.asarray([1], jnp.int32),
        backend=backend,
        interpret=True,
    )
    for row, expert in enumerate(experts):
        chosen = values[1, expert] if expert >= 0 else np.zeros((40, 600))
        assert_near(y[row : row + 1], x[row // each : row // each + 1], chosen)


def test_gate_and_up_of_experts() -> None:
    gate, g = random_matrix(QuantFormat("3.5"), (3, 20, 300), 1)
    up, u = random_matrix(QuantFormat("3.5"), (3, 20, 300), 2)
    x = random_rows(4, 300) / 1e4
    experts = np.asarray([2, 0, 2, 1], np.int32)
    (y,) = run(jnp.asarray(x), jnp.asarray(experts), [gate, up], gated=True, interpret=True)
    for row, expert in enumerate(experts):
        a, b = x[row] @ g[expert].T, x[row] @ u[expert].T
        np.testing.assert_allclose(
            np.asarray(y[row]), a / (1 + np.exp(-a)) * b, rtol=5e-3, atol=5e-3
        )
