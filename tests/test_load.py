"""Loading: made-up checkpoints of a tiny model, laid out in every way that `[tensors]` can say."""

import os
import tomllib
import tracemalloc
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jinfer.checkpoint import Checkpoint, CheckpointError, Tensor
from jinfer.load import LoadError, load
from jinfer.model import AbstractModel, build
from jinfer.origin import find_origin
from jinfer.spec.resolve import Facts, merge, resolve
from jinfer.spec.tensors import TensorMap

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


def model(dtype: Any = np.float32, **changes: Any) -> tuple[AbstractModel, TensorMap]:
    """The tiny model and the names of its tensors; `changes` are laid over its tables."""
    table: Mapping[str, Any] = merge(tomllib.loads(SPEC), changes)
    spec = resolve([table], "made-up.toml", Facts(), {})
    return build(spec, dtype), spec.tensors


def tensor(name: str, values: np.ndarray) -> Tensor:
    values.setflags(write=False)  # as a view of a memory map
    return lazy(name, values.shape, lambda: values)


def lazy(name: str, shape: tuple[int, ...], read: Callable[[], np.ndarray]) -> Tensor:
    def raw() -> np.ndarray:
        raise AssertionError("loading reads values")

    return Tensor(name, shape, "F32", 4 * int(np.prod(shape)), read, raw)


def checkpoint(arrays: Arrays) -> Checkpoint:
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


def check(abstract: AbstractModel, names: TensorMap, file: Arrays, params: Arrays) -> None:
    """Loading this file gives exactly these parameters."""
    loaded = load(abstract, checkpoint(file), names)
    for name, values in zip(abstract.names, loaded, strict=True):
        assert np.array_equal(values, params[name]), name


def error_of(file: Arrays, **changes: Any) -> str:
    """The error of loading a file, checked to be one line that begins with the checkpoint."""
    abstract, names = model(**changes)
    with pytest.raises(LoadError) as caught:
        load(abstract, checkpoint(file), names)
    text = str(caught.value)
    assert text.startswith("made-up: ")
    assert "\n" not in text
    return text.removeprefix("made-up: ")


def good() -> Arrays:
    return stored(parameters(model()[0]))


# Layouts.


def test_fused_and_transposed_tensors() -> None:
    abstract, names = model()
    params = parameters(abstract)
    check(abstract, names, stored(params), params)


def test_fused_by_groups_of_heads() -> None:
    abstract, names = model(tensors={"decoder.{i}.attn.{q,k,v}": GROUPED})
    params = parameters(abstract)
    check(abstract, names, stored(params, groups=KV_HEADS), params)
    assert not np.array_equal(fused(params, 0, "weight", 1), fused(params, 0, "weight", KV_HEADS))


@pytest.mark.parametrize("prefixed", ["all", "some"])
def test_prefix(prefixed: str) -> None:
    abstract, names = model()
    params = parameters(abstract)
    file = {
        name if prefixed == "some" and name == "lm_head.weight" else f"model.{name}": values
        for name, values in stored(params).items()
    }
    check(abstract, names, file, params)


def test_alternatives_are_tried_in_turn() -> None:
    abstract, names = model()
    params = parameters(abstract)
    file = stored(params)
    file["final_norm.weight"] = file.pop("norm.weight")
    check(abstract, names, file, params)


def test_ignored_tensors() -> None:
    abstract, names = model()
    params = parameters(abstract)
    more = {name: np.zeros(3) for name in ("layers.0.rotary", "model.extra.x", "extra.y.weight")}
    check(abstract, names, stored(params) | more, params)


def test_a_tied_head_that_is_stored_again_is_left_out() -> None:
    tied = {"logits": {"kind": "head", "tied": True}}
    abstract, names = model(modules=tied)
    params = parameters(abstract)
    check(abstract, names, stored(params), params)
    check(abstract, names, stored(params) | {"lm_head.weight": params["embed.weight"]}, params)


@pytest.mark.parametrize("target", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_types(source: Any, target: Any) -> None:
    """Whatever the file's type: the weights get the model's, its norms are float32."""
    abstract, names = model(target)
    params = {name: values.astype(source) for name, values in parameters(abstract).items()}
    loaded = load(abstract, checkpoint(stored(params)), names)
    for name, values in zip(abstract.names, loaded, strict=True):
        wanted = np.float32 if "norm" in name else target
        assert values.dtype == wanted
        assert np.array_equal(values, params[name].astype(wanted)), name


def test_progress_is_shown_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    abstract, names = model()
    load(abstract, checkpoint(good()), names)
    assert capsys.readouterr().err == ""
    load(abstract, checkpoint(good()), names, progress=True)
    assert "loading" in capsys.readouterr().err


# What does not fit.


def test_a_missing_tensor_is_told_with_the_nearest_name() -> None:
    file = good()
    file["layers.1.nrom.weight"] = file.pop("layers.1.norm.weight")
    assert error_of(file).startswith(
        "no tensor layers.1.norm.weight, which decoder.1.norm.weight is to be loaded from; "
        "did you mean 'layers.1.nrom.weight'?"
    )


def test_a_missing_tensor_with_alternatives() -> None:
    file = good()
    del file["norm.weight"]
    assert error_of(file).startswith("no tensor final_norm.weight or norm.weight, which decoder.")


def test_a_parameter_that_the_specification_does_not_name() -> None:
    abstract, names = model()
    entries = tuple(entry for entry in names.entries if entry[0] != "logits")
    with pytest.raises(LoadError, match=r"^made-up: .*\[tensors\] has no name for logits.weight"):
        load(abstract, checkpoint(good()), TensorMap(entries, names.prefixes, names.ignore))


@pytest.mark.parametrize(
    "name", ["layers.0.gate.weight", "layers.2.norm.weight", "model.norm.weight", "rotary"]
)
def test_a_tensor_without_a_parameter(name: str) -> None:
    """Also one that is there twice, with the prefix and without."""
    text = error_of(good() | {name: np.zeros(3)})
    assert text.startswith(f"the specification has no place for {name}; map them in [tensors]")


def test_many_tensors_without_a_parameter_are_counted() -> None:
    text = error_of(good() | {f"other.{i}": np.zeros(3) for i in range(9)})
    assert "no place for other.0, other.1, other.2, other.3, other.4 and 4 more;" in text


def test_a_tied_head_stored_under_an_unknown_name() -> None:
    file = good()
    file["head.weight"] = file.pop("lm_head.weight")
    text = error_of(file, modules={"logits": {"kind": "head", "tied": True}})
    assert text.startswith("the specification has no place for head.weight;")


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("embed_tokens.weight", (12, 9), "is [12, 9] for embed.weight, but the specification says"),
        ("norm.weight", (8, 1), "is [8, 1] for decoder.norm.weight, but the specification says"),
        ("norm.weight", (), "is [] for decoder.norm.weight, but the specification says [8]"),
        ("layers.0.o.weight", (8, 7), "is [7, 8] for decoder.0.attn.o.weight"),
        ("layers.1.qkv.weight", (16, 4), "is [4, 4] for decoder.1.attn.k.weight"),
    ],
)
def test_a_wrong_shape(name: str, shape: tuple[int, ...], wanted: str) -> None:
    assert f"{name} {wanted}" in error_of(good() | {name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize("shape", [(15, 8), (17, 8), ()])
def test_fused_rows_that_do_not_add_up(shape: tuple[int, ...]) -> None:
    text = error_of(good() | {"layers.0.qkv.weight": np.zeros(shape, np.float32)})
    assert text == (
        f"layers.0.qkv.weight is {list(shape)}, which does not split into 8 + 4 + 4 for "
        "decoder.0.attn.q.weight, decoder.0.attn.k.weight, decoder.0.attn.v.weight in 1 group(s)"
    )


def test_fused_rows_that_do_not_divide_into_groups() -> None:
    """16 rows are 8 groups of 2, but 4 rows of k are not 8 groups of anything."""
    text = error_of(good(), tensors={"decoder.{i}.attn.{q,k,v}": GROUPED | {"groups": 8}})
    assert text.startswith("layers.0.qkv.")
    assert text.endswith("in 8 group(s)")


def test_an_error_of_the_file_passes_through() -> None:
    def read() -> np.ndarray:
        raise CheckpointError("made-up", "is cut short", 7)

    abstract, names = model()
    file = checkpoint(good())
    broken = dict(file.tensors) | {"norm.weight": lazy("norm.weight", (8,), read)}
    with pytest.raises(CheckpointError, match="made-up, byte 7: is cut short"):
        load(abstract, Checkpoint(file.path, file.format, broken, {}), names)


# Memory.


def test_no_more_than_a_tensor_per_thread_is_held() -> None:
    """Tensors are decoded when they are due and let go at once, also those read part by part.

    Only matrices are counted: a float32 norm may stay where it was decoded, as the result.
    """
    layers, hidden = 10, 512
    abstract, names = model(
        ml_dtypes.bfloat16,
        dims={"hidden": hidden, "heads": 8, "kv_heads": 8, "head_dim": hidden // 8},
        decoder={"layers": layers},
    )
    alive: set[object] = set()  # sets, which threads may change, and not counts
    most = 0

    def made_up(name: str, *shape: int) -> Tensor:
        def read() -> np.ndarray:
            nonlocal most
            values = np.zeros(shape, np.float32)
            if len(shape) < 2:
                return values
            alive.add(key := object())
            weakref.finalize(values, alive.discard, key)
            most = max(most, len(alive))
            return values

        return lazy(name, shape, read)

    tensors = [made_up("embed_tokens.weight", 12, hidden), made_up("lm_head.weight", 12, hidden)]
    tensors.append(made_up("norm.weight", hidden))
    for i in range(layers):
        tensors.append(made_up(f"layers.{i}.norm.weight", hidden))
        for name, rows in (("qkv", 3 * hidden), ("o", hidden)):
            tensors.append(made_up(f"layers.{i}.{name}.weight", rows, hidden))
            tensors.append(made_up(f"layers.{i}.{name}.bias", rows))
    file = Checkpoint(Path("made-up"), "gguf", {t.name: t for t in tensors}, {})

    tracemalloc.start()
    try:
        loaded = load(abstract, file, names)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    threads = min(4, os.cpu_count() or 1)
    decoded, result = sum(t.nbytes for t in tensors), sum(array.nbytes for array in loaded)
    a_tensor = 3 * hidden * hidden * 4
    bound = result + threads * (a_tensor + a_tensor // 6)  # decoded, and its part converted
    assert bound + (1 << 20) < decoded  # or holding all would pass
    assert peak < bound + (1 << 20)
    assert most <= threads


# Stacked tensors.

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
    loaded = load(abstract, checkpoint(mixture_file(params)), names)
    for name, values in zip(abstract.names, loaded, strict=True):
        wanted = np.float32 if "norm" in name or "router" in name else dtype
        assert np.array_equal(values, params[name].astype(wanted)), name


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
        load(abstract, checkpoint(file), names)
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
        load(abstract, checkpoint(file), names)
    assert f"which does not split into {WIDTH} + {WIDTH} for decoder.0." in str(caught.value)
    assert str(caught.value).endswith("in 1 group(s) along axis 1")


def test_one_expert_at_a_time_is_decoded() -> None:
    abstract, names = mixture()
    whole = checkpoint(mixture_file(parameters(abstract)))
    alive, most = set[object](), 0

    def watched(tensor: Tensor) -> Tensor:
        def read() -> np.ndarray:
            nonlocal most
            values = tensor.read().astype(np.float64)
            alive.add(key := object())
            weakref.finalize(values, alive.discard, key)
            most = max(most, len(alive))
            return values

        return lazy(tensor.name, tensor.shape, read)

    experts = {n: watched(t) if ".experts." in n else t for n, t in whole.tensors.items()}
    load(abstract, Checkpoint(whole.path, whole.format, experts, {}), names)
    assert 0 < most <= min(4, os.cpu_count() or 1)


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


@pytest.mark.parametrize(
    ("name", "stored_as"),
    [("norm.weight", (1, 8)), ("layers.0.ffn.weight", (8,)), ("layers.0.ffn.weight", (1, 1, 8))],
)
def test_axes_of_length_1_in_front(name: str, stored_as: tuple[int, ...]) -> None:
    """Some files have them and others leave them out: a bias as a row, a gate as a vector."""
    gate = {"ffn": {"kind": "linear", "outputs": 1}}
    layer = "x + attn(norm(x)) * ffn(norm(x))"
    abstract, names = model(
        decoder={"layer": layer, "modules": gate},
        tensors={"decoder.{i}.ffn": "layers.{i}.ffn"},
    )
    params = parameters(abstract)
    file = stored(params)
    file |= {f"layers.{i}.ffn.weight": params[f"decoder.{i}.ffn.weight"] for i in range(2)}
    check(abstract, names, file | {name: file[name].reshape(stored_as)}, params)


def test_rows_brought_to_length_one() -> None:
    """The head's rows are normalized once, when they are loaded, and no others."""
    abstract, tensors = model(modules={"logits": {"normalize": True}})
    assert abstract.normalized == {"logits.weight"}
    params = parameters(abstract)
    params["logits.weight"][3] = 0  # a row without a direction stays as it is
    arrays = load(abstract, checkpoint(stored(params)), tensors)
    loaded = dict(zip(abstract.names, arrays, strict=True))
    lengths = np.linalg.norm(params["logits.weight"].astype(np.float64), axis=1, keepdims=True)
    wanted = params["logits.weight"] / np.where(lengths > 0, lengths, 1)
    np.testing.assert_allclose(loaded["logits.weight"], wanted, rtol=1e-6)
    np.testing.assert_array_equal(loaded["embed.weight"], params["embed.weight"])
