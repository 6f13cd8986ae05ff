"""Whole models on the way of GPUs, interpreted: rewritten layers compute what layers say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jinfer.engine.runner.compiled_programs import CompiledPrograms
from jinfer.engine.runner.step_key import Sizes, StepKey
from jinfer.loader.open_model import open_model
from jinfer.loader.weights.storage_plan import columns_here
from jinfer.nn.abstract_model import AbstractModel, build_abstract_model
from jinfer.ops.attention import paged_attention
from jinfer.ops.attention.kv_cache import KVPool, zero_cache
from jinfer.ops.attention.xla import attend_xla
from jinfer.ops.backend import target_platform
from jinfer.ops.fusion import fuse_cpu
from jinfer.quant import parse_format
from jinfer.quant.quantized_tensor import abstract
from kernels_pallas.matmul import triton
from tests.arrays import on_device
from tests.ops.test_fuse_gpu import plain_product

# A family of each kind of wiring: norms before, after and around blocks, blocks side by side, norms
# of heads, positions of every kind, experts, latent attention.
FAMILIES = [
    "llama2", "phi2", "falcon7b", "gemma2", "olmo2", "qwen3", "gpt2", "bloom", "minicpm", "mixtral",
    "deepseek_v2", "gpt_oss", "starcoder2",
]  # fmt: skip
TOKENS, CONTEXT = 3, 128


def quantized(model: AbstractModel) -> AbstractModel:
    """The model with its matrices in 4 bits, as GPUs have them."""
    format = parse_format("q4")
    parameters = tuple(
        abstract(one.shape, format, columns_here(format)) if role == "matrix" else one
        for one, role in zip(model.parameters, model.roles, strict=True)
    )
    return replace(model, parameters=parameters)


def filled(parameters: Any) -> Any:
    """Random numbers in place of shapes."""
    rng = np.random.default_rng(1)

    def numbers(one: Any) -> Array:
        if one.dtype == jnp.uint32:
            return on_device(rng.integers(0, 1 << 32, one.shape, np.uint32))
        scale = 0.002 if one.dtype == jnp.float16 else 0.1
        return on_device(rng.standard_normal(one.shape) * scale, one.dtype)

    return jax.tree.map(numbers, parameters)


def attend(q: Array, keys: KVPool, values: KVPool | None, *rest: Any) -> Array:
    """Attention by XLA."""
    return attend_xla(q, keys, keys if values is None else values, *rest)


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_models(family: str, goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = open_model(goldens / family, {"dtype": "float32"}).spec
    monkeypatch.setattr(triton, "product", plain_product)
    # The kernel of attention has tests of its own, and takes long to compile.
    monkeypatch.setattr(paged_attention, "attend_gpu", attend)
    with target_platform("gpu", interpret=True):
        model = quantized(build_abstract_model(spec, jnp.float32))
        blocks = {shape.group: 4 for shape in model.caches.values()}
        sizes = Sizes(2, CONTEXT, model.vocab, blocks, jnp.float32)
        function, _, args = CompiledPrograms(model, sizes).step_function(
            StepKey("forward", TOKENS, rows=2)
        )
        leaves = tuple(filled(list(args[0])))
        rows, positions = on_device([0, 0, 1]), on_device([0, 1, 0])
        tables = {group: on_device([[1, 0], [2, 3]]) for group in blocks}
        counts = on_device([2, 1])
        cache = zero_cache(model.caches, 4, jnp.float32)
        given = (leaves, cache, on_device([5, 7, 9]), rows, positions, counts, tables, counts)
        calls = str(jax.make_jaxpr(function)(*given)).count("name=prepare_rows")
        found = jax.jit(function)(*given)
        jax.clear_caches()  # layers were traced with it
        monkeypatch.setattr(fuse_cpu, "fuse_for_gpu", lambda function: function)
        plain = jax.jit(function)(*given)
        jax.clear_caches()
    assert calls > 0
    size = float(jnp.max(jnp.abs(plain[1])))
    np.testing.assert_allclose(found[1], plain[1], rtol=0, atol=2e-3 * size)
    for one, other in zip(*map(jax.tree.leaves, (found[0], plain[0])), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-3 * np.max(np.abs(other), initial=0))
