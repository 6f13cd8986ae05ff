"""What tests of loading share: a tiny model, and made-up checkpoints of it."""

import tomllib
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer.loader.checkpoint import Checkpoint, Tensor
from jinfer.loader.weights.plan_weights import WeightPlan
from jinfer.loader.weights.read_weights import read
from jinfer.loader.weights.storage_plan import Storage
from jinfer.loader.weights.tensor_mapping import LoadError, find_origins
from jinfer.modelspec.resolve_spec import CheckpointFacts, resolve
from jinfer.modelspec.tensor_names import TensorMap
from jinfer.modelspec.toml_tables import merge
from jinfer.nn.abstract_model import AbstractModel, build_abstract_model

type Arrays = dict[str, np.ndarray]

KV_HEADS = 2
SPEC = """
[dims]
vocab = 12
hidden = 8
heads = 4
kv_heads = 2
head_dim = 2
context = 16

[modules]
embed = { kind = "embedding" }
logits = { kind = "head" }

[decoder]
layers = 2
stem = "embed(tokens)"
layer = "x + attn(norm(x))"
head = "logits(norm(x))"

[decoder.modules]
norm = { kind = "rms" }
attn = { kind = "attention", bias = true }

[tensors]
prefix = "model."
ignore = ["*.rotary", "extra.*"]
"embed" = "embed_tokens"
"logits" = "lm_head"
"decoder.norm" = ["final_norm", "norm"]
"decoder.{i}.norm" = "layers.{i}.norm"
"decoder.{i}.attn.{q,k,v}" = "layers.{i}.qkv"
"decoder.{i}.attn.o" = { from = "layers.{i}.o", transpose = true }
"""
GROUPED = {"from": "layers.{i}.qkv", "groups": "kv_heads"}


class Held:
    """Counts how many of the arrays that were read are held at the same time."""

    def __init__(self) -> None:
        self.most = 0
        self._alive: set[object] = set()  # a set, which threads may change, and not a count

    def read(self, values: np.ndarray) -> np.ndarray:
        """The same array, counted until it is let go."""
        self._alive.add(key := object())
        weakref.finalize(values, self._alive.discard, key)
        self.most = max(self.most, len(self._alive))
        return values


def model(dtype: Any = np.float32, **changes: Any) -> tuple[AbstractModel, TensorMap]:
    """The tiny model and the names of its tensors; `changes` are laid over its tables."""
    table: Mapping[str, Any] = merge(tomllib.loads(SPEC), changes)
    spec = resolve([table], "made-up.toml", CheckpointFacts(), {})
    return build_abstract_model(spec, dtype), spec.tensors


def tensor(name: str, values: np.ndarray) -> Tensor:
    """A tensor with these values."""
    values.setflags(write=False)  # as a view of a memory map
    return lazy(name, values.shape, lambda: values)


def lazy(name: str, shape: tuple[int, ...], read: Callable[[], np.ndarray]) -> Tensor:
    """A float32 tensor that is read lazily."""
    no_bytes = np.zeros(0, np.uint8)
    return Tensor(name, shape, "F32", 4 * int(np.prod(shape)), read, lambda: no_bytes)


def checkpoint(arrays: Arrays) -> Checkpoint:
    """A checkpoint of these tensors."""
    tensors = {name: tensor(name, values) for name, values in arrays.items()}
    return Checkpoint(Path("made-up"), "safetensors", tensors, {})


def parameters(abstract: AbstractModel) -> Arrays:
    """A random value for every parameter."""
    rng = np.random.default_rng(0)
    shapes = zip(abstract.names, abstract.parameters, strict=True)
    return {name: rng.normal(size=p.shape).astype(np.float32) for name, p in shapes}


def fused(params: Arrays, layer: int, leaf: str, groups: int) -> np.ndarray:
    """q, k and v of each group of heads, one group after the other."""
    parts = [params[f"decoder.{layer}.attn.{part}.{leaf}"] for part in "qkv"]
    by_group = zip(*(np.split(part, groups) for part in parts), strict=True)
    return np.concatenate([part for group in by_group for part in group])


def stored(params: Arrays, groups: int = 1) -> Arrays:
    """The tensors of the file that holds these parameters."""
    file = {
        "embed_tokens.weight": params["embed.weight"],
        "norm.weight": params["decoder.norm.weight"],
    }
    if "logits.weight" in params:
        file["lm_head.weight"] = params["logits.weight"]
    for i in range(2):
        file[f"layers.{i}.norm.weight"] = params[f"decoder.{i}.norm.weight"]
        file[f"layers.{i}.o.weight"] = params[f"decoder.{i}.attn.o.weight"].T
        file[f"layers.{i}.o.bias"] = params[f"decoder.{i}.attn.o.bias"]
        for leaf in ("weight", "bias"):
            file[f"layers.{i}.qkv.{leaf}"] = fused(params, i, leaf, groups)
    return file


def plan(
    abstract: AbstractModel,
    file: Checkpoint,
    names: TensorMap,
    storages: Mapping[str, Storage] | None = None,
) -> WeightPlan:
    """The plan of a model with these parameters quantized, all others in its types."""
    origins = find_origins(abstract, file, names)
    return WeightPlan(abstract, abstract.modules.spec, file, origins, storages or {})


def load_file(
    abstract: AbstractModel, file: Checkpoint, names: TensorMap, *, progress: bool = False
) -> tuple[Any, ...]:
    """The parameters that a file holds."""
    return read(plan(abstract, file, names), progress=progress)


def check(abstract: AbstractModel, names: TensorMap, file: Arrays, params: Arrays) -> None:
    """Loading this file gives exactly these parameters."""
    loaded = load_file(abstract, checkpoint(file), names)
    for name, values in zip(abstract.names, loaded, strict=True):
        assert np.array_equal(values, params[name]), name


def error_of(file: Arrays, **changes: Any) -> str:
    """The error of loading a file, checked to be one line that begins with the checkpoint."""
    abstract, names = model(**changes)
    with pytest.raises(LoadError) as caught:
        load_file(abstract, checkpoint(file), names)
    text = str(caught.value)
    assert text.startswith("made-up: ")
    assert "\n" not in text
    return text.removeprefix("made-up: ")


def good() -> Arrays:
    """A file that fits."""
    return stored(parameters(model()[0]))
