"""Encoders of images in NumPy: pre-norm transformers over patches, by names of tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import erf

type Floats = np.ndarray[Any, np.dtype[Any]]
type Tensors = Mapping[str, Floats]


def gelu(x: Floats) -> Floats:
    """x times the normal distribution function."""
    return x * (1 + erf(x / np.sqrt(2))) / 2


def gelu_tanh(x: Floats) -> Floats:
    """The approximation of `gelu` by tanh."""
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def silu(x: Floats) -> Floats:
    """x times its sigmoid."""
    return x / (1 + np.exp(-x))


def linear(t: Tensors, name: str, x: Floats) -> Floats:
    """A projection, also one that is stored as a convolution, with its bias if there is one."""
    weight = t[f"{name}.weight"]
    return x @ weight.reshape(len(weight), -1).T + t.get(f"{name}.bias", 0)


def layer_norm(t: Tensors, name: str, x: Floats, eps: float) -> Floats:
    """Layer norm with a bias."""
    centered = x - x.mean(-1, keepdims=True)
    scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps)
    return scaled * t[f"{name}.weight"] + t[f"{name}.bias"]


def rms_norm(t: Tensors, name: str, x: Floats, eps: float) -> Floats:
    """RMS norm."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * t[f"{name}.weight"]


@dataclass(frozen=True)
class Tower:
    """How the layers of an encoder are computed.

    Attributes:
        names: of a layer's modules: norm1, q, k, v or qkv, o, norm2, then up and down, and gate if
            there is one; {i} is the layer.
        rotate: a head's vector [dim] and the patch's number -> the vector, rotated.
        seen: layer -> which patches [patches, patches] attend to which; None: all to all.
    """

    names: Mapping[str, str]
    layers: int
    heads: int
    norm: Callable[[Tensors, str, Floats, float], Floats]
    activation: Callable[[Floats], Floats]
    eps: float = 1e-6
    rotate: Callable[[Floats, int], Floats] | None = None
    seen: Callable[[int], Floats | None] = lambda layer: None

    def states(self, t: Tensors, x: Floats) -> list[Floats]:
        """The input and the output of each layer, for one tile."""
        found = [x]
        for i in range(self.layers):
            name = {key: text.replace("{i}", str(i)) for key, text in self.names.items()}
            x = x + self._attention(t, name, self.norm(t, name["norm1"], x, self.eps), i)
            y = self.norm(t, name["norm2"], x, self.eps)
            if "gate" in name:
                inner = self.activation(linear(t, name["gate"], y)) * linear(t, name["up"], y)
            else:
                inner = self.activation(linear(t, name["up"], y))
            x = x + linear(t, name["down"], inner)
            found.append(x)
        return found

    def _attention(self, t: Tensors, name: Mapping[str, str], x: Floats, layer: int) -> Floats:
        if "qkv" in name:
            parts = np.split(linear(t, name["qkv"], x), 3, axis=-1)
        else:
            parts = [linear(t, name[key], x) for key in "qkv"]
        q, k, v = (part.reshape(len(x), self.heads, -1) for part in parts)
        if self.rotate is not None:
            q, k = (
                np.stack([[self.rotate(head, n) for head in row] for n, row in enumerate(part)])
                for part in (q, k)
            )
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        if (seen := self.seen(layer)) is not None:
            scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
        return linear(t, name["o"], heads.reshape(len(x), -1))


def merged(x: Floats, rows: int, columns: int, size: int) -> Floats:
    """Neighbours of patches that come row by row, each vector after another."""
    parts = x.reshape(rows // size, size, columns // size, size, -1).transpose(0, 2, 1, 3, 4)
    return parts.reshape(rows * columns // size**2, -1)
