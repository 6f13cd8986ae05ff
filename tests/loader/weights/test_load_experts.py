"""Loading experts: a tensor for each, stacked, gates and ups together, one at a time."""

import os
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jinfer.loader.checkpoint import Checkpoint, Tensor
from jinfer.loader.weights.tensor_mapping import LoadError, find_origin
from jinfer.modelspec.tensor_names import TensorMap
from jinfer.nn.abstract_model import AbstractModel

from .loading import (
    Arrays,
    Held,
    check,
    checkpoint,
    lazy,
    load_file,
    model,
    parameters,
    stored,
)

EXPERTS, WIDTH, HIDDEN = 3, 5, 8
MIXTURE: dict[str, Any] = {
    "dims": {"experts": EXPERTS, "top_k": 2, "expert_intermediate": WIDTH},
    "decoder": {
        "layer": "x = x + attn(norm(x)) + ffn(norm(x))",
        "modules": {"ffn": {"kind": "moe", "bias": True}},
    },
}
ONE_BY_ONE = {
    "decoder.{i}.ffn.router": "layers.{i}.router",
    "decoder.{i}.ffn.experts.gate": ["layers.{i}.gates", "layers.{i}.experts.{e}.w1"],
    "decoder.{i}.ffn.experts.up": {"from": "layers.{i}.experts.{e}.w3", "transpose": True},
    "decoder.{i}.ffn.experts.down": "layers.{i}.experts.{e}.w2",
}
FUSED = "decoder.{i}.ffn.experts.{gate,up}"


def mixture_file(params: Arrays) -> Arrays:
    """One tensor per expert and projection; up is [in, out]."""
    file = stored(params)
    for i in range(2):
        file[f"layers.{i}.router.weight"] = params[f"decoder.{i}.ffn.router.weight"]
        for part, short in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            for leaf in ("weight", "bias"):
                stack = params[f"decoder.{i}.ffn.experts.{part}.{leaf}"]
                for e in range(EXPERTS):
                    transposed = (part, leaf) == ("up", "weight")
                    file[f"layers.{i}.experts.{e}.{short}.{leaf}"] = (
                        stack[e].T.copy() if transposed else stack[e]
                    )
    return file


def with_gate_and_up(params: Arrays, name: str, join: Callable[[Arrays], Arrays]) -> Arrays:
    """The same file, but with what `join` makes of the gates and ups of a layer, by leaf."""
    file = {n: v for n, v in mixture_file(params).items() if ".w1." not in n and ".w3." not in n}
    for i in range(2):
        for leaf in ("weight", "bias"):
            stacks = {p: params[f"decoder.{i}.ffn.experts.{p}.{leaf}"] for p in ("gate", "up")}
            for suffix, values in join(stacks).items():
                file[f"layers.{i}.{name}{suffix}.{leaf}"] = values
    return file


def mixture(**tensors: Any) -> tuple[AbstractModel, TensorMap]:
    return model(**MIXTURE, tensors=ONE_BY_ONE | tensors)


def fused_mixture(entry: Any) -> tuple[AbstractModel, TensorMap]:
    names = {n: e for n, e in ONE_BY_ONE.items() if not n.endswith(("gate", "up"))}
    return model(**MIXTURE, tensors=names | {FUSED: entry})


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_one_tensor_per_expert(dtype: Any) -> None:
    abstract, names = model(dtype, **MIXTURE, tensors=ONE_BY_ONE)
    params = parameters(abstract)
    loaded = load_file(abstract, checkpoint(mixture_file(params)), names)
    for name, values in zip(abstract.names, loaded, strict=True):
        expected = np.float32 if "norm" in name or "router" in name else dtype
        assert np.array_equal(values, params[name].astype(expected)), name


def test_stacked_in_the_file() -> None:
    """The first of two names that is there counts, whichever has {e}."""
    abstract, names = mixture()
    params = parameters(abstract)
    file = {name: values for name, values in mixture_file(params).items() if ".w1." not in name}
    for i in range(2):
        for leaf in ("weight", "bias"):
            file[f"layers.{i}.gates.{leaf}"] = params[f"decoder.{i}.ffn.experts.gate.{leaf}"]
    check(abstract, names, file, params)


def test_gate_and_up_of_one_expert_in_one_tensor() -> None:
    def join(stacks: Arrays) -> Arrays:
        both = np.concatenate([stacks["gate"], stacks["up"]], axis=1)
        return {f".{e}": both[e] for e in range(EXPERTS)}

    abstract, names = fused_mixture("layers.{i}.both.{e}")
    params = parameters(abstract)
    check(abstract, names, with_gate_and_up(params, "both", join), params)


def test_gates_and_ups_of_all_experts_in_one_tensor() -> None:
    abstract, names = fused_mixture({"from": "layers.{i}.both", "axis": 1})
    params = parameters(abstract)

    def join(stacks: Arrays) -> Arrays:
        return {"": np.concatenate([stacks["gate"], stacks["up"]], axis=1)}

    check(abstract, names, with_gate_and_up(params, "both", join), params)


def test_columns_of_gate_and_up_in_turn() -> None:
    """gpt-oss: weights [experts, in, (gate, up, gate, up, ...)], biases without `in`."""
    entry = {"from": "layers.{i}.both", "axis": 1, "groups": "expert_intermediate"}
    abstract, names = fused_mixture(entry | {"transpose": True})
    params = parameters(abstract)

    def join(stacks: Arrays) -> Arrays:
        both = np.stack([stacks["gate"], stacks["up"]], axis=2)  # a pair after each other
        both = both.reshape(EXPERTS, 2 * WIDTH, *both.shape[3:])
        return {"": both.swapaxes(1, 2) if both.ndim == 3 else both}

    check(abstract, names, with_gate_and_up(params, "both", join), params)


def mixture_error(change: Callable[[Arrays], object]) -> str:
    abstract, names = mixture()
    file = mixture_file(parameters(abstract))
    change(file)
    with pytest.raises(LoadError) as caught:
        load_file(abstract, checkpoint(file), names)
    return str(caught.value).removeprefix("made-up: ")


@pytest.mark.parametrize("expert", [0, 1, EXPERTS - 1])
def test_a_missing_expert(expert: int) -> None:
    name = f"layers.1.experts.{expert}.w3.weight"
    text = mixture_error(lambda file: file.pop(name))
    assert text.startswith(
        f"no tensor {name}, which decoder.1.ffn.experts.up.weight is to be loaded from; "
    )


def test_one_expert_more_than_the_specification_says() -> None:
    name = f"layers.0.experts.{EXPERTS}.w1.weight"
    text = mixture_error(lambda file: file.update({name: np.zeros((WIDTH, HIDDEN))}))
    assert text.startswith(f"the specification has no place for {name};")


def test_an_expert_of_another_shape() -> None:
    """Also one that NumPy would stretch to fit."""
    name = "layers.0.experts.1.w2.weight"
    text = mixture_error(lambda file: file.update({name: np.zeros((1, WIDTH))}))
    assert text == (
        f"{name} is [1, {WIDTH}] for decoder.0.ffn.experts.down.weight, "
        f"but the specification says [{HIDDEN}, {WIDTH}]; correct [dims], or how [tensors] maps it"
    )


@pytest.mark.parametrize("shape", [(EXPERTS, 2 * WIDTH + 1, HIDDEN), (EXPERTS,)])
def test_fused_experts_that_do_not_add_up(shape: tuple[int, ...]) -> None:
    abstract, names = fused_mixture({"from": "layers.{i}.both", "axis": 1})
    file = with_gate_and_up(parameters(abstract), "both", lambda _: {"": np.zeros(shape)})
    with pytest.raises(LoadError) as caught:
        load_file(abstract, checkpoint(file), names)
    assert f"which does not split into {WIDTH} + {WIDTH} for decoder.0." in str(caught.value)
    assert str(caught.value).endswith("in 1 group(s) along axis 1")


def test_one_expert_at_a_time_is_decoded() -> None:
    abstract, names = mixture()
    whole = checkpoint(mixture_file(parameters(abstract)))
    held = Held()

    def watched(tensor: Tensor) -> Tensor:
        return lazy(tensor.name, tensor.shape, lambda: held.read(tensor.read().astype(np.float64)))

    experts = {n: watched(t) if ".experts." in n else t for n, t in whole.tensors.items()}
    load_file(abstract, Checkpoint(whole.path, whole.format, experts, {}), names)
    assert 0 < held.most <= min(4, os.cpu_count() or 1)


def test_the_bar_ends_full() -> None:
    """Every byte of the file is counted once, however tensors are fused and stacked."""
    abstract, names = fused_mixture({"from": "layers.{i}.both", "axis": 1})
    file = with_gate_and_up(
        parameters(abstract),
        "both",
        lambda stacks: {"": np.concatenate([stacks["gate"], stacks["up"]], axis=1)},
    )
    files = checkpoint(file).tensors
    stripped = {name.removeprefix("model."): tensor for name, tensor in files.items()}
    shapes = dict(zip(abstract.names, (p.shape for p in abstract.parameters), strict=True))
    origins = [
        find_origin(name, shape, names, stripped, checkpoint(file))
        for name, shape in shapes.items()
    ]
    total = sum(tensor.nbytes for tensor in files.values())
    assert 0 <= total - sum(origin.nbytes for origin in origins) < len(files)
