"""Names of formats, and what they cost."""

import numpy as np
import pytest

from jinfer.quant import FORMATS, QuantFormat, parse_format
from jinfer.quant.quantize_matrix import quantize
from jinfer.quant.quantized_tensor import abstract

EVEN = [
    QuantFormat(format.width, block, symmetric)
    for format in FORMATS.values()
    for block in (32, 64, 128)
    for symmetric in (False, True)
]
TABLES = [parse_format(f"q{width}_b{block}_nl") for width in (2, 3, 4) for block in (32, 64, 128)]
ALL = EVEN + TABLES


@pytest.mark.parametrize("format", EVEN, ids=lambda f: f.name)
def test_name_is_read_back(format: QuantFormat) -> None:
    assert parse_format(format.name) == format
    assert parse_format(format.name.upper()) == format
    assert parse_format(f"q{format.width}_b{format.block}_sym").symmetric
    assert not parse_format(f"q{format.width}_b{format.block}_affine").symmetric


@pytest.mark.parametrize("format", TABLES, ids=lambda f: f.name)
def test_tables(format: QuantFormat) -> None:
    assert parse_format(format.name) == format
    assert format.symmetric
    assert format.codebook == tuple(sorted(format.codebook or ()))
    assert len(format.codebook) == format.levels
    assert max(format.codebook) == 127 > -min(format.codebook)


def test_defaults() -> None:
    assert [format.symmetric for format in FORMATS.values()] == [False] * 6 + [True]
    assert {format.block for format in FORMATS.values()} == {32}
    widths = {name: format.bits_per_weight for name, format in FORMATS.items()}
    assert widths == {
        "q2": 3.0, "q3": 4.0, "q3.5": 4.5, "q4": 5.0, "q5": 6.0, "q6": 7.0, "q8": 8.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["q7", "4", "q4_b16", "q4_sym_b32", "q4_b", "q", "", "q4 ", "q5_nl"]
)
def test_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"^no quantization format .* formats are q2, .*q8") as e:
        parse_format(name)
    assert repr(name) in str(e.value)
    assert "\n" not in str(e.value)


TWO_LEVEL = [
    QuantFormat("4", 32, two_level=True),
    QuantFormat("6", 16, symmetric=True, two_level=True),
]


@pytest.mark.parametrize("format", [*ALL, *TWO_LEVEL], ids=str)
def test_memory_follows_from_the_bits(format: QuantFormat) -> None:
    shape = (3, 32, 2048)  # divides everything
    tensor = abstract(shape, format)
    assert tensor.shape == shape
    assert tensor.nbytes * 8 == np.prod(shape) * format.bits_per_weight


def test_only_plain_formats_are_quantized_to() -> None:
    codebook = QuantFormat("4", symmetric=True, codebook=tuple(range(16)))
    for format in (*TWO_LEVEL, codebook):
        with pytest.raises(ValueError, match="only read from files; choose a plain format"):
            quantize(np.ones((2, 256)), format)
    with pytest.raises(ValueError, match=r"^no method 'best'; methods are rtn, mse, gptq"):
        quantize(np.ones((2, 256)), FORMATS["q4"], method="best")  # type: ignore[arg-type]
