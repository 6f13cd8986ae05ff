"""Activation functions of sentence-transformers' dense layers, by the names of torch.nn's classes.

With the arguments that the classes have by default: a folder says the name alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805  # arXiv 1706.02515

_erf = np.vectorize(math.erf, otypes=[float])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


def _elu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


DENSE_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "ReLU6": lambda x: np.clip(x, 0, 6),
    "LeakyReLU": lambda x: np.where(x > 0, x, 0.01 * x),
    "ELU": _elu,
    "SELU": lambda x: _SELU_SCALE * np.where(x > 0, x, _SELU_ALPHA * _elu(x)),
    "GELU": lambda x: (0.5 * x * (1 + _erf(x / math.sqrt(2)))).astype(x.dtype),
    "SiLU": lambda x: x * _sigmoid(x),
    "Mish": lambda x: x * np.tanh(_softplus(x)),
    "Sigmoid": _sigmoid,
    "Softplus": _softplus,
    "Softsign": lambda x: x / (1 + np.abs(x)),
}
