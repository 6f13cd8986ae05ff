"""Each sampler of a sampler as its paper or its author defines it, on one row, in float64.

Logits in, logits out, -inf for what is dropped; among equals all stay, as in the engine.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from .numpy_sampling import Floats, probabilities


def logprobs(x: Floats) -> Floats:
    """Natural logarithms of the probabilities."""
    with np.errstate(divide="ignore"):
        return x - x.max() - np.log(np.sum(np.exp(x - x.max())))


def entropy(x: Floats) -> float:
    """In nats."""
    p = probabilities(x)
    return float(-np.sum(p[p > 0] * np.log(p[p > 0])))


def temperature(x: Floats, scale: float, spread: float = 0.0, exponent: float = 1.0) -> Floats:
    """llama.cpp's dynamic temperature; a plain one without a spread."""
    if spread:
        count = np.count_nonzero(x > -np.inf)
        share = entropy(x) / np.log(count) if count > 1 else 0.0
        low, high = max(0.0, scale - spread), scale + spread
        if count > 1:
            scale = low + (high - low) * share**exponent
    return (x - x.max()) / scale


def cut(x: Floats, kept: np.ndarray) -> Floats:
    """What is kept."""
    return np.where(kept, x, -np.inf)


def top_k(x: Floats, k: int) -> Floats:
    """The k likeliest (Fan et al., arXiv 1805.04833)."""
    return cut(x, x >= np.sort(x)[::-1][min(k, len(x)) - 1])


def _smallest_set(keys: Floats, p: Floats, mass: float) -> np.ndarray:
    """The tokens of the least keys that together have this mass, and the last one's equals."""
    order = np.argsort(keys, kind="stable")
    total = np.cumsum(p[order])
    last = order[np.argmax(total >= min(mass, total[-1]))]
    return keys <= keys[last]


def top_p(x: Floats, mass: float) -> Floats:
    """The smallest set of likeliest tokens of this mass (Holtzman et al., arXiv 1904.09751)."""
    p = probabilities(x)
    return cut(x, _smallest_set(-p, p, mass))


def min_p(x: Floats, share: float) -> Floats:
    """What has this share of the likeliest's probability (Nguyen et al., arXiv 2407.01082)."""
    p = probabilities(x)
    return cut(x, p >= share * p.max())


def typical_p(x: Floats, mass: float) -> Floats:
    """The smallest set of tokens whose surprise is nearest to the entropy (arXiv 2202.00666)."""
    away = np.abs(-logprobs(x) - entropy(x))
    return cut(x, _smallest_set(away, probabilities(x), mass))


def tfs_z(x: Floats, z: float) -> Floats:
    """Tail-free sampling (Phenix and Egan, 2019), with the cut in the middle, as its authors do.

    A token stays while the normalized second differences before it sum to at most z.
    """
    order = np.sort(x)[::-1]
    curve = np.abs(np.diff(np.diff(probabilities(order))))
    before = np.concatenate([[0.0], np.cumsum(curve)])
    last = np.flatnonzero(before <= z * curve.sum())[-1] if curve.sum() else len(x) - 1
    return cut(x, x >= order[last])


def top_a(x: Floats, a: float) -> Floats:
    """What has a * pmax^2 (BlinkDL, RWKV-LM, 2022)."""
    p = probabilities(x)
    return cut(x, p >= a * p.max() ** 2)


def top_n_sigma(x: Floats, n: float) -> Floats:
    """Logits within n standard deviations of the greatest (Tang et al., arXiv 2411.07641)."""
    there = x[x > -np.inf]
    return cut(x, x >= x.max() - n * there.std())


def xtc(x: Floats, threshold: float) -> Floats:
    """Exclude top choices (p-e-w, 2024) where chance has it so: of the likely ones the least."""
    p = probabilities(x)
    likely = (p >= threshold) & (x > -np.inf)
    return cut(x, ~likely | (p <= p[likely].min(initial=np.inf)))


def mirostat_2(x: Floats, mu: float) -> Floats:
    """Basu et al., arXiv 2007.14966, version 2: what surprises by at most mu bits."""
    bits = -logprobs(x) / np.log(2)
    return cut(logprobs(x), (bits <= mu) | (x == x.max()))


def mirostat_1(x: Floats, mu: float, fitted: int = 100) -> Floats:
    """Version 1: the k likeliest, by Zipf's law as estimated from the likeliest."""
    p = np.sort(probabilities(x))[::-1][:fitted]
    p = p[p > 0]
    rank = np.arange(1, len(p))
    t, b = np.log((rank + 1) / rank), np.log(p[:-1] / p[1:])
    s = np.sum(t * b) / np.sum(t * t)
    e = s - 1
    k = (e * 2**mu / (1 - float(len(x)) ** -e)) ** (1 / s)
    return top_k(logprobs(x), int(np.clip(k, 1, len(x))))


def adapted_mu(x: Floats, token: int, mu: float, tau: float, eta: float) -> float:
    """Mirostat's mu after a token of the distribution x: mu - eta (surprise - tau)."""
    return mu - eta * (-logprobs(x)[token] / np.log(2) - tau)


def penalties(
    x: Floats,
    text: Sequence[int],
    prompt: int,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    last_n: int = -1,
) -> Floats:
    """CTRL's repetition penalty (arXiv 1909.05858), OpenAI's presence and frequency penalties."""
    start = 0 if last_n < 0 else max(0, len(text) - last_n)
    out = x.copy()
    for token in set(text[start:]):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token, count in Counter(text[max(start, prompt) :]).items():
        out[token] -= count * frequency + presence
    return out


def dry(
    x: Floats,
    text: Sequence[int],
    multiplier: float,
    base: float = 1.75,
    allowed: int = 2,
    last_n: int = -1,
    breakers: Sequence[int] = (),
) -> Floats:
    """DRY (p-e-w, 2024): the sequence's end is looked for before every token of it."""
    text = list(text) if last_n < 0 else list(text)[len(text) - min(last_n, len(text)) :]
    longest: dict[int, int] = {}
    for place in range(1, len(text)):
        length = 0
        while (
            place - 1 - length >= 0
            and text[place - 1 - length] == text[-1 - length]
            and text[-1 - length] not in breakers
        ):
            length += 1
        longest[text[place]] = max(longest.get(text[place], 0), length)
    out = x.copy()
    for token, length in longest.items():
        if length >= allowed and token not in breakers:
            out[token] -= multiplier * base ** (length - allowed)
    return out


def bad_words(x: Floats, text: Sequence[int], words: Sequence[Sequence[int]]) -> Floats:
    """No sequence is completed."""
    out = x.copy()
    for *begun, last in words:
        if not begun or list(text[-len(begun) :]) == begun:
            out[last] = -np.inf
    return out


def fsd(
    x: Floats,
    text: Sequence[int],
    alpha: float = 0.5,
    k: int = 6,
    n: int = 3,
    beta: float = 0.9,
    pool: int = 50,
) -> int:
    """The token that FSD chooses (Yang et al., arXiv 2305.12675, with Inferflow's pool)."""
    likeliest = np.argsort(-x, kind="stable")
    pooled = likeliest[:pool] if pool else likeliest
    p = dict(zip(pooled.tolist(), probabilities(x[pooled]), strict=True))
    following: list[dict[tuple[int, ...], Counter[int]]] = [{} for _ in range(n)]
    for size in range(n):
        for end in range(size, len(text)):
            context = tuple(text[end - size : end])
            following[size].setdefault(context, Counter())[text[end]] += 1

    def predicted(token: int) -> float:
        score, rest = 0.0, 1.0
        if len(text) < n - 1:
            return 0.0
        for size in range(n - 1, -1, -1):
            context = tuple(text[len(text) - size :])
            counts = following[size].get(context, Counter())
            if counts[token]:
                seen = counts.total()
                share = beta * counts[token] / (seen + 1) if size else counts[token] / seen
                score, rest = score + rest * share, rest * (1 - beta)
        return score

    candidates = [token for token in likeliest[:k].tolist() if x[token] > -np.inf]
    scores = [(1 - alpha) * p.get(c, 0.0) - alpha * predicted(c) for c in candidates]
    return candidates[int(np.argmax(scores))]


def contrastive(p: Floats, hidden: Floats, past: Floats, alpha: float) -> int:
    """Su et al., arXiv 2202.06417: which candidate."""

    def likeness(a: Floats, b: Floats) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    worst = [max(likeness(h, one) for one in past) for h in hidden]
    return int(np.argmax((1 - alpha) * p - alpha * np.array(worst)))
