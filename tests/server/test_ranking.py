"""Heads that rank and classify over HTTP, and late interaction."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer.server.http.server_settings import ModelSource
from tests.server.running import Running, serving
from tests.server.test_description import schema_of
from tests.server.test_embeddings import posted
from tests.test_classification import FORMS, GOLDENS, WORDS, with_head, with_words

DOCUMENTS = ["a b", "c d e", "f", "g h i j"]
CPU: dict[str, Any] = {"dtype": "float32"}


def colbert(folder: Path) -> np.ndarray:
    """A folder as PyLate writes it: BERT's layers and a dense layer, no pooling; the layer."""
    with_head(FORMS[0], folder)
    (folder / "config.json").write_text((GOLDENS / "bert" / "config.json").read_text())
    (folder / "model.safetensors").write_bytes(
        (GOLDENS / "bert" / "model.safetensors").read_bytes()
    )
    (folder / "vocab.txt").unlink(missing_ok=True)
    vocabulary = [*WORDS, "[unused0]", *(f"word{i}" for i in range(320 - len(WORDS) - 1))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    modules = [{"path": path, "type": kind} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    told = {"query_prefix": "a ", "document_prefix": "b ", "skiplist_words": ["c"]}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(told))
    (folder / "1_Dense").mkdir()
    weight = np.random.default_rng(3).normal(0, 0.2, (16, 64)).astype(np.float32)
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")
    dense = {"activation_function": "torch.nn.modules.linear.Identity", "bias": False}
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    return weight


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("heads")
    item = FORMS[0]
    with_head(item, folder / "classes")
    with_words(folder / "classes")
    (folder / "ranker").mkdir()
    for file in (GOLDENS / "bert_cls").glob("*"):
        (folder / "ranker" / file.name).write_bytes(file.read_bytes())
    with_words(folder / "ranker")
    colbert(folder / "late")
    names = ("ranker", "classes", "late")
    with serving([ModelSource(name, str(folder / name), CPU) for name in names]) as running:
        yield running


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_by_a_head(served: Running, path: str) -> None:
    """Jina's and Cohere's form: the score is a sigmoid of the head's, once."""
    llm = served.model("ranker").llm
    expected = llm.classify([("a", text) for text in DOCUMENTS])
    answer = posted(served, path, model="ranker", query="a", documents=DOCUMENTS, top_n=3)
    order = np.argsort(-expected.scores[:, 0])[:3].tolist()
    assert [item["index"] for item in answer["results"]] == order
    got = [item["relevance_score"] for item in answer["results"]]
    np.testing.assert_allclose(got, expected.probabilities[order, 0], atol=1e-5)
    assert (answer["similarity"], answer["activation"]) == ("head", "sigmoid")
    jsonschema.validate(answer, schema_of("/v1/rerank", "post"))


def test_raw_scores(served: Running) -> None:
    expected = served.model("ranker").llm.classify([("a", text) for text in DOCUMENTS]).scores[:, 0]
    answer = posted(
        served, "/rerank", model="ranker", query="a", documents=DOCUMENTS, use_activation=False
    )
    got = {item["index"]: item["relevance_score"] for item in answer["results"]}
    np.testing.assert_allclose([got[i] for i in range(4)], expected, atol=1e-5)
    assert answer["activation"] == "identity"
    listed = posted(served, "/rerank", model="ranker", query="a", texts=DOCUMENTS, raw_scores=True)
    assert listed[0]["score"] == pytest.approx(expected.max(), abs=1e-5)


def test_documents_that_are_cut(served: Running) -> None:
    texts = ["b c d e", "b " * 500]
    given: dict[str, Any] = {"model": "ranker", "query": "a", "documents": texts}
    assert posted(served, "/rerank", 400, **given)["code"] == "context_length_exceeded"
    answer = posted(served, "/v2/rerank", **given, max_tokens_per_doc=2)
    short = posted(served, "/v2/rerank", **given | {"documents": ["b c", "b b"]})
    for one, other in zip(answer["results"], short["results"], strict=True):
        assert one["relevance_score"] == pytest.approx(other["relevance_score"], abs=1e-5)
    assert posted(served, "/rerank", **given, truncate_prompt_tokens=-1)["results"]


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items")]
)
def test_score_by_a_head(served: Running, names: tuple[str, str]) -> None:
    expected = served.model("ranker").llm.classify([("a", text) for text in DOCUMENTS])
    given: dict[str, Any] = dict(zip(names, ("a", DOCUMENTS), strict=True))
    answer = posted(served, "/score", model="ranker", **given)
    got = [item["score"] for item in answer["data"]]
    np.testing.assert_allclose(got, expected.probabilities[:, 0], atol=1e-5)
    jsonschema.validate(answer, schema_of("/score", "post"))


def test_classify(served: Running) -> None:
    expected = served.model("classes").llm.classify(DOCUMENTS)
    answer = posted(served, "/classify", model="classes", input=DOCUMENTS)
    assert answer["labels"] == ["bad", "so so", "good"]
    assert [item["label"] for item in answer["data"]] == expected.best
    got = [item["probs"] for item in answer["data"]]
    np.testing.assert_allclose(got, expected.probabilities, atol=1e-5)
    assert answer["data"][0]["num_classes"] == 3
    jsonschema.validate(answer, schema_of("/classify", "post"))
    raw = posted(served, "/v1/classify", model="classes", input="a b", use_activation=False)
    np.testing.assert_allclose(raw["data"][0]["probs"], expected.scores[0], atol=1e-5)


def test_pooling(served: Running) -> None:
    """Each kind of result, as vLLM has it."""
    answer = posted(served, "/pooling", model="classes", input=["a b"])
    expected = served.model("classes").llm.classify(["a b"]).probabilities
    np.testing.assert_allclose(answer["data"][0]["data"], expected[0], atol=1e-5)
    jsonschema.validate(answer, schema_of("/pooling", "post"))
    llm = served.model("late").llm
    vectors = llm.token_vectors(["a b"])[0]
    answer = posted(served, "/pooling", model="late", input="a b")
    np.testing.assert_allclose(answer["data"][0]["data"], vectors, atol=1e-5)
    coded = posted(served, "/pooling", model="late", input="a b", encoding_format="base64")
    data = np.frombuffer(base64.b64decode(coded["data"][0]["data"]), "<f4")
    np.testing.assert_allclose(data.reshape(-1, 16), vectors, atol=1e-5)
    embedded = served.model("ranker").llm.embed(["a b"])[0]
    answer = posted(served, "/pooling", model="ranker", input=["a b"], task="embed", dimensions=8)
    expected = embedded[:8] / np.linalg.norm(embedded[:8])
    np.testing.assert_allclose(answer["data"][0]["data"], expected, atol=1e-5)


def test_late_interaction(served: Running, tmp_path: Path) -> None:
    """MaxSim of projected vectors, behind PyLate's prefixes, without skipped tokens."""
    weight = colbert(tmp_path / "again")
    llm = served.model("late").llm

    def vectors(text: str) -> np.ndarray:
        x = llm.hidden([llm.encode(text)])[0] @ weight.T
        return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))

    expected = []
    for text in DOCUMENTS:
        ids = llm.encode(f"b {text}")
        kept = [i for i, id in enumerate(ids) if id != WORDS.index("c")]
        expected.append((vectors("a d") @ vectors(f"b {text}")[kept].T).max(axis=1).sum())
    answer = posted(served, "/score", model="late", text_1="d", text_2=DOCUMENTS)
    np.testing.assert_allclose([item["score"] for item in answer["data"]], expected, atol=1e-4)
    assert answer["similarity"] == "maxsim"
    ranked = posted(served, "/rerank", model="late", query="d", documents=DOCUMENTS)
    assert [item["index"] for item in ranked["results"]] == np.argsort(expected)[::-1].tolist()
    error = posted(served, "/v1/embeddings", 400, model="late", input="a")
    assert "it has no pooling" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"model": "ranker", "text_1": "", "items": []}, "items"),
        ("/rerank", {"model": "classes", "query": "a", "documents": ["b"]}, "model"),
        ("/score", {"model": "ranker", "text_1": "a"}, "text_2"),
        ("/score", {"model": "ranker", "queries": "a", "text_1": "a", "text_2": "b"}, "text_1"),
        ("/classify", {"model": "late", "input": "a"}, "model"),
        ("/classify", {"model": "classes", "input": []}, "input"),
        ("/pooling", {"model": "classes", "input": "a", "dimensions": 2}, "dimensions"),
    ],
)
def test_what_is_refused(served: Running, path: str, body: dict[str, Any], param: str) -> None:
    assert posted(served, path, 400, **body)["param"] == param


def test_capabilities(served: Running) -> None:
    with served.client() as http:
        models = http.get("/v1/models").json()["data"]
    known = {model["id"]: set(model["capabilities"]) for model in models}
    assert {"classify", "rerank"} <= known["ranker"]
    assert "classify" in known["classes"]
    assert "rerank" in known["late"]
    assert "rerank" not in known["classes"]
