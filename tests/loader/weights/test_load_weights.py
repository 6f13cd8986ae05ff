"""Loading: made-up checkpoints of a tiny model, laid out in every way that `[tensors]` can say."""

import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jinfer import progress
from jinfer.loader.checkpoint import Checkpoint, Tensor
from jinfer.loader.weights import read_weights

from .loading import (
    GROUPED,
    KV_HEADS,
    Held,
    check,
    checkpoint,
    fused,
    good,
    lazy,
    load_file,
    model,
    parameters,
    stored,
)


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
    loaded = load_file(abstract, checkpoint(stored(params)), names)
    for name, values in zip(abstract.names, loaded, strict=True):
        expected = np.float32 if "norm" in name else target
        assert values.dtype == expected
        assert np.array_equal(values, params[name].astype(expected)), name


@pytest.mark.parametrize("shown", [True, False])
def test_progress_is_shown_on_request(shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[tuple[progress.Task, bool | None]]()

    @contextmanager
    def task(what: str, total: float, *, unit: str, shown: bool) -> Iterator[progress.Task]:
        begun.append((progress.Task(what, total, unit), shown))
        yield begun[-1][0]

    monkeypatch.setattr(read_weights, "task", task)
    abstract, names = model()
    load_file(abstract, checkpoint(good()), names, progress=shown)
    ((loading, is_shown),) = begun
    assert (loading.what, is_shown) == ("loading", shown)
    assert loading.done == loading.total
    assert loading.done > 0


@pytest.mark.parametrize(
    ("name", "stored_as"),
    [
        ("norm.weight", (1, 8)),
        ("norm.weight", (2, 4)),
        ("layers.0.ffn.weight", (8,)),
        ("layers.0.ffn.weight", (1, 1, 8)),
    ],
)
def test_other_axes(name: str, stored_as: tuple[int, ...]) -> None:
    """Some files have axes of length 1 that others leave out; vectors may stand in groups."""
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


def test_numbers_that_are_no_tensors() -> None:
    """The scalars of xIELU, which GGUF has in its metadata."""
    ffn = {"kind": "mlp", "width": 8, "activation": "xielu"}
    scalars = {"alpha_p": 0.5, "alpha_n": 2.0}
    abstract, names = model(
        dims={"layers": 2},
        decoder={"layer": "x + attn(norm(x)) + ffn(norm(x))", "modules": {"ffn": ffn}},
        tensors={
            "decoder.{i}.ffn.up": "up.{i}",
            "decoder.{i}.ffn.down": "down.{i}",
            **{f"decoder.{{i}}.ffn.{name}": {"value": f"i + {x}"} for name, x in scalars.items()},
        },
    )
    params = parameters(abstract)
    file = stored(params)
    for i in range(2):
        for name, x in scalars.items():
            params[f"decoder.{i}.ffn.{name}"] = np.array([i + x], np.float32)
        for part in ("up", "down"):
            file[f"{part}.{i}.weight"] = params[f"decoder.{i}.ffn.{part}.weight"]
    check(abstract, names, file, params)


def test_rows_brought_to_length_one() -> None:
    """The head's rows are normalized once, when they are loaded, and no others."""
    abstract, tensors = model(modules={"logits": {"normalize": True}})
    assert abstract.normalized == {"logits.weight"}
    params = parameters(abstract)
    params["logits.weight"][3] = 0  # a row without a direction stays as it is
    arrays = load_file(abstract, checkpoint(stored(params)), tensors)
    loaded = dict(zip(abstract.names, arrays, strict=True))
    lengths = np.linalg.norm(params["logits.weight"].astype(np.float64), axis=1, keepdims=True)
    expected = params["logits.weight"] / np.where(lengths > 0, lengths, 1)
    np.testing.assert_allclose(loaded["logits.weight"], expected, rtol=1e-6)
    np.testing.assert_array_equal(loaded["embed.weight"], params["embed.weight"])


def test_no_more_than_a_tensor_per_thread_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are decoded when they are due and let go at once, also those read part by part.

    Only matrices are counted: a float32 norm may stay where it was decoded, as the result.
    """
    layers, hidden = 10, 512
    abstract, names = model(
        ml_dtypes.bfloat16,
        dims={"hidden": hidden, "heads": 8, "kv_heads": 8, "head_dim": hidden // 8},
        decoder={"layers": layers},
    )
    held = Held()

    def made_up(name: str, *shape: int) -> Tensor:
        def read() -> np.ndarray:
            values = np.zeros(shape, np.float32)
            return held.read(values) if len(shape) > 1 else values

        return lazy(name, shape, read)

    tensors = [made_up("embed_tokens.weight", 12, hidden), made_up("lm_head.weight", 12, hidden)]
    tensors.append(made_up("norm.weight", hidden))
    for i in range(layers):
        tensors.append(made_up(f"layers.{i}.norm.weight", hidden))
        for name, rows in (("qkv", 3 * hidden), ("o", hidden)):
            tensors.append(made_up(f"layers.{i}.{name}.weight", rows, hidden))
            tensors.append(made_up(f"layers.{i}.{name}.bias", rows))
    file = Checkpoint(Path("made-up"), "gguf", {t.name: t for t in tensors}, {})

    # Each array by itself: how much of a slab is left depends on the tests before, and what of one
    # nobody touches is counted too.
    monkeypatch.setattr("jinfer.quant.quantized_tensor._SLAB", 0)
    monkeypatch.setattr("jinfer.quant.quantized_tensor._HUGE_PAGE", 64)
    tracemalloc.start()
    try:
        loaded = load_file(abstract, file, names)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    threads = min(4, os.cpu_count() or 1)
    decoded, result = sum(t.nbytes for t in tensors), sum(array.nbytes for array in loaded)
    a_tensor = 3 * hidden * hidden * 4
    bound = result + threads * (a_tensor + a_tensor // 6)  # decoded, and its part converted
    assert bound + (1 << 20) < decoded  # or holding all would pass
    assert peak < bound + (1 << 20)
    assert held.most <= threads
