"""Keys with large channels in a cache of few bits: the error of keys without them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer import LLM
from jinfer.loader.checkpoint.ggml_types import BLOCKS
from jinfer.loader.open_model import open_model
from jinfer.loader.weights.gguf_blocks import repacked_tensor
from jinfer.loader.weights.load_weights import load
from jinfer.loader.weights.plan_weights import plan_weights
from jinfer.loader.weights.power_scaling import Magnitude, magnitude, times_powers
from jinfer.loader.weights.qk_equalization import Heads, exponents_of
from jinfer.modelspec.position_blocks import RopeSpec
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.quant import parse_format
from jinfer.quant.quantize_matrix import quantize, quantize_with_outliers
from jinfer.quant.scaled_tensor import abstract_scaled, to_e4m3
from tests.loader.weights.test_gguf_blocks import stored, tensor

SIZE, HEADS, KV_HEADS, HIDDEN, VOCAB = 64, 4, 2, 64, 96
PAIR = (5, 5 + SIZE // 2)
IDS = [np.random.default_rng(1).integers(3, VOCAB, 60).tolist()]
RNG = np.random.default_rng(0)


def matrix(outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, outputs, inputs])
    return (rng.normal(size=(outputs, inputs)) / np.sqrt(inputs)).astype(np.float32)


def model(folder: Path, factor: float, bias: float = 0.0, norm: bool = False) -> Path:
    """A checkpoint: one pair of channels of the keys times a factor, of the queries divided by it.

    Args:
        bias: of that pair, on the keys alone.
        norm: the factor is in the norms of queries and keys, else in the matrices.
    """
    tensors = {"model.embed_tokens.weight": np.sqrt(HIDDEN) * matrix(VOCAB, HIDDEN)}
    tensors |= {
        "lm_head.weight": 2 * matrix(VOCAB, HIDDEN, 1),
        "model.norm.weight": np.ones(HIDDEN),
    }
    for i in range(2):
        own = {
            "self_attn.q_proj.weight": matrix(HEADS * SIZE, HIDDEN, i),
            "self_attn.k_proj.weight": matrix(KV_HEADS * SIZE, HIDDEN, i + 2),
            "self_attn.v_proj.weight": matrix(KV_HEADS * SIZE, HIDDEN, i + 4),
            "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * SIZE, i),
            "mlp.gate_proj.weight": matrix(128, HIDDEN, i),
            "mlp.up_proj.weight": matrix(128, HIDDEN, i + 2),
            "mlp.down_proj.weight": matrix(HIDDEN, 128, i),
            "input_layernorm.weight": np.ones(HIDDEN),
            "post_attention_layernorm.weight": np.ones(HIDDEN),
        }
        for letter, times in (("q", 1 / factor), ("k", factor)):
            if norm:
                name = f"self_attn.{letter}_norm.weight"
                own[name] = np.ones(SIZE)
            else:
                name = f"self_attn.{letter}_proj.weight"
            for channel in PAIR:
                own[name][channel::SIZE] *= times
        if bias:
            for letter, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                own[f"self_attn.{letter}_proj.bias"] = np.zeros(heads * SIZE)
            for channel in PAIR:
                own["self_attn.k_proj.bias"][channel::SIZE] = bias
        tensors |= {f"model.layers.{i}.{name}": values for name, values in own.items()}
    kind = "Qwen3" if norm else "Qwen2" if bias else "Llama"
    folder.mkdir()
    save_file(
        {name: values.astype(np.float32) for name, values in tensors.items()},
        folder / "model.safetensors",
    )
    config = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": SIZE,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logprobs(source: Path, kind: str, **keys: Any) -> np.ndarray:
    settings = {"dtype": "float32", "engine.slots": 1, "quantization.kv_cache": kind, **keys}
    with LLM(source, **settings) as llm:
        logits = np.asarray(llm.logits(IDS)[0], np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, float]:
    """What a model without large channels gives, and the error of its cache."""
    source = model(tmp_path_factory.mktemp("plain") / "model", 1.0)
    exact = logprobs(source, "f32")
    return exact, np.abs(logprobs(source, "q8") - exact).mean()


def test_an_equal_model_with_large_channels(
    tmp_path: Path, plain: tuple[np.ndarray, float], caplog: pytest.LogCaptureFixture
) -> None:
    """Without that it is 11 times as large."""
    exact, usual = plain
    got = logprobs(model(tmp_path / "large", 50.0), "q8")
    assert np.abs(got - exact).mean() < 1.5 * usual
    assert not caplog.records


def test_factors_that_are_in_norms(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = model(tmp_path / "normed", 64.0, norm=True)
    exact = logprobs(source, "f32")
    same = logprobs(model(tmp_path / "alike", 1.0, norm=True), "q8")
    np.testing.assert_array_equal(logprobs(source, "q8"), same)  # powers of two are taken out
    assert np.abs(same - exact).mean() < 0.01
    assert not caplog.records


def test_biases(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Large keys to which queries are no smaller; the layers are named where that is too much."""
    for bias, largest, warned in ((20.0, 2.0, False), (200.0, 20.0, True)):
        caplog.clear()
        source = model(tmp_path / str(bias), 1.0, bias)
        exact = logprobs(source, "f32")
        assert not caplog.records
        error = np.abs(logprobs(source, "q8") - exact).mean()
        stated = [record.getMessage() for record in caplog.records]
        assert [text.startswith(str(source)) for text in stated] == [True] * warned
        assert all(
            "keeps the keys of decoder.0.attn, decoder.1.attn worse" in text for text in stated
        )
        assert error < largest * 0.01


def test_some_rows_and_whole_weights_are_changed_alike(tmp_path: Path) -> None:
    """As one device loads them, and as several take their parts."""
    opened = open_model(model(tmp_path / "large", 50.0), {"quantization.kv_cache": "q8"})
    of = build_abstract_model(opened.spec, np.dtype(np.float32))
    found = plan_weights(of, opened.spec, opened.checkpoint, opened.activations)
    own = replace(found, kv_cache=opened.kv_cache)
    plain, whole = (dict(zip(of.names, load(each), strict=True)) for each in (found, own))
    changed = {name for name in of.names if (np.asarray(plain[name]) != whole[name]).any()}
    assert changed == {f"decoder.{i}.attn.{x}.weight" for i in range(2) for x in "qk"}
    name, rows = "decoder.1.attn.k.weight", range(32, 128)
    expected = dict.fromkeys(of.names) | {name: rows}
    placed = dict(zip(of.names, load(own, lambda _, x: x, expected), strict=True))
    part = placed.pop(name)
    assert part.begin == 32
    np.testing.assert_array_equal(part.values, np.asarray(whole[name])[32:128])
    for each, values in placed.items():
        np.testing.assert_array_equal(values, whole[each])


def test_ordinary_weights_stay_as_they_are() -> None:
    heads = Heads(HEADS, KV_HEADS, SIZE, RopeSpec(kind="rope", dim=SIZE))
    q, k = (Magnitude(RNG.uniform(0.5, 2, n * SIZE), 0.0) for n in (HEADS, KV_HEADS))
    exponents, error = exponents_of(heads, [q], [k])
    assert not exponents.any()
    assert error < 1.1


@pytest.mark.parametrize("pairs", ["halves", "adjacent"])
def test_channels_that_are_rotated_together_share_a_factor(pairs: Any) -> None:
    heads = Heads(HEADS, KV_HEADS, SIZE, RopeSpec(kind="rope", dim=16, pairs=pairs))
    squares = np.ones((KV_HEADS, SIZE))
    squares[1, [2, 40]] = 2.0**20
    q, k = Magnitude(np.ones(HEADS * SIZE), 0.0), Magnitude(squares.ravel(), 0.0)
    exponents, _ = exponents_of(heads, [q], [k])
    assert not exponents[0].any()
    channels = np.flatnonzero(exponents[1]).tolist()
    assert channels == [2, {"halves": 10, "adjacent": 3}[pairs], 40]
    assert exponents[1, 40] == 5


def test_room_in_float16() -> None:
    """Scales of queries that are large already are not made infinite."""
    heads = Heads(1, 1, 32)
    k = Magnitude(np.where(np.arange(32) == 3, 2.0**40, 1.0), 0.0)
    exponents, _ = exponents_of(heads, [Magnitude(np.ones(32), 5000.0)], [k])
    assert exponents.max() == 2


def blocks(name: str, fields: int) -> Any:
    """Random codes of a GGUF type, with float16 fields that are ordinary numbers."""
    raw = stored(name, (40, 1024)).raw().reshape(40 * 1024 // BLOCKS[name].values, -1).copy()
    raw[:, : 2 * fields] = np.full(fields, 0.01, np.float16).view(np.uint8)[None]
    return repacked_tensor(tensor(name, raw, (40, 1024)))


WEIGHT = matrix(40, 300)
FORMS = {
    "float32": WEIGHT,
    "float16": WEIGHT.astype(np.float16),
    "q4": quantize(WEIGHT, parse_format("q4"), method="rtn"),
    "q3.5": quantize(WEIGHT, parse_format("q3.5"), method="rtn"),
    "q8_b128": quantize(WEIGHT, parse_format("q8_b128"), method="rtn"),
    "fp8": to_e4m3(WEIGHT, abstract_scaled(WEIGHT.shape, 3)),
    "outliers": quantize_with_outliers(WEIGHT, parse_format("q4"), 0.01, method="rtn"),
    "Q4_0": blocks("Q4_0", 1),
    "Q4_K": blocks("Q4_K", 2),
}


def whole(values: Any) -> np.ndarray:
    return np.asarray(values.dequantize() if hasattr(values, "dequantize") else values, np.float64)


@pytest.mark.parametrize("form", FORMS)
def test_rows_times_powers_of_two(form: str) -> None:
    """Exactly, in each form that weights are stored in; float16 has no room below."""
    values = FORMS[form]
    exponents = np.arange(40) % 5 - (form != "float16")
    got = times_powers(values, exponents)
    np.testing.assert_array_equal(whole(got), whole(values) * 2.0 ** exponents[:, None])
    assert type(got) is type(values)


@pytest.mark.parametrize("form", FORMS)
def test_magnitudes_of_rows(form: str) -> None:
    """By some of the inputs, if there are many."""
    values = FORMS[form]
    squares = np.sum(whole(values) ** 2, axis=1)
    ratios = magnitude(values).squares / squares
    assert np.abs(np.log2(ratios)).max() < 2
