"""Quantized matmul benchmark (GEMV, GEMM), by width, shape and rows.

One program loops over many matrices of each shape, more than caches hold, so that weights come from
memory as in a model. GB/s counts the weights' bytes; GMAC/s the multiplications.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jinfer.cli.run_command import JSON, command, write_json
from jinfer.cli.terminal.argument_parser import argument
from jinfer.ops.matmul.matmul import linear
from jinfer.quant.quantized_tensor import Activations, QuantizedTensor, abstract, empty_tensor
from jinfer.quant_format import parse_format

_SHAPES = "576x576,1536x576,576x1536,2048x2048,5632x2048,2048x5632"
_BYTES = 256 << 20  # of all matrices of a shape


def _matrices(
    shape: tuple[int, int], name: str, max_count: int, activations: Activations
) -> list[QuantizedTensor]:
    format = parse_format(name)
    nbytes = abstract(shape, format).nbytes
    rng = np.random.default_rng(0)

    def made() -> QuantizedTensor:
        tensor = empty_tensor(shape, format)  # in the memory that a model's weights are in
        tensor.words[...] = rng.integers(0, 2**32, tensor.words.shape, np.uint32)
        if format.per_code == 2:  # pairs are below 121
            tensor.words[...] &= np.uint32(0x3F3F3F3F)
        tensor.scales[...] = rng.standard_normal(tensor.scales.shape)
        return replace(jax.device_put(tensor), activations=activations)

    return [made() for _ in range(max(1, min(max_count, _BYTES // nbytes)))]


def _measure(weights: list[QuantizedTensor], rows: int, seconds: float) -> float:
    """Seconds for a matmul, the least of several runs."""

    def products(x: jax.Array, weights: list[QuantizedTensor]) -> jax.Array:
        total = jnp.zeros((), jnp.float32)
        for weight in weights:
            # Each waits for the one before, as layers do.
            total = linear(x + total, weight)[0, 0] * jnp.float32(0)
        return total

    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, weights[0].inputs)), "float32")
    compiled = jax.jit(products).lower(x, weights).compile()
    compiled(x, weights).block_until_ready()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        compiled(x, weights).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return best / len(weights)


def _list[T](parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Parses comma-separated texts."""

    def read(text: str) -> list[T]:
        try:
            return [parse(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _format(text: str) -> str:
    parse_format(text)
    return text


def _shape(text: str) -> tuple[int, int]:
    outputs, _, inputs = text.partition("x")
    return _count(outputs), _count(inputs)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number above 0")
    return int(text)


@command(
    "Measures quantized matmuls by width, shape and rows.",
    argument(
        "--formats",
        type=_list(_format),
        default="q4,q8,q3.5",
        help="formats, such as q4,q3.5_b64_sym",
    ),
    argument("--shapes", type=_list(_shape), default=_SHAPES, help="outputs x inputs"),
    argument("--rows", type=_list(_count), default="1,8,512", help="rows of the activations"),
    argument(
        "--mode", default="int8", choices=["int8", "int16", "float"], help="type of the activations"
    ),
    argument("--seconds", type=float, default=0.5, help="seconds per measurement"),
    argument("--most", type=_count, default=64, help="max matrices of a shape"),
    JSON,
)
def main(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    results = []
    print(f"{'format':8}{'shape':12}{'rows':>5}{'µs':>11}{'GB/s':>8}{'GMAC/s':>9}")
    for outputs, inputs in options.shapes:
        for name in options.formats:
            weights = _matrices((outputs, inputs), name, options.most, options.mode)
            for rows in options.rows:
                some = weights[: 4 if rows > 64 else None]
                took = _measure(some, rows, options.seconds)
                gb, gmac = weights[0].nbytes / took / 1e9, rows * outputs * inputs / took / 1e9
                shape = f"{outputs}x{inputs}"
                print(f"{name:8}{shape:12}{rows:5}{took * 1e6:11.1f}{gb:8.1f}{gmac:9.1f}")
                results.append({"format": name, "shape": shape, "rows": rows, "seconds": took,
                                "gb_per_second": gb, "gmac_per_second": gmac})  # fmt: skip
    write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
