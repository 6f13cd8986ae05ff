"""Recurrences of one sequence as their papers write them, token by token.

Inputs are [tokens, ...]; the state is zero before the first token.
"""

from __future__ import annotations

import numpy as np

from tests.reference.numpy_blocks import Floats


def causal_conv(x: Floats, weight: Floats, bias: Floats | None) -> Floats:
    """y[t] = sum over j of weight[j] x[t - taps + 1 + j] (+ bias), x [tokens, channels]."""
    taps = len(weight)
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    y = np.stack([(weight * padded[t : t + taps]).sum(0) for t in range(len(x))])
    return y if bias is None else y + bias


def mamba1(x: Floats, dt: Floats, a: Floats, b: Floats, c: Floats, d: Floats) -> Floats:
    """Gu and Dao 2023, algorithm 2: a is [channels, states], the state h too."""
    h, out = np.zeros_like(a), []
    for t in range(len(x)):
        h = np.exp(dt[t][:, None] * a) * h + np.outer(dt[t] * x[t], b[t])
        out.append(h @ c[t] + d * x[t])
    return np.array(out)


def mamba2(x: Floats, dt: Floats, a: Floats, b: Floats, c: Floats, d: Floats) -> Floats:
    """Dao and Gu 2024: heads [heads, width] with a state [width, states] each; b, c of groups."""
    tokens, heads, width = x.shape
    shared = heads // b.shape[1]
    out = np.zeros_like(x)
    for head in range(heads):
        group = head // shared
        state = np.zeros((width, b.shape[2]))
        for t in range(tokens):
            decay = np.exp(dt[t, head] * a[head])
            state = decay * state + np.outer(dt[t, head] * x[t, head], b[t, group])
            out[t, head] = state @ c[t, group] + d[head] * x[t, head]
    return out


def lightning(q: Floats, k: Floats, v: Floats, slopes: Floats) -> Floats:
    """Qin et al. 2024: o[t] = sum over s <= t of exp(-slope (t - s)) (q[t] k[s]) v[s]."""
    tokens, heads, _ = v.shape
    out = np.zeros_like(v)
    for head in range(heads):
        for t in range(tokens):
            for s in range(t + 1):
                weight = np.exp(-slopes[head] * (t - s)) * (q[t, head] @ k[s, head])
                out[t, head] += weight * v[s, head]
    return out


def gated_delta_rule(q: Floats, k: Floats, v: Floats, decay: Floats, beta: Floats) -> Floats:
    """Yang et al. 2024, eq. 10: S[t] = S[t-1] (decay (I - beta k k^T)) + beta v k^T; S [V, K].

    With a decay for each channel of k (Kimi Linear): S[t] = S[t-1] Diag(decay) (I - beta k k^T) +
    beta v k^T.
    """
    tokens, heads, width = v.shape
    shared = heads // k.shape[1]
    size = k.shape[2]
    out = np.zeros_like(v)
    for head in range(heads):
        state = np.zeros((width, size))
        for t in range(tokens):
            key = k[t, head // shared]
            alpha = np.diag(np.broadcast_to(decay[t, head], size))
            forget = alpha @ (np.eye(size) - beta[t, head] * np.outer(key, key))
            state = state @ forget + beta[t, head] * np.outer(v[t, head], key)
            out[t, head] = state @ q[t, head // shared]
    return out


def griffin(x: Floats, input_gate: Floats, recurrence_gate: Floats, parameter: Floats) -> Floats:
    """De et al. 2024, eq. 1-4: a = sigmoid(-parameter)^(8 r), as in RecurrentGemma's code."""
    base, h, out = 1 / (1 + np.exp(parameter)), np.zeros(x.shape[1]), []
    for t in range(len(x)):
        a = base ** (8 * recurrence_gate[t])
        scale = 1.0 if t == 0 else np.sqrt(1 - a * a)
        h = a * h + scale * input_gate[t] * x[t]
        out.append(h)
    return np.array(out)


def wkv4(k: Floats, v: Floats, time_decay: Floats, bonus: Floats) -> Floats:
    """Peng et al. 2023, eq. 14: a weighted mean of the values so far."""
    w, out = np.exp(time_decay), np.zeros_like(v)
    for t in range(len(k)):
        weights = [np.exp(-(t - 1 - s) * w + k[s]) for s in range(t)] + [np.exp(bonus + k[t])]
        out[t] = sum(x * y for x, y in zip(weights, v[: t + 1], strict=True)) / sum(weights)
    return out


def wkv7(r: Floats, w: Floats, k: Floats, v: Floats, removal: Floats, rate: Floats) -> Floats:
    """Peng et al. 2025, eq. 16-17: S (diag(w) - removal^T (rate removal)) + v^T k; S [V, K]."""
    tokens, heads, width = v.shape
    out = np.zeros_like(v)
    for head in range(heads):
        state = np.zeros((width, k.shape[2]))
        for t in range(tokens):
            kappa = removal[t, head]
            change = np.diag(w[t, head]) - np.outer(kappa, rate[t, head] * kappa)
            state = state @ change + np.outer(v[t, head], k[t, head])
            out[t, head] = state @ r[t, head]
    return out
