"""GPU kernel benchmark: `python -m tools.bench_kernels [--json FILE]`.

Matmuls with the matrices of real models at every width and in GGUF's blocks, relative to the
measured memory bandwidth and tensor-core throughput, and attention over every kind of KV cache.
Each time is of a loop over different matrices of a stack, or sequences, much larger than the
machine's caches, including launches and the prologue of a matmul; `bench_programs` times whole
programs.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.cli.run_command import JSON, command, write_json
from jinfer.cli.terminal.argument_parser import argument
from jinfer.loader.weights.gguf_blocks import REPACKED_FORMATS
from jinfer.quant.kv_vectors import zero_vectors
from jinfer.quant.quantized_tensor import SUPER
from jinfer.quant_format import FLOAT_DTYPES, FORMATS, QuantFormat, Width
from kernels_pallas import (
    PackedKV,
    PackedMatrix,
    QueryBatch,
    ScoreModifiers,
    attend,
    matmul,
)
from kernels_pallas.attention.kv_layout import TOKENS

WIDTHS: tuple[Width, ...] = ("2", "3", "3.5", "4", "5", "6", "8")
BLOCKS = ("Q4_K", "Q6_K", "IQ4_XS", "MXFP4")  # of GGUF files, by default
OF_WEIGHTS: dict[str, QuantFormat] = {width: QuantFormat(width) for width in WIDTHS} | dict(
    REPACKED_FORMATS
)
SHAPES = {  # outputs, inputs
    "8B q": (4096, 4096),
    "8B k": (1024, 4096),
    "8B up": (14336, 4096),
    "8B down": (4096, 14336),
    "7B up": (11008, 4096),
    "7B down": (4096, 11008),
    "7B (2) up": (18944, 3584),
    "7B (2) down": (3584, 18944),
}
ROWS = (1, 8, 64, 512)
CACHES = (*FLOAT_DTYPES, *FORMATS)
# Sequences that decode a token each, and tokens of a prompt in the same batch.
ATTENTION_BATCHES = ((1, 0), (4, 0), (16, 0), (0, 8), (0, 512), (8, 504))
_STACK_BYTES = 1 << 30
_REPEATS = 5


def seconds(run: Callable[[], Any]) -> float:
    """Median time of a call, after a first one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes per second read and written by a copy."""
    x = jnp.zeros((1 << 29,), jnp.float32)

    @jax.jit
    def copies(x: Array) -> Array:
        return lax.fori_loop(0, 10, lambda _, x: x + 1, x)

    return 10 * 2 * x.nbytes / seconds(lambda: copies(x))


def matmul_rate() -> float:
    """Operations per second of a bf16 matmul with random numbers."""
    size, times = 8192, 10
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16) / 90

    @jax.jit
    def products(x: Array) -> Array:
        return lax.fori_loop(0, times, lambda _, x: x @ a, x)

    return times * 2 * size**3 / seconds(lambda: products(a))


def random_stack(format: QuantFormat, count: int, outputs: int, inputs: int) -> PackedMatrix:
    """Matrices of random codes."""
    superblocks = -(-inputs // 1024)
    lead = (count, outputs, superblocks)
    shape = (*lead, format.code_bits, 1, 32 // format.per_code)
    words = jax.jit(functools.partial(jax.random.bits, shape=shape, dtype=jnp.uint32))(
        jax.random.key(0)
    )
    blocks = (*lead, 1, 1024 // format.block, format.numbers)
    if not format.two_level:
        scales, steps = jnp.full(blocks, 0.01, jnp.float16), None
    else:
        scales = jnp.full(blocks, 20, jnp.int8)
        steps = jnp.full((*lead, 1, 1024 // SUPER, format.numbers), 5e-4, jnp.float16)
    return PackedMatrix(words, scales, format.levels, format.block, inputs, steps, format.codebook)


def time_product(format: QuantFormat, outputs: int, inputs: int, rows: int, backend: str) -> float:
    """Seconds of one matmul."""
    nbytes = random_stack(format, 1, outputs, inputs).nbytes
    count = max(2, min(64, _STACK_BYTES // nbytes))
    stack = random_stack(format, count, outputs, inputs)
    x = jax.random.normal(jax.random.key(1), (rows, inputs), jnp.bfloat16)

    @jax.jit
    def products(x: Array, stack: PackedMatrix) -> Array:
        def step(i: Array, x: Array) -> Array:
            index = jnp.reshape(i, (1,)).astype(jnp.int32)
            (y,) = matmul(x, [stack], index=index, backend=backend)  # type: ignore[arg-type]
            # The next product must wait for this one.
            return x + (y[:1, :1] * 1e-9).astype(x.dtype)

        return lax.fori_loop(0, count, step, x)

    return seconds(lambda: products(x, stack)) / count


def filled_pool(kind: str, shape: tuple[int, ...]) -> PackedKV:
    """Keys or values [blocks, kv_heads, TOKENS, dim] of zeros."""
    if kind in FLOAT_DTYPES:
        return PackedKV(jnp.zeros(shape, FLOAT_DTYPES[kind]))
    rows = zero_vectors(shape, FORMATS[kind])
    return PackedKV(rows.words, rows.scales, rows.format.levels, rows.width)


def scattered_tables(rows: int, length: int) -> Array:
    """Block tables of sequences whose blocks lie anywhere in a pool that holds them all."""
    blocks = rows * length // TOKENS
    order = jax.random.permutation(jax.random.key(3), blocks).astype(jnp.int32)
    return order.reshape(rows, length // TOKENS)


def time_attention(kind: str, context: int, decoding: int, prompt: int) -> tuple[float, int]:
    """Seconds of attention with 32 query heads over 8 key heads, and the bytes it must read.

    Args:
        decoding: sequences with one token each.
        prompt: tokens of one more sequence, the last ones of its context.
    """
    kv_heads, heads, dim = 8, 32, 128
    sequences = decoding + (prompt > 0)
    rows = -(-16 // sequences) * sequences
    shape = (rows * context // TOKENS, kv_heads, TOKENS, dim)
    keys, values = (filled_pool(kind, shape) for _ in range(2))
    tables = scattered_tables(rows, context)
    count = decoding + prompt
    q = jax.random.normal(jax.random.key(1), (count, heads, dim), jnp.bfloat16)
    token = jnp.arange(count, dtype=jnp.int32)
    row = jnp.minimum(token, decoding)
    last = jnp.where(token < decoding, context - 1, context - count + token)

    @jax.jit
    def attentions(q: Array, keys: PackedKV, values: PackedKV) -> Array:
        def step(i: Array, q: Array) -> Array:
            at = QueryBatch(row + i * sequences, last, jnp.zeros_like(last), last, tables)
            out = attend(q, keys, values, at, ScoreModifiers(dim**-0.5), backend="triton")
            # The next must wait for this one.
            return q + (out * 1e-9).astype(q.dtype)

        return lax.fori_loop(0, rows // sequences, step, q)

    took = seconds(lambda: attentions(q, keys, values)) * sequences / rows
    return took, (keys.nbytes + values.nbytes) * sequences // rows


def measure(names: list[str], rows: list[int], backend: str, caches: list[str]) -> dict[str, Any]:
    """All results; times in seconds, rates in bytes or operations per second."""
    copied, multiplied = copy_rate(), matmul_rate()
    device = jax.devices()[0].device_kind
    result: dict[str, Any] = {"device": device, "copy": copied, "matmul": multiplied}
    print(f"{device}: copy {copied / 1e12:.2f} TB/s, bf16 {multiplied / 1e12:.0f} TFLOP/s")
    print("width  matrix       rows        µs     GB/s  of copy  of matmul")
    result["products"] = []
    formats = {name: OF_WEIGHTS[name] for name in names}
    for width, format in formats.items():
        for name, (outputs, inputs) in SHAPES.items():
            size = random_stack(format, 1, outputs, inputs).nbytes
            for count in rows:
                took = time_product(format, outputs, inputs, count, backend)
                read = size / took
                share = 2 * count * outputs * inputs / took / multiplied
                row = {"width": width, "matrix": name, "rows": count, "seconds": took}
                result["products"].append(
                    {**row, "bytes": size, "of_copy": read / copied, "of_matmul": share}
                )
                print(
                    f"{width:<6} {name:<12} {count:4} {took * 1e6:9.1f} {read / 1e9:8.0f} "
                    f"{read / copied:8.0%} {share:9.0%}",
                    flush=True,
                )
    print("cache  attention over 16,384: decoding, tokens of a prompt, µs, GB/s, of copy")
    result["attention"] = []
    # Not in XLA, which would gather all keys of every token.
    for kind, (decoding, prompt) in itertools.product(caches, ATTENTION_BATCHES):
        took, size = time_attention(kind, 1 << 14, decoding, prompt)
        row = {"cache": kind, "decoding": decoding, "prompt": prompt}
        result["attention"].append({**row, "seconds": took, "bytes": size})
        print(
            f"{kind:<6} {decoding:4} {prompt:4} {took * 1e6:9.1f} {size / took / 1e9:8.0f} "
            f"{size / took / copied:8.0%}"
        )
    return result


@command(
    "Times GPU kernels, and compares them with the memory and the tensor cores.",
    JSON,
    argument("--widths", nargs="+", choices=OF_WEIGHTS, default=[*WIDTHS, *BLOCKS]),
    argument("--rows", nargs="+", type=int, default=list(ROWS)),
    argument("--backend", choices=["triton", "xla"], default="triton"),
    argument("--caches", nargs="*", choices=CACHES, default=list(CACHES)),
)
def main(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    check_gpu()
    result = measure(options.widths, options.rows, options.backend, options.caches)
    write_json(options.json, result)
    return 0


def check_gpu() -> None:
    """Raises `OSError` without a GPU."""
    if jax.default_backend() != "gpu":
        raise OSError(f"this needs a GPU; JAX found {jax.default_backend()}")


if __name__ == "__main__":
    sys.exit(main())
