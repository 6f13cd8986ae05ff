"""Mixture of experts, one token at a time."""

from collections.abc import Callable

import numpy as np

from .numpy_blocks import Floats, sigmoid, softmax

type Routed = dict[int, float]
"""Experts of one token and their weights."""


def best(scores: Floats, count: int) -> list[int]:
    """The numbers of the greatest scores, the first of equal ones first."""
    return sorted(range(len(scores)), key=lambda e: -scores[e])[:count]


def softmax_then_top_k(logits: Floats, top_k: int, renormalize: bool = False) -> Routed:
    """Shares of all experts, of which the greatest are kept (Fedus et al., 2021)."""
    shares = softmax(logits)
    chosen = best(shares, top_k)
    total = sum(shares[e] for e in chosen) if renormalize else 1.0
    return {e: shares[e] / total for e in chosen}


def top_k_then_softmax(logits: Floats, top_k: int) -> Routed:
    """Shares of the chosen experts (Shazeer et al., 2017, without the noise)."""
    chosen = best(logits, top_k)
    return dict(zip(chosen, softmax(logits[chosen]), strict=True))


def grouped(scores: Floats, groups: int, kept: int, of: Callable[[Floats], float]) -> Floats:
    """The scores of the experts in the best groups, the others -inf (DeepSeek-V2, 2024)."""
    parts = np.split(scores, groups)
    chosen = best(np.array([of(part) for part in parts]), kept)
    return np.concatenate(
        [part if g in chosen else np.full_like(part, -np.inf) for g, part in enumerate(parts)]
    )


def best_two(scores: Floats) -> float:
    """Sum of the two greatest."""
    return float(np.sort(scores)[-2:].sum())


def deepseek_v3(
    logits: Floats, correction: Floats, top_k: int, groups: int, kept: int, scale: float
) -> Routed:
    """Sigmoids, chosen with a correction and weighed without (DeepSeek-V3, 2024)."""
    scores = sigmoid(logits)
    chosen = best(grouped(scores + correction, groups, kept, best_two), top_k)
    total = sum(scores[e] for e in chosen)
    return {e: scale * scores[e] / total for e in chosen}


def sparsemixer(logits: Floats, top_k: int, jitter_eps: float) -> Routed:
    """Picks the best again and again, by its share among those close to it (Liu et al., 2023)."""
    left = dict(enumerate(logits))
    routed: Routed = {}
    for _ in range(top_k):
        pick = max(left, key=lambda e: left[e])
        top = left[pick]
        close = [s for s in left.values() if (top - s) / max(abs(s), top) <= 2 * jitter_eps]
        routed[pick] = 1 / sum(np.exp(s - top) for s in close)
        del left[pick]
    return routed


def mixture(x: Floats, routed: list[Routed], expert: Callable[[int, Floats], Floats]) -> Floats:
    """x [length, hidden]: the sum of the experts' outputs times their weights."""
    return np.stack(
        [
            sum((weight * expert(e, row) for e, weight in choice.items()), np.zeros_like(row))
            for row, choice in zip(x, routed, strict=True)
        ]
    )
