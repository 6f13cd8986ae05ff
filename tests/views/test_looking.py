"""Views of models: against what the model itself says, and the sums of their parts."""

from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jinfer import LLM, RequestError, views
from jinfer.views.lm_head import frozen_head, likeliest_tokens
from jinfer.views.logit_attribution import attribute

GOLDENS = Path(__file__).parents[1] / "goldens"
IDS = [1, 5, 9, 2, 40, 7, 3, 11]
PLAIN: dict[str, Any] = {"dtype": "float32", "quantization.weights": "plain"}


def opened(name: str, **more: Any) -> LLM:
    return LLM(GOLDENS / name, **{**PLAIN, **more})


@pytest.fixture(scope="module")
def llm() -> LLM:
    return opened("llama2")


def test_tokens_have_their_scores(llm: LLM) -> None:
    table = views.tokens(llm, IDS, top=3, max_tokens=2).table()
    np.testing.assert_allclose(table["logprob"][:7], llm.score([IDS])[0], atol=1e-6)
    assert list(table["id"][:7]) == IDS[1:]
    assert list(table["generated"]) == [False] * 7 + [True] * 2
    with pytest.raises(RequestError, match="needs two tokens"):
        views.tokens(llm, [1])
    with pytest.raises(RequestError, match="top is 21; give how many alternatives, from 0 to 20"):
        views.tokens(llm, IDS, top=21)


def test_memory_view_counts_weights_and_cache(llm: LLM) -> None:
    table = views.memory(llm).table()
    sizes = dict(zip(table["name"], table["bytes"], strict=True))
    own = {name: llm.weights[name].nbytes for name in llm.weights}
    assert {name: size for name, size in sizes.items() if name in own} == own
    assert sum(size for name, size in sizes.items() if name.startswith("cache.")) > 0


def test_alternatives_go_on_as_the_model_would(llm: LLM) -> None:
    table = views.alternatives(llm, IDS, max_tokens=4, branches=2, ahead=2).table()
    rows = list(zip(*(table[name] for name in ("branch", "position", "id")), strict=True))
    answer = [id for branch, _, id in rows if branch == -1]
    assert answer == llm.generate([IDS], max_tokens=4, strategy="greedy")[0].token_ids
    for branch in (0, 1):
        own = [(at, id) for one, at, id in rows if one == branch]
        begin = own[0][0]
        prompt = [*IDS, *answer[:begin], own[0][1]]
        (follows,) = llm.generate([prompt], max_tokens=2, strategy="greedy")
        assert own[0][1] != answer[begin]
        assert [id for _, id in own[1:]] == follows.token_ids
    with pytest.raises(RequestError, match="branches is 0; give how many, from 1"):
        views.alternatives(llm, IDS, branches=0)


def test_only_requested_strategies_are_shown(llm: LLM) -> None:
    table = views.strategies(llm, IDS, ["greedy", "beam"], max_tokens=3).table()
    assert list(table["strategy"]) == ["greedy", "beam"]
    assert list(table["tokens"]) == [3, 3]
    with pytest.raises(RequestError, match="no usual strategy 'hot'; there are greedy, sample"):
        views.strategies(llm, IDS, ["hot"])


def test_errors_are_those_of_the_weights(llm: LLM) -> None:
    coarse = opened("llama2", **{"quantization.weights": "q4", "quantization.threshold": 1})
    table = views.quantization_error(coarse, llm).table()
    found = dict(zip(table["name"], table["relative_error"], strict=True))
    name = "decoder.1.attn.q"
    exact = llm.weights[name].values
    wrong = np.linalg.norm(coarse.weights[name].values - exact) / np.linalg.norm(exact)
    assert found[name] == pytest.approx(wrong, rel=1e-5)
    assert 0.02 < wrong < 0.2


def test_rows_of_weights_are_those_of_the_matrix(llm: LLM) -> None:
    values = llm.weights["embed"].values
    np.testing.assert_array_equal(llm.weights.rows("embed", [3, 0]), values[[3, 0]])


@pytest.mark.parametrize("name", ["falcon_h1", "gpt2", "gemma2"])
def test_the_head_alone_is_the_models(name: str) -> None:
    """Norm and head, applied to the last layer's stream, give its logits; frozen, linear ones."""
    with opened(name) as llm:
        logits = llm.logits([IDS])[0]
        trace = llm.trace(IDS, capture=["decoder.*.x", "embed"])
        assert not isinstance(trace, list)
        last = trace[f"decoder.{len(llm.spec.decoder.layers) - 1}.x"]  # type: ignore[union-attr]
        ids, logprobs, of_next = likeliest_tokens(llm, last, [*IDS[1:], 0], 3)
        exact = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        np.testing.assert_allclose(logprobs, -np.sort(-exact, axis=-1)[:, :3], atol=1e-5)
        np.testing.assert_allclose(of_next[:-1], exact[np.arange(7), IDS[1:]], atol=1e-5)
        np.testing.assert_array_equal(ids[:, 0], logits.argmax(-1))
        head = frozen_head(llm, last[-1], 7)
        linear = float(head.direction @ last[-1]) + head.constant
        cap = 30.0 if name == "gemma2" else None
        assert head.stage == ("logit" if cap is None else "logit before tanh")
        expected = logits[-1, 7] if cap is None else cap * np.arctanh(logits[-1, 7] / cap)
        assert linear == pytest.approx(expected, abs=2e-4)
        found = attribute(llm, IDS, 7, None, -1)
        assert found.total == pytest.approx(expected, abs=2e-4)
        assert not np.isnan(found.heads).any()
        column = found.parts.index("attn")
        biased = name == "gpt2"  # its projection adds a bias beside the heads
        heads, attn = found.heads.sum(axis=1), found.values[:, column]
        np.testing.assert_allclose(heads, attn, atol=1.0 if biased else 2e-4)


@pytest.mark.parametrize("name", ["granite4_h_tiny", "minicpm", "olmo2"])
def test_attributions_sum_to_the_logit(name: str) -> None:
    """With factors and norms of branches: contributions explain all, heads their attention."""
    with opened(name) as llm:
        assert llm.spec.decoder is not None
        found = attribute(llm, IDS, 7, None, -1)
        assert found.total == pytest.approx(float(llm.logits([IDS])[0][-1, 7]), abs=1e-4)
        layers = [each.wiring.contributions for each in llm.spec.decoder.layers]
        assert set(found.parts) == {" + ".join(one.modules) for each in layers for one in each}
        last = f"decoder.{len(layers) - 1}.x"
        trace = llm.trace(IDS, ["*.added", last])
        head = frozen_head(llm, trace[last][-1], 7)
        for at, each in enumerate(layers):
            for one in each:
                value = found.values[at, found.parts.index(" + ".join(one.modules))]
                added = trace[f"decoder.{at}.{one.name}"][-1]
                assert value == pytest.approx(float(added @ head.direction), abs=1e-5)
        heads, attn = found.heads.sum(axis=1), found.values[:, found.parts.index("attn")]
        np.testing.assert_array_equal(np.isnan(heads), np.isnan(attn))
        np.testing.assert_allclose(heads, attn, atol=1e-5)


def test_last_layer_of_the_lens_is_the_models_output(llm: LLM) -> None:
    table = views.logit_lens(llm, IDS, top=2).table()
    likeliest = table["predicted"][::2][-len(IDS) :]
    assert likeliest == [f"[{id}]" for id in llm.logits([IDS])[0].argmax(-1)]
    assert (table["layer"][0], table["layer"][-1]) == ("embed", "2")
    with pytest.raises(RequestError, match="top is 0; give how many tokens, from 1 to 20"):
        views.logit_lens(llm, IDS, top=0)


def test_patterns_and_outliers_are_the_traces(llm: LLM) -> None:
    trace = llm.trace(IDS, ["decoder.1.attn.pattern", "decoder.1.ffn.input"])
    assert not isinstance(trace, list)
    table = views.attention_patterns(llm, IDS, layer=-2).table()
    np.testing.assert_array_equal(table["attention"], trace["decoder.1.attn.pattern"].ravel())
    found = views.outliers(llm, IDS).table()
    at = list(found["name"]).index("decoder.1.ffn.input")
    values = trace["decoder.1.ffn.input"]
    assert found["value"][at] == values[found["position"][at], found["dimension"][at]]
    ratios = np.abs(values).max(1) / np.sqrt((values**2).mean(1))
    assert found["ratio"][at] == pytest.approx(ratios.max())
    assert not any("norm" in name for name in found["name"])
    with pytest.raises(RequestError, match="there is no layer 9; the decoder has 0 to 2"):
        views.attention_patterns(llm, IDS, layer=9)


def test_experts_are_counted() -> None:
    with opened("mixtral") as llm:
        table = views.router_loads(llm, IDS).table()
        trace = llm.trace(IDS, "decoder.1.ffn.experts")
        assert not isinstance(trace, list)
        chosen = trace["decoder.1.ffn.experts"].astype(int).ravel().tolist()
        rows = zip(table["layer"], table["expert"], table["tokens"], strict=True)
        assert {e: n for layer, e, n in rows if layer == "1.ffn" and n} == Counter(chosen)
        assert len(chosen) == len(IDS) * 2


def test_missing_parts_of_a_model_are_one_line_errors(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no mixture of experts, so there is no router"):
        views.router_loads(llm, IDS)
    with pytest.raises(RequestError, match="this model has no draft source; open it with"):
        views.speculation(llm, IDS)
    with pytest.raises(RequestError, match="a view is of an LLM, not of str; open the"):
        views.strategies("llama2", IDS)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="a view is of an LLM, not of NoneType"):
        views.quantization_error(llm, None)  # type: ignore[arg-type]
    refused = pytest.raises(RequestError, match="the model's head applies project_out too")
    with opened("opt350m") as projected, refused:
        views.attribution(projected, IDS)
    with opened("bert") as encoder, pytest.raises(RequestError, match="the model has no decoder"):
        views.logit_lens(encoder, IDS)


def test_an_encoder_is_looked_into() -> None:
    with opened("bert") as llm:
        trace = llm.trace(IDS, ["encoder.1.attn.pattern", "encoder.1.x"])
        table = views.attention_patterns(llm, IDS, layer=1).table()
        np.testing.assert_array_equal(table["attention"], trace["encoder.1.attn.pattern"].ravel())
        names = list(views.outliers(llm, IDS).table()["name"])
        with pytest.raises(RequestError, match="there is no layer 9; the encoder has 0 to"):
            views.attention_patterns(llm, IDS, layer=9)
    assert "encoder.1.x" in names
    assert not any("norm" in name for name in names)
