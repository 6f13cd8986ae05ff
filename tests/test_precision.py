"""On a GPU, where XLA would round it, float32 is multiplied with all of its bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jinfer import LLM
from jinfer.engine.runner.compiled_programs import CompiledPrograms
from jinfer.engine.runner.step_key import StepKey
from jinfer.matmul_precision import matmul, matmul_precision
from jinfer.ops.backend import target_platform

GOLDENS = Path(__file__).parent / "goldens"
HIGHEST = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


def products(traced: Any) -> Iterator[Any]:
    """The products of float32 in a jaxpr, those of inner functions too."""
    for equation in traced.eqns:
        factors = [getattr(var.aval, "dtype", None) for var in equation.invars[:2]]
        if equation.primitive.name == "dot_general" and factors == [jnp.float32] * 2:
            yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda value: hasattr(value, "eqns") or hasattr(value, "jaxpr"),
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from products(inner)


# Plain, latent, with experts, with soft-caps, with slopes.
@pytest.mark.parametrize("name", ["llama2", "deepseek_v2", "mixtral", "gemma2", "bloom"])
def test_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JINFER_NO_KERNELS", "all")
    with LLM(GOLDENS / name, dtype="float32") as llm:
        made = llm.session.engine.runner.programs
        programs = CompiledPrograms(made.model, made.sizes)
        with target_platform("gpu"):
            function, _, arguments = programs.step_function(StepKey("logits", 8, 1))
            found = list(products(jax.make_jaxpr(function)(*arguments).jaxpr))
    assert len(found) > 8
    assert [one for one in found if one.params["precision"] != HIGHEST] == []


def test_others_are_left_alone() -> None:
    assert matmul_precision(jnp.zeros(3, jnp.bfloat16)) is None
    square = jnp.ones((2, 2))
    (one,) = products(jax.make_jaxpr(jax.jit(matmul))(square, square).jaxpr)
    assert one.params["precision"] == HIGHEST
    assert len(list(products(jax.make_jaxpr(jax.jit(jnp.matmul))(square, square).jaxpr))) == 1
