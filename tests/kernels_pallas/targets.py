"""Every kernel with shapes of real models, to be lowered and compiled without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jinfer.loader.weights.gguf_blocks import REPACKED_FORMATS as GGUF
from jinfer.quant.kv_vectors import zero_vectors
from jinfer.quant_format import FLOAT_DTYPES, FORMATS, QuantFormat, Width
from kernels_pallas.attention.kv_layout import PackedKV
from kernels_pallas.attention.paged_attention import (
    QueryBatch,
    ScoreModifiers,
    attend,
    attend_partial,
)
from kernels_pallas.attention.write_kv import HeadVectors, Rotation, WriteSlots, write_kv
from kernels_pallas.matmul.grouped import grouped_dense_matmul, grouped_quantized_matmul
from kernels_pallas.matmul.prologue import PrologueOperand, identity, prepare_rows
from kernels_pallas.matmul.quantized import dequantize, matmul
from kernels_pallas.matmul.weight_layout import PackedMatrix
from kernels_pallas.topk_threshold import mass_threshold

Shape = jax.ShapeDtypeStruct


class Target(NamedTuple):
    """A function and the shapes it is compiled for."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


def shapes(format: QuantFormat, stack: tuple[int, ...], outputs: int, inputs: int) -> PackedMatrix:
    """A matrix without contents."""
    p = format.per_code
    superblocks = -(-inputs // 1024)
    lead = (*stack, outputs, superblocks)
    words = Shape((*lead, format.code_bits, 1, 32 // p), jnp.uint32)
    kind = jnp.int8 if format.two_level else jnp.float16
    scales = Shape((*lead, 1, 1024 // format.block, format.numbers), kind)
    steps = Shape((*lead, 1, 4, format.numbers), jnp.float16) if format.two_level else None
    return PackedMatrix(words, scales, format.levels, format.block, inputs, steps, format.codebook)


def of_gguf(name: str, rows: int) -> Target:
    """`one` with a type of GGUF's blocks."""
    return one(GGUF[name], rows)._replace(name=f"triton-{name}-{rows}")


def one(format: QuantFormat, rows: int) -> Target:
    """A matrix of a stack of layers."""
    matrix = shapes(format, (32,), 14336, 4096)

    def function(x: Any, index: Any, matrix: PackedMatrix) -> Any:
        return matmul(x, [matrix], index=index)

    args = (Shape((rows, 4096), jnp.bfloat16), Shape((1,), jnp.int32), matrix)
    return Target(f"triton-{format.name}-{rows}", function, args)


def whole(name: str) -> Target:
    """Two matrices decoded for products of many rows."""
    matrices = [shapes(GGUF.get(name) or FORMATS[name], (), n, 4096) for n in (4096, 1024)]

    def function(index: Any, matrices: list[PackedMatrix]) -> Any:
        return dequantize(matrices, index)

    return Target(f"whole-{name}", function, (Shape((1,), jnp.int32), matrices))


def several(width: Width) -> Target:
    """Queries, keys and values in one call, with inputs split."""
    matrices = [shapes(QuantFormat(width), (32,), n, 4096) for n in (4096, 1024, 1024)]

    def function(x: Any, index: Any, matrices: list[PackedMatrix]) -> Any:
        return matmul(x, matrices, index=index)

    args = (Shape((1, 4096), jnp.bfloat16), Shape((1,), jnp.int32), matrices)
    return Target(f"qkv-q{width}", function, args)


def gated(width: Width, rows: int = 1) -> Target:
    """Gate and up, and what is computed of both."""
    matrices = [shapes(QuantFormat(width), (32,), 18944, 3584) for _ in range(2)]

    def function(x: Any, index: Any, matrices: list[PackedMatrix]) -> Any:
        return matmul(x, matrices, index=index, gated=True)

    args = (Shape((rows, 3584), jnp.bfloat16), Shape((1,), jnp.int32), matrices)
    return Target(f"gated-q{width}" + (f"-{rows}" if rows > 1 else ""), function, args)


def experts(width: Width) -> Target:
    """Eight rows for eight experts."""
    matrix = shapes(QuantFormat(width), (32, 8), 14336, 4096)

    def function(x: Any, offsets: Any, index: Any, matrix: PackedMatrix) -> Any:
        return grouped_quantized_matmul(x, offsets, [matrix], index=index)

    offsets = Shape((9,), jnp.int32)
    args = (Shape((8, 4096), jnp.bfloat16), offsets, Shape((1,), jnp.int32), matrix)
    return Target(f"experts-q{width}", function, args)


def dense_experts(rows: int) -> Target:
    """Of 128 small experts, as Qwen3's."""

    def function(x: Any, offsets: Any, matrices: Any) -> Any:
        return grouped_dense_matmul(x, offsets, matrices)

    matrices = Shape((128, 768, 2048), jnp.bfloat16)
    args = (Shape((rows, 2048), jnp.bfloat16), Shape((129,), jnp.int32), matrices)
    return Target(f"dense_experts-bf16-{rows}", function, args)


def adapters() -> Target:
    """Sums of low-rank terms, whose matrices are transposed."""

    def function(x: Any, offsets: Any, matrices: Any) -> Any:
        return grouped_dense_matmul(x, offsets, matrices, transposed=True)

    matrices = Shape((4, 16, 4096), jnp.bfloat16)
    args = (Shape((8, 16), jnp.bfloat16), Shape((5,), jnp.int32), matrices)
    return Target("adapters-bf16-8", function, args)


def rows(kind: str, width: Width, count: int = 1) -> Target:
    """A product's prologue: a sum with another product's parts and its norm; gate and up."""
    inputs = {"norm": 4096, "gate": 14336}[kind]
    like = shapes(QuantFormat(width), (), 64, inputs)
    parts = [Shape((4, 16, inputs), jnp.float32)] * 2

    def norm(values: Any, reductions: Any) -> list[Any]:
        x, added, weight = values
        x = x + added.astype(jnp.bfloat16)
        y = x.astype(jnp.float32)
        return [y * jax.lax.rsqrt(reductions.sum(y * y) / inputs + 1e-5) * weight, x]

    def gate(values: Any, _: Any) -> list[Any]:
        return [jax.nn.silu(values[0]) * values[1]]

    def function(*arrays: Any) -> Any:
        kinds: Any = ("full", "parts", "vector") if kind == "norm" else ("parts", "parts")
        given = [PrologueOperand(*one) for one in zip(arrays, kinds, strict=True)]
        extra = [jnp.bfloat16] if kind == "norm" else []
        compute: Any = norm if kind == "norm" else gate
        found, others = prepare_rows(given, compute, count, like, extra)
        return found.x, found.factors, others

    x, weight = Shape((1, count, inputs), jnp.bfloat16), Shape((inputs,), jnp.float32)
    args = (x, parts[0], weight) if kind == "norm" else tuple(parts)
    return Target(f"rows-q{width}-{kind}", function, args)


def thresholds(vocab: int) -> Target:
    """What a share of the probability leaves of a vocabulary."""
    args = tuple(Shape((2, vocab), kind) for kind in (jnp.uint32, jnp.float32))
    return Target(f"thresholds-f32-{vocab}", mass_threshold, (*args, Shape((2,), jnp.float32)))


def entering(count: int, adjacent: bool = False) -> Target:
    """Queries, keys and values of new tokens from a product's parts, rotated and written."""
    parts = [Shape((4, 16, heads * 128), jnp.float32) for heads in (32, 8, 8)]
    angles = [Shape((count, 64), jnp.float32)] * 2
    pools = [Shape((128, 8, 64, 128), jnp.bfloat16)] * 2
    each = Shape((count,), jnp.int32)
    at = WriteSlots._make([each, each, Shape((16, 128), jnp.int32)])

    def function(parts: Any, angles: Any, pools: Any, at: WriteSlots) -> Any:
        cos, sin = angles
        turn = Rotation(cos, sin, adjacent)
        q, k, v = (
            HeadVectors(
                [PrologueOperand(part, "parts")], identity, heads, 128, rotation, jnp.bfloat16
            )
            for part, heads, rotation in zip(parts, (32, 8, 8), (turn, turn, None), strict=True)
        )
        keys, values = pools
        return write_kv(q, k, v, keys, values, at)

    name = f"entering-bf16-{count}" + ("-adjacent" if adjacent else "")
    return Target(name, function, (parts, angles, pools, at))


def attention(
    kind: str,
    tokens: int = 1,
    dim: int = 128,
    *,
    heads: tuple[int, int] = (32, 8),
    rows: int = 16,
    changed: bool = False,
    shared: bool = False,
    part: bool = False,
    name: str = "",
    **options: Any,
) -> Target:
    """Queries over up to 8,192 tokens of each sequence.

    Args:
        heads: of queries and of keys.
        rows: sequences that there are at most.
        changed: scores are changed in every way that there is.
        shared: the keys are the values too.
        part: of the keys in one place, without sinks.
        options: of `ScoreModifiers`.
    """
    lead = (rows * 128, heads[1], 64)

    def kept() -> PackedKV:
        if kind in FLOAT_DTYPES:
            return PackedKV(Shape((*lead, dim), FLOAT_DTYPES[kind]))
        vectors = jax.eval_shape(lambda: zero_vectors((*lead, dim), FORMATS[kind]))
        return PackedKV(vectors.words, vectors.scales, vectors.format.levels, vectors.width)

    q = Shape((tokens, heads[0], dim), jnp.float32 if kind == "f32" else jnp.bfloat16)
    each = Shape((tokens,), jnp.int32)
    queries = QueryBatch._make([each] * 4 + [Shape((rows, 128), jnp.int32)])
    per_head = Shape((heads[0],), jnp.float32) if changed else None
    table = Shape((heads[0], 128), jnp.float32) if changed else None
    args = (q, kept(), None if shared else kept(), queries, per_head, table)

    def function(q: Any, keys: Any, values: Any, queries: Any, per_head: Any, table: Any) -> Any:
        scores = ScoreModifiers(0.1, by_distance=table, slopes=per_head, sinks=per_head, **options)
        if part:
            scores = scores._replace(sinks=None)
            return attend_partial(q, keys, values, queries, scores)
        return attend(q, keys, values, queries, scores)

    return Target(f"attention-{kind}-{name or f'{tokens}-{dim}'}", function, args)


def compiled_targets() -> list[Target]:
    """Those that are compiled to machine code, which takes ten seconds each."""
    widths: tuple[Width, ...] = ("2", "3", "3.5", "4", "5", "6", "8")
    return [
        *(one(QuantFormat(width), 1) for width in widths),
        one(QuantFormat("4", symmetric=True), 1),
        one(QuantFormat("8", symmetric=True), 1),
        one(QuantFormat("3.5", 128), 1),
        one(QuantFormat("4"), 16),
        one(QuantFormat("6"), 16),
        one(QuantFormat("4"), 128),
        one(QuantFormat("8"), 128),
        *(of_gguf(name, 1) for name in ("Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4")),
        *(of_gguf(name, 128) for name in ("Q4_K", "Q6_K", "IQ4_XS")),
        *(whole(name) for name in ("q2", "q3.5", "q8", "Q4_K", "IQ4_XS")),
        several("4"),
        gated("4"),
        gated("4", 128),
        experts("4"),
        *(dense_experts(rows) for rows in (8, 8192)),
        adapters(),
        rows("norm", "4"),
        rows("gate", "3.5"),
        thresholds(128_256),
        entering(1),
        entering(16, adjacent=True),
        *(attention(kind) for kind in (*FLOAT_DTYPES, *FORMATS)),
        attention("bf16", 128),
        attention("bf16", 512),
        attention("q4", 512),
        attention("bf16", 512, heads=(8, 8), name="alone"),
        attention("q8", tokens=5, changed=True, softcap=30.0, name="all"),
        attention("q4", dim=80),
        attention("q4", dim=256),
        attention("bf16", 512, dim=256),
        attention("bf16", dim=576, heads=(128, 1), shared=True, name="latent"),
        attention("bf16", 512, dim=576, heads=(128, 1), shared=True, name="latent_many"),
        attention("f32", dim=256),
        attention("bf16", dim=640),
        attention("q8", dim=576, heads=(128, 1), shared=True, name="latent"),
    ]
