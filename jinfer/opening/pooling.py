"""Sentence embeddings: how the vectors of a text's tokens become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np

from jinfer.checkpoint import open_checkpoint
from jinfer.guard.files import is_there
from jinfer.opening.recognize import Recognized, read_json, read_json_value
from jinfer.opening.sources import SourceError
from jinfer.records import dataclass
from jinfer.shapes import Float

Pooling = Literal["mean", "first", "last"]
_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
    "pooling_mode_lasttoken": "last",
}


_FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
}


@dataclass(frozen=True)
class Projection:
    """A dense layer after the pooling, in float32.

    Attributes:
        weight: [outputs, inputs].
        bias: [outputs], or None.
        function: what is applied to the sum.
    """

    weight: Float[np.ndarray, "outputs inputs"]
    bias: Float[np.ndarray, " outputs"] | None
    function: Callable[[np.ndarray], np.ndarray]

    def __call__(self, x: Float[np.ndarray, "texts inputs"]) -> Float[np.ndarray, "texts outputs"]:
        """The layer's output."""
        y = x @ self.weight.T
        return self.function(y if self.bias is None else y + self.bias)


@dataclass(frozen=True)
class PoolingSpec:
    """What a checkpoint says of its embeddings.

    Attributes:
        take: which tokens count.
        normalize: vectors are brought to length 1.
        max_tokens: longer texts are cut to this; None: to the model's context.
        projections: dense layers that follow, before the length is changed.
    """

    take: Pooling
    normalize: bool = True
    max_tokens: int | None = None
    projections: tuple[Projection, ...] = ()


def find_pooling(found: Recognized) -> PoolingSpec:
    """Reads sentence-transformers' modules.json beside the weights, where there is one.

    Raises:
        SourceError: it asks for something that is not known.
        CheckpointError: the weights of a dense layer are broken.
    """
    path = found.checkpoint.path
    folder = path if path.is_dir() else path.parent
    default: Pooling = "mean" if found.spec.decoder is None else "last"
    if found.spec.decoder is not None or not is_there(folder / "modules.json"):
        return PoolingSpec(default)
    take, normalize, projections = default, False, list[Projection]()
    for module in _modules(folder / "modules.json"):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            take = _mode(read_json(_inside(folder, module) / "config.json"), folder)
        elif kind == "Dense":
            projections.append(_projection(_inside(folder, module)))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise SourceError(f"{folder / 'modules.json'}: a module of kind {kind!r} is not known")
    settings = folder / "sentence_bert_config.json"
    longest = read_json(settings).get("max_seq_length") if is_there(settings) else None
    most = longest if type(longest) is int and longest > 1 else None
    _check_widths(folder, projections, found.spec.dims.get("hidden"))
    return PoolingSpec(take, normalize, most, tuple(projections))


def _inside(folder: Path, module: Mapping[str, Any]) -> Path:
    """The folder of a module: in that of the model, wherever links lead from there."""
    path = str(module.get("path", ""))
    if path.startswith("/") or ".." in PurePath(path).parts or "\0" in path:
        raise SourceError(f"{folder / 'modules.json'}: {path[:100]!r} leads out of the folder")
    return folder / path


def _check_widths(folder: Path, projections: Sequence[Projection], hidden: Any) -> None:
    """Each layer must take what the one before gives, the first one what the model does."""
    for each in projections:
        shape = each.weight.shape
        if len(shape) != 2 or shape[1] != (hidden or shape[1]) or not shape[0]:
            raise SourceError(
                f"{folder}: linear.weight {list(shape)} does not take {hidden} numbers"
            )
        if each.bias is not None and each.bias.shape != shape[:1]:
            raise SourceError(f"{folder}: linear.bias {list(each.bias.shape)} is not [{shape[0]}]")
        hidden = shape[0]


def _projection(folder: Path) -> Projection:
    """A dense layer of sentence-transformers."""
    name = str(read_json(folder / "config.json").get("activation_function", "Identity"))
    function = _FUNCTIONS.get(name.rpartition(".")[2])
    if function is None:
        raise SourceError(f"{folder / 'config.json'}: the activation_function {name} is not known")
    tensors = open_checkpoint(folder).tensors
    if "linear.weight" not in tensors:
        raise SourceError(f"{folder}: has no tensor linear.weight")
    bias = tensors["linear.bias"].read() if "linear.bias" in tensors else None
    weight = tensors["linear.weight"].read().astype(np.float32)
    return Projection(weight, None if bias is None else bias.astype(np.float32), function)


def _modules(path: Path) -> Sequence[Mapping[str, Any]]:
    modules = read_json_value(path)
    if not isinstance(modules, list) or not all(isinstance(m, Mapping) for m in modules):
        raise SourceError(f"{path}: is not a list of modules")
    return modules


def _mode(config: Mapping[str, Any], folder: Path) -> Pooling:
    chosen = [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise SourceError(
            f"{folder}: the pooling {', '.join(chosen) or 'of none'} is not known; "
            f"use embed(..., pooling=...)"
        )
    return _MODES[chosen[0]]


def cut(ids: list[int], limit: int) -> list[int]:
    """At most `limit` tokens; the last one, which ends the text, stays."""
    return ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]]


def pool(
    hidden: Sequence[Float[np.ndarray, "tokens hidden"]],
    take: Pooling,
    normalize: bool,
    projections: Sequence[Projection] = (),
) -> Float[np.ndarray, "texts hidden"]:
    """One vector for each text."""
    pick = {"mean": lambda x: x.mean(axis=0), "first": lambda x: x[0], "last": lambda x: x[-1]}
    vectors = np.stack([pick[take](x) for x in hidden])
    for project in projections:
        vectors = project(vectors)
    if normalize:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors.astype(np.float32)
