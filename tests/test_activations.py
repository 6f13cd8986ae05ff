"""Names and traces of the values inside a model, against forward passes in NumPy."""

import copy
import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from jinfer import LLM, Edit, RequestError, Steer
from jinfer.api import activation_tracing
from jinfer.api.activation_tracing import Trace
from jinfer.api.classification import Classes
from jinfer.loader.config.classification_config import ClassificationConfig
from tests.reference import numpy_activations
from tests.reference.numpy_blocks import Floats
from tests.reference.numpy_tensors import read_safetensors

GOLDENS = Path(__file__).parent / "goldens"
TOLERANCE = 2e-4
# Learned positions; RoPE; windows and soft-caps; a latent attention; a mixture of experts.
FAMILIES = ("gpt2", "llama2", "gemma2", "deepseek_v2", "mixtral")
TOKENS = np.random.default_rng(0).integers(3, 250, 40).tolist()


@cache
def model(name: str) -> LLM:
    return LLM(GOLDENS / name, dtype="float32")


@pytest.fixture(scope="module", autouse=True)
def _let_models_go() -> Iterator[None]:
    yield
    model.cache_clear()


def reference(name: str) -> Callable[..., Floats]:
    """A golden's forward pass in NumPy, of tokens and a tap."""
    config = json.loads((GOLDENS / name / "config.json").read_text())
    forward = numpy_activations.gpt2 if name == "gpt2" else numpy_activations.llama
    tensors = read_safetensors(GOLDENS / name)
    return lambda tokens, tap: forward(tensors, tokens, config, tap)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_value(name: str) -> None:
    """All that NumPy has a name for: streams, norms, q, k, v, scores, patterns, heads, experts."""
    known = dict[str, Floats]()

    def record(value: str, array: Floats) -> Floats:
        return known.setdefault(value, array)

    reference(name)(TOKENS, record)
    trace = model(name).trace(TOKENS, [*known])
    assert isinstance(trace, Trace)
    assert set(trace) == set(known)
    for value, array in known.items():
        assert trace[value].dtype == np.float32
        assert len(trace.axes[value]) == array.ndim
        np.testing.assert_allclose(trace[value], array, rtol=0, atol=TOLERANCE, err_msg=value)


# Recurrent states beside attention; values of their own streams; sparse attention; shared keys and
# experts in attention; an encoder; an encoder-decoder.
@pytest.mark.parametrize("name", ["falcon_h1", "gemma3n", "deepseek_v32", "jetmoe", "bert", "t5"])
def test_names_are_what_a_trace_has(name: str) -> None:
    llm, tokens = model(name), TOKENS[:9]
    encoder = TOKENS[:5] if name == "t5" else None
    trace = llm.trace(tokens, "*", encoder_ids=encoder)
    names = llm.names()
    assert trace.names == [one.name for one in names]
    for one in names:
        inner = one.name.startswith("encoder.") and encoder is not None
        count = len(tokens) if encoder is None or not inner else len(encoder)
        keys = 5 if ".cross." in one.name else count
        sizes: dict[Any, Any] = {"tokens": count, "keys": keys}
        assert trace[one.name].shape == tuple(sizes.get(s, s) for s in one.shape), one
        assert trace.axes[one.name] == one.axes
        assert not np.isnan(trace[one.name]).any(), one
        if one.name.endswith("pattern"):
            sums = trace[one.name].sum(axis=-1)
            np.testing.assert_allclose(sums, 1.0, rtol=0, atol=1e-5)
    assert any(name.endswith(".state") for name in trace) == (name == "falcon_h1")
    assert np.array_equal(
        trace["hidden"], llm.hidden([tokens], encoder_ids=encoder and [encoder])[0]
    )


def test_names_of_a_model_in_float16() -> None:
    """Its matrices stay in 16 bits on a CPU; a captured value is that of the same in float32."""
    with LLM(GOLDENS / "llama2") as halves:
        assert [*halves.names()] == [*model("llama2").names()]
        found = halves.trace(TOKENS[:9], "decoder.1.x")["decoder.1.x"]
    expected = model("llama2").trace(TOKENS[:9], "decoder.1.x")["decoder.1.x"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.02)


def test_names() -> None:
    llm = model("llama2")
    names = llm.names("decoder.1.attn*")
    assert [one.name.removeprefix("decoder.1.attn") for one in names] == [
        *("", ".added", ".heads", ".input", ".k", ".pattern", ".q", ".scores", ".v"),
        *("_norm", "_norm.input"),
    ]
    assert str(names["decoder.1.attn.q"]) == "decoder.1.attn.q [tokens, heads 4, head_dim 16]"
    assert names["decoder.1.attn.pattern"].shape == (4, "tokens", "keys")
    assert "decoder.1.attn.q" in names._ipython_key_completions_()
    order = [one.name for one in llm.names() if one.name.endswith(".x") or "." not in one.name]
    assert order == ["embed", *(f"decoder.{i}.x" for i in range(3)), "hidden", "logits"]
    nearest = {"decoder.1.attn.Q": "attn.q", "decoder.9.x": "decoder.[0-2].x", "attn.k": "0.attn.k"}
    for wrong, near in nearest.items():
        with pytest.raises(RequestError, match=f"no value '{wrong}'; did you mean '.*{near}'"):
            llm.trace([1, 2], [wrong])


def test_what_is_added_has_its_factor() -> None:
    """MiniCPM multiplies branches by scale_depth / sqrt(layers); edits are of the product."""
    config = json.loads((GOLDENS / "minicpm" / "config.json").read_text())
    factor = config["scale_depth"] / np.sqrt(config["num_hidden_layers"])
    llm, place = model("minicpm"), "decoder.0.attn.added"
    names = ["decoder.0.attn", place, "decoder.0.x@1", "embed"]
    plain = llm.trace(TOKENS, names)
    assert abs(factor - 1) > 0.1
    np.testing.assert_allclose(plain[place], factor * plain["decoder.0.attn"], rtol=1e-6)
    np.testing.assert_array_equal(plain["embed"] + plain[place], plain["decoder.0.x@1"])
    none = llm.trace(TOKENS, names, edits=Edit(place, "set", 0))
    np.testing.assert_array_equal(none["decoder.0.x@1"], plain["embed"])
    np.testing.assert_array_equal(none["decoder.0.attn"], plain["decoder.0.attn"])
    vector = np.random.default_rng(3).normal(size=plain[place].shape[1]).astype(np.float32)
    (answer,) = llm.generate(
        [TOKENS], max_tokens=1, capture="decoder.0.x@1", steer=Steer(place, vector, 0.5)
    )
    assert answer.captured is not None
    change = answer.captured["decoder.0.x@1"] - plain["decoder.0.x@1"]
    np.testing.assert_allclose(change, [vector / 2] * 40, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_contributions_of_an_encoder_decoder(name: str) -> None:
    """Cross-attention is one of three; in BART a norm follows each."""
    llm, wanted = model(name), ["*embed", "*.x", "*.x@*", "*.added", "*.input"]
    trace = llm.trace(TOKENS[:9], wanted, encoder_ids=TOKENS[:5])
    for stack, parts in (("encoder", ("attn", "ffn")), ("decoder", ("attn", "cross", "ffn"))):
        x = trace["encoder.embed" if stack == "encoder" else "embed"]
        for at, part in enumerate(parts, start=1):
            prefix = f"{stack}.0."
            summed = x + trace[f"{prefix}{part}.added"]
            stream = trace[f"{prefix}x" if at == len(parts) else f"{prefix}x@{at}"]
            behind = stream if name == "t5" else trace[f"{prefix}{part}_norm.input"]
            np.testing.assert_array_equal(summed, behind, err_msg=f"{stack} {part}")
            x = stream
    assert {
        n.split(".")[2] for n in trace if n.startswith("decoder.1.") and n.endswith("added")
    } == {*("attn", "cross", "ffn")}


def test_chunks_give_the_values_of_the_whole() -> None:
    """Windows, whose blocks go while later chunks are computed, and patterns over all chunks."""
    names = ["decoder.*.x", "decoder.*.attn.pattern", "logits"]
    tokens = np.random.default_rng(1).integers(3, 300, 150).tolist()
    whole = model("gemma2").trace(tokens, names)
    small: dict[str, Any] = {"engine.prefill_chunk": 32}
    with LLM(GOLDENS / "gemma2", dtype="float32", **small) as llm:
        parts = llm.trace([tokens[:70], tokens], names)
    assert [len(each.ids) for each in parts] == [70, 150]
    for name in whole:
        np.testing.assert_allclose(parts[1][name], whole[name], rtol=0, atol=1e-5)
        if name.endswith("x"):
            assert np.array_equal(parts[0][name], whole[name][:70])


def test_a_generation_is_traced() -> None:
    llm = model("llama2")
    (answer,) = llm.generate([TOKENS], max_tokens=5, ignore_eos=True)
    names = ["decoder.1.x", "logits"]
    trace = llm.trace(TOKENS, names, max_tokens=5, params={"ignore_eos": True})
    assert trace.ids == [*TOKENS, *answer.token_ids]
    assert (trace.prompt_tokens, len(trace.tokens)) == (40, 45)
    again = llm.trace([trace.ids], "decoder.1.x")
    assert np.array_equal(again[0]["decoder.1.x"], trace["decoder.1.x"])
    assert trace["logits"][39:44].argmax(axis=-1).tolist() == answer.token_ids


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = model("llama2")
    monkeypatch.setattr(activation_tracing, "host_memory", lambda: 30_000)
    llm.trace(TOKENS, "decoder.1.x")
    with pytest.raises(RequestError, match=r"3 values of 40 tokens take .* of memory are free"):
        llm.trace(TOKENS, "decoder.*.x")
    wrong: list[tuple[Any, str]] = [
        ([], "capture is empty"),
        (7, "capture is 7"),
        ([7], "capture has 7"),
    ]
    for capture, said in wrong:
        with pytest.raises(RequestError, match=said):
            llm.trace(TOKENS, capture)
    with pytest.raises(RequestError, match="params are for answers"):
        llm.trace(TOKENS, "embed", params={"temperature": 1.0})
    with pytest.raises(RequestError, match="trace: params has steer"):
        llm.trace(TOKENS, "embed", max_tokens=1, params={"steer": Steer("embed", 1.0)})
    listed: Any = llm.names("*bed")
    assert llm.trace(TOKENS[:9], listed).names == ["decoder.stem.embed", "embed"]
    monkeypatch.setattr(llm.session.engine.runner.programs, "pipeline", object())
    with pytest.raises(RequestError, match=r"trace: the model is divided .*without \[partition\]"):
        llm.trace(TOKENS, "embed")


def test_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of answers, one answer, names and classes."""
    made = ModuleType("pandas")
    made.DataFrame = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", made)
    llm = model("llama2")
    answers = llm.generate([TOKENS[:9]] * 2, max_tokens=3, ignore_eos=True, logprobs=1)
    assert answers.to_pandas()["completion_tokens"] == [3, 3]  # type: ignore[attr-defined]
    table = answers[0].to_pandas()
    assert table["id"] == answers[0].token_ids
    assert {len(column) for column in table.values()} == {3}
    assert [*llm.generate([TOKENS[:9]], max_tokens=1)[0].to_pandas()] == ["id"]
    names = llm.names("decoder.1.attn.*")
    assert names.to_pandas()["name"] == [one.name for one in names]
    scores = np.array([[2.0, 0.0], [0.0, 2.0]], np.float32)
    classes = Classes(scores, ("<yes>", "no"), ClassificationConfig(("<yes>", "no"), "softmax", 1))
    np.testing.assert_array_equal(classes.to_pandas()["no"], classes.probabilities[:, 1])
    assert repr(classes) == "Classes(<yes> 0.88, no 0.88)"
    shown = classes._repr_html_()
    assert ">&lt;yes&gt;</td>" in shown
    assert ">0.881</td>" in shown
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RequestError, match=r"^to_pandas needs pandas: pip install pandas$"):
        answers[0].to_pandas()


def test_reprs() -> None:
    trace = model("llama2").trace(TOKENS[:3], ["decoder.0.x", "decoder.0.attn.q"])
    assert repr(trace) == "Trace(3 tokens: decoder.0.attn.q [3, 4, 16], decoder.0.x [3, 64])"
    assert trace._ipython_key_completions_() == ["decoder.0.attn.q", "decoder.0.x"]
    assert "<code>decoder.0.x</code>" in trace._repr_html_()
    said = r"'decoder\.0\.y' was not captured; did you mean 'decoder.0.x'\? captured: decoder"
    with pytest.raises(KeyError, match=said):
        trace["decoder.0.y"]
    twin = copy.deepcopy(trace)
    assert trace == trace
    assert trace != twin
    assert len({trace, twin}) == 2
    frame = pytest.importorskip("pandas") and trace.to_pandas("decoder.0.x")
    assert frame.shape == (3, 64)


def _dequantized(quantized: LLM, name: str) -> LLM:
    """The same model in float32, with the values of the other one's weights."""
    keys: dict[str, Any] = {"quantization.weights": "plain"}
    plain = LLM(GOLDENS / name, dtype="float32", **keys)
    plain.update_weights({each: quantized.weights[each].values for each in quantized.weights})
    return plain


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama2", {"quantization.weights": "q4", "quantization.threshold": 0}),
        ("gguf_llama_mixed", {}),
    ],
)
def test_values_of_quantized_weights(name: str, keys: dict[str, Any]) -> None:
    """A trace over codes is one over the dequantized weights."""
    names = ["decoder.*.x", "decoder.1.attn.*", "decoder.1.ffn.*", "logits"]
    with LLM(GOLDENS / name, dtype="float32", **keys) as llm:
        assert not llm.weights["decoder.0.ffn.up"].format.startswith("float")
        coded, plain = llm.trace(TOKENS, names), _dequantized(llm, name)
    whole = plain.trace(TOKENS, names)
    assert len(whole) > 12
    for value in whole:
        np.testing.assert_allclose(
            coded[value], whole[value], rtol=0, atol=TOLERANCE, err_msg=value
        )
    plain.close()


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "deepseek_v2"])
def test_edited_attention(name: str) -> None:
    """A head without a key, a pattern from elsewhere, scaled scores: against NumPy."""
    knocked = Edit("decoder.0.attn.pattern", "set", 0, tokens=slice(7, 30), head=2)
    patch = np.random.default_rng(2).random((4, 40, 40)).astype(np.float32)
    patched = Edit("decoder.1.attn.pattern", "set", patch)
    scaled = Edit("decoder.2.attn.scores", "scale", 2.0)
    seen = np.tril(np.ones((40, 40))) > 0

    def tap(value: str, x: Floats) -> Floats:
        if value == "decoder.0.attn.pattern":
            x = x.copy()
            x[2, 7:30] = 0
        if value == "decoder.1.attn.pattern":
            x = np.where(x > 0, patch, 0.0) if name == "gemma2" else np.where(seen, patch, 0.0)
        return 2 * x if value == "decoder.2.attn.scores" else x

    names = ["decoder.0.attn.pattern", "decoder.*.x", "logits"]
    trace = model(name).trace(TOKENS, names, edits=[knocked, patched, scaled])
    known = dict[str, Floats]()
    logits = reference(name)(TOKENS, lambda value, x: known.setdefault(value, tap(value, x)))
    assert not trace["decoder.0.attn.pattern"][2, 7:30].any()
    if name == "gpt2":
        _check_scores_that_are_patched(model(name))
    np.testing.assert_allclose(trace["decoder.2.x"], known["decoder.2.x"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(trace["logits"], logits, rtol=0, atol=TOLERANCE)
    assert np.abs(model(name).trace(TOKENS, "logits")["logits"] - logits).max() > 0.01


def _check_scores_that_are_patched(llm: LLM) -> None:
    """Scores of a trace, some -inf, of all tokens or of the last; other shapes are told."""
    place = "decoder.1.attn.scores"
    one, other = (llm.trace(TOKENS[at : at + 5], [place, "logits"]) for at in (0, 10))
    same = llm.trace(TOKENS[:5], "logits", edits=Edit(place, "set", one[place]))
    np.testing.assert_allclose(same["logits"], one["logits"], rtol=0, atol=1e-3)
    last = Edit(place, "set", other[place][:, -1:], tokens=slice(np.int64(-1), None))
    changed = llm.trace(TOKENS[:5], [place, "logits"], edits=last)
    np.testing.assert_allclose(changed[place][:, -1], other[place][:, -1], rtol=0, atol=1e-5)
    np.testing.assert_allclose(changed[place][:, :-1], one[place][:, :-1], rtol=0, atol=1e-5)
    for shape in ((4, 5, 6), (3, 5, 5), (5, 5)):
        with pytest.raises(RequestError, match=r"give a number, or \[4, 5, 5\]: heads, tokens, k"):
            llm.trace(TOKENS[:5], "logits", edits=Edit(place, "set", np.ones(shape)))


def test_an_edited_encoder() -> None:
    """The embeddings of another text give its results; a pattern of its own changes nothing."""
    llm = model("bert")
    one, other = (llm.trace(TOKENS[at : at + 9], "*") for at in (0, 20))
    edits = [
        Edit("embed", "set", other["embed"], tokens=slice(0, 9)),
        Edit("encoder.1.attn.pattern", "set", other["encoder.1.attn.pattern"]),
        Edit("encoder.0.ffn.hidden", "scale", 1.0),
    ]
    found = llm.trace(TOKENS[:9], ["hidden", "pooled"], edits=edits)
    for name in ("hidden", "pooled"):
        np.testing.assert_allclose(found[name], other[name], rtol=0, atol=1e-5)
        assert np.abs(found[name] - one[name]).max() > 0.01
    steer = Steer("encoder.0.x", 1.0, tokens="answer")
    with pytest.raises(RequestError, match=r'steer: encoder.0.x: tokens="answer", and there is no'):
        llm.trace(TOKENS[:9], "hidden", steer=steer)
    beyond = Edit("encoder.0.x", "scale", 2.0, tokens=slice(9, 12))
    with pytest.raises(RequestError, match=r"tokens is slice\(9, 12, None\), and there are 9 tok"):
        llm.trace(TOKENS[:9], "hidden", edits=beyond)
    for wrong, said in (("encoder.9.x", "did you mean"), ("pooled", "not a vector for each token")):
        with pytest.raises(RequestError, match=said):
            llm.trace(TOKENS[:9], "hidden", edits=Edit(wrong, "scale", 2.0))
    for field in ("k", "v"):
        edit = Edit(f"decoder.0.attn.{field}", "scale", 2.0)
        with pytest.raises(RequestError, match=f"attn.{field} does not take part"):
            model("deepseek_v2").trace(TOKENS[:9], "hidden", edits=edit)
    edit = Edit("encoder.0.x", "scale", 2.0)
    with pytest.raises(RequestError, match="is computed once for all requests"):
        model("t5").trace(TOKENS[:9], "hidden", encoder_ids=TOKENS[:5], edits=edit)
