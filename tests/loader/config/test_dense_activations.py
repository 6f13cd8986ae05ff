"""Activation functions of dense layers, against those of torch 2.13."""

import numpy as np
import pytest

from jinfer.loader.config.pooling_config import DENSE_ACTIVATIONS

X = [-8.0, -1.5, -0.2, 0.0, 0.4, 2.0, 7.0]
TORCH = {
    "Identity": [-8.0, -1.5, -0.2, 0.0, 0.4, 2.0, 7.0],
    "Tanh": [-1.0, -0.905148, -0.197375, 0.0, 0.379949, 0.964028, 0.999998],
    "ReLU": [0.0, 0.0, 0.0, 0.0, 0.4, 2.0, 7.0],
    "ReLU6": [0.0, 0.0, 0.0, 0.0, 0.4, 2.0, 6.0],
    "LeakyReLU": [-0.08, -0.015, -0.002, 0.0, 0.4, 2.0, 7.0],
    "ELU": [-0.999665, -0.77687, -0.181269, 0.0, 0.4, 2.0, 7.0],
    "SELU": [-1.75751, -1.365814, -0.318689, 0.0, 0.42028, 2.101402, 7.354907],
    "GELU": [0.0, -0.100211, -0.084148, 0.0, 0.262169, 1.9545, 7.0],
    "SiLU": [-0.002683, -0.273638, -0.090033, 0.0, 0.239475, 1.761594, 6.993623],
    "Mish": [-0.002683, -0.2981, -0.107145, 0.0, 0.289031, 1.943959, 6.999988],
    "Sigmoid": [0.000335, 0.182426, 0.450166, 0.5, 0.598688, 0.880797, 0.999089],
    "Softplus": [0.000335, 0.201413, 0.598139, 0.693147, 0.913015, 2.126928, 7.000911],
    "Softsign": [-0.888889, -0.6, -0.166667, 0.0, 0.285714, 0.666667, 0.875],
}


@pytest.mark.parametrize("name", DENSE_ACTIVATIONS)
def test_values_are_those_of_torch(name: str) -> None:
    x = np.array(X, np.float32)
    got = DENSE_ACTIVATIONS[name](x)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, TORCH[name], rtol=0, atol=1e-5)
    with np.errstate(over="raise", invalid="raise"):
        assert np.isfinite(DENSE_ACTIVATIONS[name](np.array([-1e4, 1e4], np.float32))).all()
