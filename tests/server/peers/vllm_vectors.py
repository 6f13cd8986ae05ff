"""vLLM's tests of vectors, classes and scores (tests/entrypoints/pooling)."""

import base64
import struct
from typing import Any

from tests.server.peers.llama_chat import MEDIA
from tests.server.peers.served import Servers, Target
from tests.server.peers.vllm_chat import VLLM

CLASSES, EMBED = "pooling/classify/test_online.py", "pooling/embed/test_online.py"
BYTES = "numbers are float32 in base64, or JSON"
CHATS = "vectors and classes are of texts, without a template"


def classified(at: Servers, status: int = 200, /, **body: Any) -> Any:
    return at.classes.post("/classify", status, **{"input": "a b c", **body})


def embedded(at: Servers, status: int = 200, /, **body: Any) -> Any:
    return at.vectors.post("/v1/embeddings", status, **{"input": "a b c", **body})


@VLLM.case(CLASSES, 7, "texts, ids, lists; nothing; cut ones; raw scores; /pooling; specials")
def _(at: Servers) -> None:
    ids = at.classes.post("/tokenize", prompt="a b c")["tokens"]
    for given, count in (("a b c", 1), (ids, 1), (["a"] * 10, 10), ([ids] * 10, 10)):
        answer = classified(at, input=given)
        assert [item["index"] for item in answer["data"]] == list(range(count))
        for item in answer["data"]:
            assert len(item["probs"]) == item["num_classes"]
            assert item["label"]
    classified(at, 400, input=[])
    cut = classified(at, input="a " * 60, truncate_prompt_tokens=5)
    assert cut["usage"]["prompt_tokens"] == 5
    on, off = (classified(at, use_activation=u)["data"][0]["probs"] for u in (True, False))
    assert on != off
    assert at.classes.post("/pooling", input="a", task="classify")["data"]
    bare = classified(at, add_special_tokens=False)["usage"]["prompt_tokens"]
    assert bare < classified(at, add_special_tokens=True)["usage"]["prompt_tokens"]
    classified(at, 400, truncate_prompt_tokens=99999)


@VLLM.case(CLASSES, 1, "an empty text is refused", "its vector is that of the marks around it")
def _(at: Servers) -> None:
    classified(at, 400, input="")


@VLLM.case(CLASSES, 1, "conversations", CHATS)
def _(at: Servers) -> None:
    at.classes.post("/classify", messages=[{"role": "user", "content": "a"}])


@VLLM.case(CLASSES, 2, "`/invocations`")
def _(at: Servers) -> None:
    at.classes.post("/invocations", input="a")


@VLLM.case(CLASSES, 2, "no scores of a model of several classes", "an error that says so, for some")
def _(at: Servers) -> None:
    at.classes.post("/rerank", 404, query="a", documents=["b"])


@VLLM.case(CLASSES, 2, "tasks that a model has not")
def _(at: Servers) -> None:
    for task in ("token_classify", "plugin"):
        at.classes.post("/pooling", 400, input="a", task=task)


@VLLM.case(CLASSES, 2, "no vectors of a model with a head", "it has them, too")
def _(at: Servers) -> None:
    at.classes.post("/pooling", 400, input="a", task="embed")


@VLLM.case(EMBED, 7, "texts, ids, lists, cut ones, base64, /pooling; ids that are none")
def _(at: Servers) -> None:
    embedded(at, 400, input=[-1])
    ids = at.vectors.post("/tokenize", prompt="a b c")["tokens"]
    texts, numbers = (embedded(at, input=given)["data"][0]["embedding"] for given in ("a b c", ids))
    assert max(abs(a - b) for a, b in zip(texts, numbers, strict=True)) < 1e-5
    assert len(embedded(at, input=["a"] * 10)["data"]) == 10
    cut = embedded(at, input="word " * 50, truncate_prompt_tokens=10)["usage"]
    assert cut["prompt_tokens"] == cut["total_tokens"] == 10
    embedded(at, 400, truncate_prompt_tokens=8193)
    data = base64.b64decode(embedded(at, encoding_format="base64")["data"][0]["embedding"])
    given = struct.unpack(f"<{len(data) // 4}f", data)
    assert max(abs(a - b) for a, b in zip(given, texts, strict=True)) < 1e-6
    assert len(at.vectors.post("/pooling", input="a", task="embed")["data"][0]["data"]) == 384


@VLLM.case(EMBED, 3, "names and forms that are not known are refused")
def _(at: Servers) -> None:
    for name in ("encoding_format", "embed_dtype", "endianness"):
        embedded(at, 400, **{name: "bad"})


@VLLM.case(EMBED, 4, "tasks that a model has not", "it has vectors of tokens, too")
def _(at: Servers) -> None:
    for task in ("classify", "token_classify", "plugin", "token_embed"):
        at.vectors.post("/pooling", 400, input="a", task=task)


@VLLM.case(EMBED, 1, "embed_dtype and endianness in base64")
def _(at: Servers) -> None:
    for kind in ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"):
        for order in ("native", "little", "big"):
            embedded(at, encoding_format="base64", embed_dtype=kind, endianness=order)


@VLLM.case(EMBED, 2, "answers that are bytes", BYTES)
def _(at: Servers) -> None:
    embedded(at, encoding_format="bytes")


@VLLM.case(EMBED, 1, "use_activation: vectors that are not scaled")
def _(at: Servers) -> None:
    (item,) = embedded(at, use_activation=False)["data"]
    assert abs(sum(x * x for x in item["embedding"]) - 1) > 1e-3


@VLLM.case(EMBED, 2, "conversations; padding to a length", CHATS)
def _(at: Servers) -> None:
    at.vectors.post("/v1/embeddings", messages=[{"role": "user", "content": "a"}])


@VLLM.case(EMBED, 2, "`/invocations`")
def _(at: Servers) -> None:
    at.vectors.post("/invocations", input="a")


COHERE = "pooling/embed/test_cohere_online.py"


def cohere(at: Servers, status: int = 200, /, **body: Any) -> Any:
    given = {"texts": ["hello world"], "embedding_types": ["float"], **body}
    return at.vectors.post("/v2/embed", status, **given)


@VLLM.case(COHERE, 30, "`/v2/embed`: types, batches, purposes, cuts; as /v1/embeddings")
def _(at: Servers) -> None:
    made = cohere(at)
    (vector,) = made["embeddings"]["float"]
    assert made["texts"] == ["hello world"]
    assert made["meta"]["api_version"]["version"] == "2"
    assert made["meta"]["billed_units"]["input_tokens"] > 0
    assert abs(sum(x * x for x in vector) - 1) < 0.01
    assert vector == embedded(at, input=["hello world"])["data"][0]["embedding"]
    kinds = cohere(at, embedding_types=["float", "base64", "binary", "ubinary"])["embeddings"]
    assert len(kinds["binary"][0]) == len(kinds["ubinary"][0]) == len(vector) // 8
    cohere(at, 400, input_type="nonexistent_type")
    at.vectors.post("/v2/embed", 400)
    texts = ["machine learning", "deep learning", "chocolate cake recipe"]
    one, two, three = cohere(at, texts=texts)["embeddings"]["float"]
    near, far = (sum(a * b for a, b in zip(one, v, strict=True)) for v in (two, three))
    assert near > far
    long = [" ".join(f"{word}{i}" for word in ("alpha", "omega") for i in range(300))]
    ends = [cohere(at, texts=long, truncate=end)["embeddings"]["float"] for end in ("END", "START")]
    assert ends[0] != ends[1]
    cohere(at, 400, texts=long, truncate="NONE")


@VLLM.case("pooling/embed/test_cohere_openai_parity.py", 3, "`/v2/embed` as /v1/embeddings")
def _(at: Servers) -> None:
    texts = ["machine learning", "deep learning"]
    made, other = cohere(at, texts=texts), embedded(at, input=texts)
    assert made["embeddings"]["float"] == [one["embedding"] for one in other["data"]]
    tokens = made["meta"]["billed_units"]["input_tokens"]
    assert tokens == other["usage"]["prompt_tokens"]


@VLLM.case("pooling/embed/test_online_dimensions.py", 2, "the first numbers of vectors")
def _(at: Servers) -> None:
    assert len(embedded(at, dimensions=16)["data"][0]["embedding"]) == 16
    embedded(at, 400, dimensions=-1)


VLLM.apart(
    "pooling/embed/test_online_long_text.py",
    5,
    "texts beyond the context, in pieces",
    "a flag of vLLM's",
)


@VLLM.case("pooling/basic/test_truncation.py", 3, "cut to a length, to the context; too long a one")
def _(at: Servers) -> None:
    long = "word " * 600
    assert embedded(at, input=long, truncate_prompt_tokens=10)["usage"]["prompt_tokens"] == 10
    assert embedded(at, input=long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] > 100
    embedded(at, 400, input=long, truncate_prompt_tokens=9999)


def scores(target: Target) -> None:
    """Pairs under all names: single to several, several to several."""
    for one, two in (
        ("queries", "documents"),
        ("queries", "items"),
        ("text_1", "text_2"),
        ("data_1", "data_2"),
    ):
        pairs = target.post("/score", **{one: ["a", "b"], two: ["c", "d"]})["data"]
        assert len(pairs) == 2
    single = target.post("/score", queries="a", documents="c")["data"]
    assert (
        single[0]["score"]
        == target.post("/score", queries="a", documents=["c", "d"])["data"][0]["score"]
    )


def ranks(target: Target) -> None:
    """Documents by score, the best documents, and a query that is too long."""
    given = {"query": "a", "documents": ["b", "c d", "e"]}
    results = target.post("/rerank", **given)["results"]
    found = [result["relevance_score"] for result in results]
    assert found == sorted(found, reverse=True)
    best = target.post("/rerank", **given, top_n=2)["results"]
    assert best == results[:2]
    target.post("/rerank", 400, query="a " * 9000, documents=["b"])


BI, CROSS = (
    "pooling/scoring/test_bi_encoder_online.py",
    "pooling/scoring/test_cross_encoder_online.py",
)
LATE = "pooling/scoring/test_late_interaction_online.py"


@VLLM.case(BI, 14, "scores under all names, documents by them, limits, /pooling")
def _(at: Servers) -> None:
    scores(at.vectors)
    ranks(at.vectors)
    at.vectors.post("/score", 400, queries="a " * 9000, documents=["b"])
    for task in ("classify", "token_classify", "plugin"):
        at.vectors.post("/pooling", 400, input="a", task=task)


@VLLM.case(BI, 1, "`/invocations`")
def _(at: Servers) -> None:
    at.vectors.post("/invocations", query="a", documents=["b"])


@VLLM.case(CROSS, 17, "scores by a head, raw ones, max_tokens_per_doc, tasks")
def _(at: Servers) -> None:
    scores(at.ranker)
    ranks(at.ranker)
    given = {"query": "a", "documents": ["b c d e f g h i j"]}
    raw, plain = (
        at.ranker.post("/rerank", **given, use_activation=u)["results"][0]["relevance_score"]
        for u in (False, True)
    )
    assert raw != plain
    cut = at.ranker.post("/rerank", **given, max_tokens_per_doc=2)["usage"]["prompt_tokens"]
    assert cut < at.ranker.post("/rerank", **given)["usage"]["prompt_tokens"]
    at.ranker.post("/rerank", 400, **given, max_tokens_per_doc=-5)
    assert len(at.ranker.post("/pooling", input="a", task="classify")["data"][0]["data"]) == 1
    for task in ("token_classify", "plugin"):
        at.ranker.post("/pooling", 400, input="a", task=task)


@VLLM.case(CROSS, 2, "no vectors of a model with a head", "it has them, too")
def _(at: Servers) -> None:
    at.ranker.post("/pooling", 400, input="a", task="embed")


@VLLM.case(CROSS, 1, "`/invocations`")
def _(at: Servers) -> None:
    at.ranker.post("/invocations", query="a", documents=["b"])


@VLLM.case(LATE, 14, "scores by tokens' vectors, documents, the vectors; no single vector")
def _(at: Servers) -> None:
    scores(at.late)
    ranks(at.late)
    (item,) = at.late.post("/pooling", input="a b", task="token_embed")["data"]
    assert len(item["data"][0]) == 16
    at.late.post("/pooling", 400, input="a", task="embed")


VLLM.apart(LATE, 1, "images' arguments", "vLLM's own classes")


@VLLM.case("pooling/token_embed/test_online.py", 5, "vectors of tokens; tasks that a model has not")
def _(at: Servers) -> None:
    (item,) = at.late.post("/pooling", input="a b", task="token_embed")["data"]
    assert len(item["data"]) >= 4
    for task in ("embed", "classify", "token_classify", "plugin"):
        at.late.post("/pooling", 400, input="a", task=task)


VLLM.apart("pooling/token_embed/test_online.py", 13, "late chunking", "an experiment of vLLM's")
VLLM.apart(
    "pooling/token_classify/test_online.py", 5, "a class of each token", "no such heads here"
)
VLLM.apart(
    "pooling/reward/test_token_reward_online.py", 13, "InternLM 2 reward", "no such head here"
)
VLLM.apart("multimodal", 66, "images and sounds, by functions", MEDIA)
VLLM.apart("speech_to_text", 63, "speech, by functions", MEDIA)
