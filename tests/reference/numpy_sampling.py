"""The plain samplers as functions from probabilities [vocab] to probabilities [vocab]."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .numpy_blocks import softmax

type Floats = NDArray[np.float64]


def probabilities(logits: ArrayLike, temperature: float = 1.0) -> Floats:
    """softmax(logits / temperature); temperature 0 puts everything on the first largest."""
    values = np.asarray(logits, np.float64)
    if temperature == 0:
        return np.eye(len(values))[np.argmax(values)]
    return softmax(values / temperature)


def _keep(p: Floats, kept: NDArray[np.bool]) -> Floats:
    return np.where(kept, p, 0) / p[kept].sum()


def _ranks(p: Floats) -> NDArray[np.intp]:
    """Place of each token when sorted from likely to unlikely, the lower id first among equals."""
    return np.argsort(np.argsort(-p, kind="stable"), kind="stable")


def top_k(p: Floats, k: int) -> Floats:
    """Only the k most likely."""
    return _keep(p, _ranks(p) < k)


def top_p(p: Floats, mass: float) -> Floats:
    """Only the smallest set whose mass is at least this (Holtzman et al., 2019)."""
    likely_first = np.sort(p)[::-1]
    before = np.cumsum(likely_first) - likely_first
    return _keep(p, before[_ranks(p)] < mass)


def min_p(p: Floats, share: float) -> Floats:
    """Only what has at least this share of the largest probability (Nguyen et al., 2024)."""
    return _keep(p, p >= share * p.max())
