"""Tiny checkpoints with random weights, and what tests of several families share."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jinfer import LLM
from tests.reference.numpy_blocks import attention
from tests.reference.numpy_tensors import Floats, Tensors, dense, heads, merged

VOCAB, HIDDEN, INNER, HEADS, DIM = 96, 32, 48, 4, 8
# Of two lengths, so that one row is padded.
TEXTS = [np.random.default_rng(5).integers(3, VOCAB, n).tolist() for n in (40, 23)]
# The text that each token belongs to, for encoders that are told.
TYPES = [[0] * 17 + [1] * (len(text) - 17) for text in TEXTS]

type Shapes = dict[str, tuple[int, ...]]


def random_tensors(shapes: Shapes, seed: int = 11) -> dict[str, np.ndarray]:
    """Weights large enough that a mistake in the wiring shows; those called norm around 1."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        is_norm = "norm" in name.lower()
        width = 1.2 / np.sqrt(shape[-1]) if len(shape) > 1 and not is_norm else 0.3
        mean = float(is_norm and name.endswith("weight"))
        tensors[name] = rng.normal(mean, width, shape).astype(np.float32)
    return tensors | {name: tensors[first] for name in shapes if (first := _first(name)) in shapes}


def _first(name: str) -> str:
    """The tensor that one is a copy of in checkpoints as they are written; else any text."""
    if name.endswith("coder.embed_tokens.weight"):
        return name.replace("encoder.embed_tokens", "shared").replace(
            "decoder.embed_tokens", "shared"
        )
    return name.replace(".decoder.bias", ".bias") if name.endswith(".decoder.bias") else ""


def write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Writes a checkpoint as Transformers does."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def written(
    folder: Path,
    config: dict[str, Any],
    shapes: Shapes,
    given: Mapping[str, np.ndarray] | None = None,
) -> Tensors:
    """Writes a checkpoint of random tensors with these shapes, some of them given; the tensors."""
    own = {name: values.astype(np.float32) for name, values in (given or {}).items()}
    tensors = random_tensors(shapes) | own
    write(folder, config, tensors)
    return {name: values.astype(np.float64) for name, values in tensors.items()}


def served(
    folder: Path,
    config: dict[str, Any],
    shapes: Shapes,
    given: Mapping[str, np.ndarray] | None = None,
) -> tuple[LLM, Tensors]:
    """A model of random tensors with these shapes, some of them given, and the tensors."""
    tensors = written(folder, config, shapes, given)
    return LLM(folder, dtype="float32"), tensors


def close(got: Any, wanted: Any, spread: float = 0.1) -> None:
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


def attend(
    x: Floats, t: Tensors, names: tuple[str, str, str, str], over: Floats | None = None, **how: Any
) -> Floats:
    """Attention with projections q, k, v, o of these names; `over` an encoder's output."""
    y = x if over is None else over
    q, k, v = (heads(dense(z, t, n), HEADS) for z, n in zip((x, y, y), names[:3], strict=True))
    return dense(merged(attention(q, k, v, **how)), t, names[3])
