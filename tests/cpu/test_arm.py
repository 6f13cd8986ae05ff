"""ARM's kernels on another machine: compiled by a cross compiler, run by an emulator, without XLA.

On ARM itself the other tests of this folder run them. Debian has what this takes:
`apt-get install g++-aarch64-linux-gnu qemu-user`.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from jinfer.cpu.cpp_sources import FLAGS, ISA_FLAGS, SRC
from jinfer.cpu.matmul_call import Mode
from jinfer.quant.quantized_tensor import QuantizedTensor
from jinfer.quant_format import F16_AS_INT, QuantFormat
from tests.cpu import test_build_library, test_quantized_matmul, test_wide

_COMPILER, _EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
_PROGRAMS = Path(__file__).parent / "arm"
MODES: tuple[Mode, ...] = ("int8", "int16", "float")
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 17, 33)

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not (shutil.which(_COMPILER) and shutil.which(_EMULATOR)),
        reason="neither a compiler for ARM nor an emulator",
    ),
]


def compiled(name: str, kernels: tuple[str, ...], folder: Path) -> Path:
    """A program of the folder `arm`, with some kernels compiled as the library's are."""
    objects = []
    for source in (
        _PROGRAMS / f"{name}.cc",
        *(SRC / "linear" / f"{k}.cc" for k in kernels),
    ):
        flags = next((f for end, f in ISA_FLAGS.items() if source.stem.endswith(end)), ())
        objects.append(folder / f"{source.parent.name}_{source.stem}.o")
        include = ("-I", str(SRC))
        command = [_COMPILER, *FLAGS, *flags, *include, "-c", str(source)]
        subprocess.run([*command, "-o", str(objects[-1])], check=True)
    program = folder / name
    subprocess.run([_COMPILER, "-static", *map(str, objects), "-o", str(program)], check=True)
    return program


def emulated(program: Path, given: bytes) -> bytes:
    # A CPU that has dot products and nothing newer.
    command = [_EMULATOR, "-cpu", "neoverse-n1", str(program)]
    return subprocess.run(command, input=given, stdout=subprocess.PIPE, check=True).stdout


def linear_case(tensor: QuantizedTensor, x: np.ndarray) -> bytes:
    """What linear.cc reads: 14 numbers, then the arrays of the matrix and the rows."""
    format = tensor.format
    words = np.asarray(tensor.words)
    tiles, superblocks, bits, R, G = words.shape
    coded = format.codebook is not None
    head = (
        *(bits, format.per_code, format.block, format.numbers, 128 if coded else format.zero),
        *(R, G, tiles, superblocks, tensor.outputs, tensor.inputs),
        *(tensor.steps is not None, coded, len(x)),
    )
    arrays = [np.array(head, np.int64), words, np.asarray(tensor.scales)]
    if tensor.steps is not None:
        arrays.append(np.asarray(tensor.steps))
    if format.codebook is not None:
        table = np.zeros(16, np.int64)
        table[: len(format.codebook)] = format.codebook
        arrays.append((table + 128).astype(np.uint8))
    return b"".join(array.tobytes() for array in (*arrays, x))


@functools.cache
def matrices() -> list[QuantizedTensor]:
    """Of each width and block, and of sizes that fill no tile."""
    formats = [
        *(QuantFormat(w, 32, s) for w in test_quantized_matmul.WIDTHS for s in (False, True)),
        *(QuantFormat(w, b) for w in ("3.5", "4", "8") for b in (64, 128)),
        *(QuantFormat(w, b, s, two_level=True) for w, b, s in test_quantized_matmul.TWO_LEVEL),
        *(QuantFormat("4", 32, True, two, test_quantized_matmul.CODEBOOK) for two in (False, True)),
    ]
    return [
        *(
            test_quantized_matmul.matrix(format, 37, 330, seed=number)
            for number, format in enumerate(formats)
        ),
        test_wide.wide(37, 330),
    ]


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kernels = ("linear_portable", "linear_neon")
    return compiled("linear", kernels, tmp_path_factory.mktemp("linear"))


def products(program: Path, tensors: list[QuantizedTensor], xs: list[np.ndarray]) -> np.ndarray:
    """[tensors, modes, portable or with dot products, rows, outputs]."""
    given = b"".join(map(linear_case, tensors, xs))
    results = np.frombuffer(emulated(program, given), np.float32)
    return results.reshape(len(tensors), len(MODES), 2, len(xs[0]), -1)


@pytest.mark.parametrize("rows", ROWS)
def test_products(linear: Path, rows: int) -> None:
    """Against the matrix in full, and to the bit against the portable kernels."""
    tensors = matrices()
    xs = [
        test_quantized_matmul.activations(rows, tensor.inputs, seed)
        for seed, tensor in enumerate(tensors)
    ]
    for x in xs:
        x[:, :40] = 0  # a block of zeros
    for tensor, x, results in zip(tensors, xs, products(linear, tensors, xs), strict=True):
        for mode, (portable, neon) in zip(MODES, results, strict=True):
            expected = x if mode == "float" else test_quantized_matmul.rounded(x, mode)
            if tensor.format == F16_AS_INT:
                expected = test_wide.rounded_to_14_bits(x)
            test_quantized_matmul.assert_product(neon, expected, tensor, 2e-6)
            np.testing.assert_array_equal(neon, portable)


def test_results_are_batch_invariant(linear: Path) -> None:
    tensors = matrices()
    x = test_quantized_matmul.activations(max(ROWS), 330)
    whole = products(linear, tensors, [x] * len(tensors))
    for rows in ROWS:
        some = products(linear, tensors, [x[:rows]] * len(tensors))
        np.testing.assert_array_equal(some, whole[..., :rows, :])


def test_halves_and_words(tmp_path: Path) -> None:
    program = compiled("halves", (), tmp_path)
    halves = np.arange(1 << 16).astype(np.uint16).view(np.float16)
    floats = np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint32).view(np.float32)
    # Between two neighbours of any size, to which ties belong.
    finite = halves[np.isfinite(halves)].astype(np.float32)
    floats = np.concatenate([floats, finite, (finite[:-1] + finite[1:]) / 2])
    floats = floats[~np.isnan(floats)]
    got = emulated(program, floats.tobytes())
    wide = np.frombuffer(got[: 1 << 19], np.float32).reshape(2, -1)
    np.testing.assert_array_equal(wide[0], halves.astype(np.float32))
    np.testing.assert_array_equal(wide[1], wide[0])
    with np.errstate(over="ignore"):
        expected = floats.astype(np.float16)
    np.testing.assert_array_equal(np.frombuffer(got[1 << 19 :], np.float16), expected)


def test_kernel_objects_share_no_symbol(tmp_path: Path) -> None:
    compiled("linear", ("linear_portable", "linear_neon"), tmp_path)
    (found,) = tmp_path.glob("*linear_neon.o")
    assert test_build_library.names(found) == ["jinfer::linear_neon()"]
