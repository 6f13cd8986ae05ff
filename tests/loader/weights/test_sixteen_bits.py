"""Matrices of 16 bits stay as the checkpoint has them, though the computation is in float32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer import LLM
from jinfer.cli.quantize.quantize_checkpoint import main as quantize
from jinfer.cpu.build_library import isa, lowered_isa
from jinfer.loader.checkpoint import Checkpoint
from jinfer.loader.checkpoint.checkpoint_reader import DTYPES
from jinfer.loader.weights.read_weights import read
from jinfer.loader.weights.storage_plan import stored_types, with_types
from jinfer.loader.weights.tensor_mapping import find_origins
from jinfer.modelspec.quantization_table import QuantizationSpec
from jinfer.ops.matmul import dense as storing
from jinfer.quant import QuantizedTensor
from jinfer.quant_format import F16_AS_INT
from tests.cpu.helpers import BF16
from tests.loader.weights import loading
from tests.loader.weights.test_memory import MORE, SMALL, STATUS, made_up, peak

GOLDENS = Path(__file__).parents[2] / "goldens"
IDS = [1, 5, 9, 2, 40, 7, 3, 11, 6, 20, 8, 15, 4, 33, 12, 10, 2, 31]
PLAIN = {"quantization.weights": "plain"}
needs_calls = pytest.mark.skipif(not storing.reads_16_bit_weights(), reason="no custom calls")


def open_model(name: str, **overrides: Any) -> LLM:
    return LLM(GOLDENS / name, **{"dtype": "float32", **overrides})


def types(llm: LLM, *roles: str) -> set[str]:
    """The types of a model's parameters with these roles."""
    model = llm._engine.runner.model
    for leaf, parameter in zip(llm._engine.runner.parameters, model.parameters, strict=True):
        assert (leaf.shape, leaf.dtype) == (parameter.shape, parameter.dtype)
    each = zip(llm._engine.runner.parameters, model.roles, strict=True)
    return {str(leaf.dtype) for leaf, role in each if role in roles}


# Shared heads, fused and turned projections, latent attention, mixtures of experts, GGUF.
@needs_calls
@pytest.mark.parametrize(
    ("name", "type"),
    [
        ("llama2", "float16"),
        ("smollm2", "bfloat16"),
        ("phi3_mini_4k", "bfloat16"),
        ("bloom", "float16"),
        ("deepseek_v2", "bfloat16"),
        ("mixtral", "bfloat16"),
        ("gguf_mixtral", "bfloat16"),
        ("gguf_phi2", "float16"),
    ],
)
def test_16_bit_weights_give_the_results_of_full_weights(name: str, type: str) -> None:
    kept, plain = open_model(name), open_model(name, **PLAIN)
    assert types(kept, "matrix", "table", "head") == {type}
    assert types(kept, "plain") == {"float32"}
    assert types(plain, "matrix", "table", "head", "plain") == {"float32"}
    ours, expected = (llm.logits([IDS])[0] for llm in (kept, plain))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


@needs_calls
@pytest.mark.parametrize("name", ["smollm2", "mixtral", "llama2"])
def test_activations_are_rounded_if_faster(name: str) -> None:
    """To the type of the weights, or to integers; not if full numbers are requested."""
    jax.clear_caches()
    exact = open_model(name, dtype="auto", **{"quantization.activations": "float"})
    expected, rounded = exact.logits([IDS])[0], open_model(name, dtype="auto")
    with lowered_isa(isa()):  # whichever way is the faster one here
        difference = np.abs(rounded.logits([IDS])[0] - expected).max()
    pairs = isa() in BF16 and name != "llama2"  # which has float16
    whole = isa() == "avx2" and name == "llama2"
    assert (difference > 0) == (pairs or whole)
    assert difference < 0.02 * np.abs(expected).max()
    if pairs:
        with lowered_isa("avx512"):
            np.testing.assert_array_equal(rounded.logits([IDS])[0], expected)


@needs_calls
@pytest.mark.parametrize("keys", [{}, {"quantization.weights": "q4", "quantization.threshold": 0}])
def test_short_prompts_in_bf16_are_those_of_8_bits(keys: dict[str, Any]) -> None:
    """`activations = "bf16"` is for 33 rows and more, of quantized matrices."""
    name, ids = "smollm2", IDS[:20]
    ours, expected = (
        open_model(name, dtype="auto", **keys, **{"quantization.activations": mode}).logits([ids])
        for mode in ("bf16", "int8")
    )
    np.testing.assert_array_equal(ours[0], expected[0])


@needs_calls
@pytest.mark.parametrize("name", ["llama2", "gguf_phi2"])
def test_f16_as_integers_if_faster(name: str) -> None:
    with lowered_isa("avx2"):
        llm = open_model(name, dtype="auto")
        quantized = [
            leaf for leaf in llm._engine.runner.parameters if isinstance(leaf, QuantizedTensor)
        ]
        assert {leaf.format for leaf in quantized} == ({F16_AS_INT} if isa() == "avx2" else set())
        whole = llm.logits([IDS])[0]
        in_parts = np.concatenate([llm.logits([IDS[:n]])[0][-1:] for n in (1, 3, len(IDS))])
    expected = open_model(name).logits([IDS])[0]
    np.testing.assert_allclose(whole, expected, rtol=0, atol=2e-3 * np.abs(expected).max())
    np.testing.assert_array_equal(in_parts, whole[[0, 2, -1]])


@needs_calls
@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"quantization.activations": "int16"}, PLAIN]
)
def test_f16_as_integers_need_rounded_float32_products(settings: dict[str, str]) -> None:
    with lowered_isa("avx2"):
        assert types(open_model("llama2", **{"dtype": "auto", **settings}), "matrix")


@needs_calls
def test_an_encoder() -> None:
    kept, plain = open_model("minilm"), open_model("minilm", **PLAIN)
    assert types(kept, "matrix", "table") == {"float16"}
    texts = [IDS[:7], IDS]
    np.testing.assert_allclose(kept.embed(texts), plain.embed(texts), rtol=0, atol=1e-4)


@needs_calls
def test_without_the_call_xla_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [open_model("mixtral").logits([ids])[0] for ids in (IDS, IDS[:1])]
    monkeypatch.setattr(storing, "reads_16_bit_weights", lambda: False)
    monkeypatch.setattr("jinfer.ops.matmul.dense.cpu.dense_linear", None)
    jax.clear_caches()  # layers that were traced with the call
    kept = open_model("mixtral")
    assert types(kept, "matrix") == {"bfloat16"}
    for ids, values in zip((IDS, IDS[:1]), expected, strict=True):
        np.testing.assert_allclose(kept.logits([ids])[0], values, rtol=0, atol=1e-4)
    jax.clear_caches()


def test_16_bit_weights_need_the_custom_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jinfer.loader.weights.storage_plan.reads_16_bit_weights", lambda: False)
    assert types(open_model("llama2"), "matrix", "table", "head") == {"float32"}


@needs_calls
def test_a_rule_converts() -> None:
    rules = [{"match": "decoder.0.attn.q", "weights": "plain"}]
    llm = open_model("llama2", **{"quantization.rules": rules})
    each = zip(
        llm._engine.runner.model.names,
        llm._engine.runner.parameters,
        llm._engine.runner.model.roles,
        strict=True,
    )
    wide = [name for name, leaf, role in each if role != "plain" and leaf.dtype == jnp.float32]
    assert wide == ["decoder.0.attn.q.weight"]


@needs_calls
def test_a_head_that_is_changed_is_converted() -> None:
    """Its rows are brought to length 1, which 16 bits would round."""
    llm = open_model("baichuan2_7b")
    assert types(llm, "head") == {"float32"}
    assert types(llm, "matrix", "table") == {"bfloat16"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_type_that_is_not_wider_replaces_the_file_s(dtype: str) -> None:
    llm = open_model("llama2", dtype=dtype)
    assert types(llm, "matrix", "table", "head") == {dtype}


def sixteen_bits(arrays: loading.Arrays, names: tuple[str, ...], type_name: str) -> Checkpoint:
    """A checkpoint in which these tensors have 16 bits."""
    narrow = {name: arrays[name].astype(DTYPES[type_name]) for name in names}
    checkpoint = loading.checkpoint(arrays | narrow)
    typed = {name: replace(checkpoint.tensors[name], type=type_name) for name in names}
    return replace(checkpoint, tensors={**checkpoint.tensors, **typed})


@pytest.mark.parametrize("type_name", ["BF16", "F16"])
def test_bits_are_taken_as_they_are(type_name: str) -> None:
    """Also of what is cut out of a fused tensor, and of what is turned."""
    model, names = loading.model()
    params = loading.parameters(model)
    narrow = ("embed_tokens.weight", "layers.0.qkv.weight", "layers.1.o.weight", "norm.weight")
    file = sixteen_bits(loading.stored(params), narrow, type_name)
    origins = find_origins(model, file, names)
    typed = with_types(model, stored_types(model, QuantizationSpec(), origins))
    kept = {"embed.weight", "decoder.1.attn.o.weight"}
    kept |= {f"decoder.0.attn.{part}.weight" for part in "qkv"}
    for name, leaf in zip(typed.names, read(loading.plan(typed, file, names)), strict=True):
        expected = params[name]
        if name in (*kept, "decoder.norm.weight"):
            expected = expected.astype(DTYPES[type_name])
        assert leaf.dtype == (expected.dtype if name in kept else np.float32)
        assert np.array_equal(np.asarray(leaf, np.float32), expected.astype(np.float32)), name


@needs_calls
def test_converted_checkpoint_keeps_unquantized_types(tmp_path: Path) -> None:
    rules = '[{ match = "decoder.1.*", weights = "q8" }]'
    options = ["--set", f"quantization.rules={rules}", "--set", "quantization.threshold=0"]
    assert quantize([str(GOLDENS / "smollm2"), str(tmp_path / "out"), *options]) == 0
    llm = LLM(tmp_path / "out", dtype="float32")
    each = zip(
        llm._engine.runner.model.names,
        llm._engine.runner.parameters,
        llm._engine.runner.model.roles,
        strict=True,
    )
    for name, leaf, role in each:
        if role != "plain":
            is_quantized = name.startswith("decoder.1.")
            assert isinstance(leaf, QuantizedTensor) == is_quantized
            assert is_quantized or leaf.dtype == jnp.bfloat16
    expected = open_model("smollm2", **PLAIN).logits([IDS])[0]
    np.testing.assert_allclose(llm.logits([IDS])[0], expected, rtol=0, atol=0.2)


@needs_calls
@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells a process its peak")
def test_memory_holds_the_file_and_little_more(tmp_path: Path) -> None:
    file = made_up(tmp_path, SMALL, "BF16")
    assert peak(file) - file.stat().st_size < MORE
    llm = LLM(file)
    there = sum(leaf.nbytes for leaf in jax.tree.leaves(llm._engine.runner.parameters))
    assert there < 1.01 * file.stat().st_size
