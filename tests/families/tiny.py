"""Tiny checkpoints with random weights, and what tests of several families share."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jinfer import LLM
from tests.reference.numpy_blocks import attention
from tests.reference.numpy_tensors import Floats, Tensors, dense, heads, merged, within

VOCAB, HIDDEN, INNER, HEADS, DIM = 96, 32, 48, 4, 8
# Of two lengths, so that one row is padded.
TEXTS = [np.random.default_rng(5).integers(3, VOCAB, n).tolist() for n in (40, 23)]
# The text that each token belongs to, for encoders that are told.
TYPES = [[0] * 17 + [1] * (len(text) - 17) for text in TEXTS]

type Shapes = dict[str, tuple[int, ...]]


def random_tensors(shapes: Shapes, seed: int = 11) -> dict[str, np.ndarray]:
    """Weights large enough that a mistake in the wiring shows; vectors called norm around 1."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        is_scale = "norm" in name.lower() and name.endswith("weight")
        width = 1.2 / np.sqrt(shape[-1]) if len(shape) > 1 else 0.3
        tensors[name] = rng.normal(float(is_scale), width, shape).astype(np.float32)
    return tensors


def served(
    folder: Path,
    config: dict[str, Any],
    shapes: Shapes,
    given: Mapping[str, np.ndarray] | None = None,
) -> tuple[LLM, Tensors]:
    """A model of random tensors with these shapes, some of them given, and the tensors."""
    own = {name: values.astype(np.float32) for name, values in (given or {}).items()}
    tensors = random_tensors(shapes) | own
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    doubles = {name: values.astype(np.float64) for name, values in tensors.items()}
    return LLM(folder, dtype="float32"), doubles


def close(got: Any, wanted: Floats, spread: float = 0.1) -> None:
    """Raises unless they are the same to 2e-4, and large enough that this says something."""
    assert wanted.std() > spread
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-4)


def linear(name: str, outputs: int, inputs: int, bias: bool = True) -> Shapes:
    """A projection's shapes."""
    shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
    return shapes | ({f"{name}.bias": (outputs,)} if bias else {})


def norm(name: str, size: int = HIDDEN, bias: bool = True) -> Shapes:
    """A norm's shapes."""
    return {f"{name}.{leaf}": (size,) for leaf in ("weight", "bias")[: 1 + bias]}


def layers_of(tensors: Tensors, prefix: str) -> Iterator[Tensors]:
    """Each layer's tensors, by the rest of their names."""
    count = 1 + max(int(name.split(".")[0]) for name in within(tensors, prefix))
    return (within(tensors, f"{prefix}{i}.") for i in range(count))


def attend(
    x: Floats, t: Tensors, names: tuple[str, str, str, str], over: Floats | None = None, **how: Any
) -> Floats:
    """Attention with projections q, k, v, o of these names; `over` an encoder's output."""
    y = x if over is None else over
    q, k, v = (heads(dense(z, t, n), HEADS) for z, n in zip((x, y, y), names[:3], strict=True))
    return dense(merged(attention(q, k, v, **how)), t, names[3])
