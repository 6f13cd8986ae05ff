"""llama.cpp's tests of its other routes (tools/server/tests/unit)."""

import time
from typing import Any
from urllib.parse import quote

from tests.server.peers.llama_chat import LARGE, LLAMA, MEDIA
from tests.server.peers.served import HI, KEY, TOOL, Servers, Target

DOCS = ["a b", "c d e", "f", "g h i j"]
IDS = [5, 6, 7]
VECTORS = "test_embedding.py"
INVALID: list[Any] = [[], None, 123, [1, 2, 3]]


def cors(at: Target, origin: str) -> Any:
    """The headers of a preflight."""
    asked = {"origin": origin, "access-control-request-method": "POST"}
    with at.running.client() as http:
        return http.options("/completions", headers=asked).headers


LLAMA.apart("test_compat_gcp.py", 2, "`/predict`", "Vertex AI's route, off by default in theirs")
LLAMA.apart("test_ctx_shift.py", 1, "a shifted context", "the context is never shifted")


@LLAMA.case("test_ctx_shift.py", 4, "answers end with the context; prompts beyond it are refused")
def _(at: Servers) -> None:
    answer = at.keyed.post(
        "/completion", prompt=IDS, n_predict=-1, ignore_eos=True, headers={"x-api-key": KEY}
    )
    assert answer["truncated"] is True
    assert answer["tokens_evaluated"] + answer["tokens_predicted"] >= 256
    assert "context" in at.chat.native(400, prompt="word " * 9000)["error"]["message"]
    *pieces, last = at.chat.stream("/v1/completions", prompt="Once", n_predict=16)
    assert last["choices"][0]["finish_reason"] in ("length", "stop")
    assert all(piece["choices"][0]["finish_reason"] is None for piece in pieces)


@LLAMA.case(VECTORS, 9, "one text, several, alike, of length 1, counted")
def _(at: Servers) -> None:
    texts = ["a cat", "a cat", "something else"]
    answer = at.vectors.post("/v1/embeddings", input=texts)
    one, two, three = (item["embedding"] for item in answer["data"])
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-3
    assert one != three
    assert abs(sum(x * x for x in one) - 1) < 1e-3
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 6
    assert len(at.vectors.post("/v1/embeddings", input="a cat")["data"]) == 1


@LLAMA.case(VECTORS, 8, "an empty text; texts and ids in each other")
def _(at: Servers) -> None:
    for given in ("", "a", [12, 34], [12, "a", 56], ["a", "b"], ["a", [12]], [[12], [12, "a"]]):
        at.vectors.post("/v1/embeddings", input=given)


@LLAMA.case(VECTORS, 4, "objects with a text or parts")
def _(at: Servers) -> None:
    parts = {"content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}
    at.vectors.post("/v1/embeddings", input={"prompt_string": "a"})
    one, two = at.vectors.post("/v1/embeddings", input=["a b", parts])["data"]
    assert one["embedding"] == two["embedding"]


@LLAMA.case(VECTORS, 6, "what is no input")
def _(at: Servers) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for given in list[Any](
        [[], {"content": "a"}, {"content": [{"type": "x"}]}, {"content": [image]}]
    ):
        at.vectors.post("/v1/embeddings", 400, input=given)


@LLAMA.case(VECTORS, 1, "vectors of tokens, unpooled, of `/embeddings`", "`/pooling` has them")
def _(at: Servers) -> None:
    shown = at.late.post("/embeddings", input="a b")
    assert isinstance(shown, list)


@LLAMA.case(VECTORS, 1, "no unpooled vectors of /v1/embeddings")
def _(at: Servers) -> None:
    assert "error" in at.late.post("/v1/embeddings", 400, input="a b")


@LLAMA.case(VECTORS, 4, "openai-python, base64, texts that are too long")
def _(at: Servers) -> None:
    shown = at.vectors.post("/v1/embeddings", input="a", encoding_format="base64")
    assert isinstance(shown["data"][0]["embedding"], str)
    at.vectors.post("/v1/embeddings", 400, input="this is a test " * 512)


@LLAMA.case("test_ignore_eos.py", 2, "generation_settings list the biases of ends")
def _(at: Servers) -> None:
    settings = at.chat.native(ignore_eos=True)["generation_settings"]
    assert settings["logit_bias"]
    assert all(setting["bias"] is None for setting in settings["logit_bias"])
    assert at.chat.native(ignore_eos=False)["generation_settings"]["logit_bias"] == []


LLAMA.apart("test_infill.py", 1, "Qwen2.5-Coder", LARGE)


@LLAMA.case("test_infill.py", 5, "other files that are wrong")
def _(at: Servers) -> None:
    given = {"input_prefix": "a", "prompt": "b", "input_suffix": "c"}
    for extra in ({}, {"filename": "x"}, {"filename": 1}, {"filename": 1, "text": "x"}):
        assert "error" in at.chat.post("/infill", 400, input_extra=[extra], **given)


LLAMA.apart(
    "test_infill.py", 2, "a gap filled", "needs a vocabulary with such tokens: `test_infill.py`"
)
LLAMA.apart("test_kv_keep_only_active.py", 2, "lines of its log", "a cache of its own kind")


@LLAMA.case(
    "test_lora.py", 2, "scales for all requests: POST /lora-adapters", "requests name theirs"
)
def _(at: Servers) -> None:
    with at.adapted.running.client() as http:
        assert http.post("/lora-adapters", json=[{"id": 0, "scale": 1.0}]).status_code == 200


@LLAMA.case("test_lora.py", 1, "scales by request")
def _(at: Servers) -> None:
    def drawn(scale: float) -> Any:
        lora = [{"id": 0, "scale": scale}]
        return at.adapted.native(
            prompt=IDS, lora=lora, temperature=0, cache_prompt=False, return_tokens=True
        )["tokens"]

    assert drawn(0.0) == drawn(0.0)
    assert drawn(0.0) != drawn(1.0)


LLAMA.apart("test_lora.py", 1, "Llama 3.1 8B", LARGE)
LLAMA.apart("test_mcp_servers.py", 21, "MCP servers behind the page", "tools run in clients")
LLAMA.apart("test_tools_builtin.py", 20, "shell and files for the page", "tools run in clients")
LLAMA.apart("test_proxy.py", 4, "a proxy for the page", "a server that fetches URLs for clients")
LLAMA.apart("test_metrics.py", 1, "501 without --metrics", "metrics are always there")
METRICS = "test_metrics.py"


@LLAMA.case(METRICS, 2, "names with llamacpp:, a header", "names are vLLM's, with jinfer:")
def _(at: Servers) -> None:
    assert "llamacpp:prompt_tokens_total" in at.chat.get("/metrics")


@LLAMA.case(METRICS, 6, "tokens are counted; timings are finite, also of progress; slots are idle")
def _(at: Servers) -> None:
    def counted(name: str) -> float:
        lines = at.chat.get("/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"jinfer:{name}{{"))

    before = counted("generation_tokens_total")
    timings = at.chat.native()["timings"]
    assert counted("generation_tokens_total") == before + 8
    assert all(value is not None and value >= 0 for value in timings.values())
    item = at.chat.native(n_predict=1)["timings"]
    assert item["predicted_per_second"] == 0
    expected = 1e3 / timings["predicted_ms"] * 7
    assert abs(timings["predicted_per_second"] - expected) < 1e-3 * expected
    assert not any(slot["is_processing"] for slot in at.chat.get("/slots"))


@LLAMA.case(
    METRICS, 1, "tokens of embeddings are counted", "prompt tokens of vectors are in no metric"
)
def _(at: Servers) -> None:
    at.vectors.post("/v1/embeddings", input=["a", "b"])
    lines = at.vectors.get("/metrics").splitlines()
    counted = [line for line in lines if line.startswith("jinfer:prompt_tokens_total{")]
    assert any('"minilm"' in line and float(line.split()[-1]) > 0 for line in counted)


@LLAMA.case("test_rerank.py", 16, "documents, TEI's texts, top_n, usage, wrong ones")
def _(at: Servers) -> None:
    for name, key in (("documents", "relevance_score"), ("texts", "score")):
        for limit in (None, 2, 4, 99):
            top = {} if limit is None else {"top_n": limit}
            answer = at.ranker.post("/rerank", query="a", **{name: DOCS}, **top)
            results = answer if name == "texts" else answer["results"]
            assert len(results) == min(limit or 4, 4)
            assert all(key in result for result in results)
    usage = at.ranker.post("/rerank", query="a", documents=DOCS[:2])["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] > 0
    for wrong in INVALID:
        assert "error" in at.ranker.post("/rerank", 400, query="a", documents=wrong)


def states(at: Servers) -> dict[str, str]:
    return {item["id"]: item["status"]["value"] for item in at.router.get("/models")["data"]}


def loaded(at: Servers, name: str) -> None:
    assert at.router.post("/models/load", model=name)["success"] is True
    assert states(at)[name] == "loaded"


ROUTER = "test_router.py"


@LLAMA.case(ROUTER, 1, "props of the router itself", "/props are the first model's")
def _(at: Servers) -> None:
    assert at.router.get("/props")["role"] == "router"


@LLAMA.case(ROUTER, 2, "a model of the folder answers; another one is unknown")
def _(at: Servers) -> None:
    at.router.text(model="one", prompt=IDS)
    assert "error" in at.router.text(404, model="none/there", prompt=IDS)


@LLAMA.case(
    ROUTER, 7, "loaded, unloaded, the least recently used leaves; who waits, and in what order"
)
def _(at: Servers) -> None:
    loaded(at, "one")
    loaded(at, "two")
    loaded(at, "three")
    assert states(at)["one"] == "unloaded"
    at.router.text(model="one", prompt=IDS)
    assert list(states(at).values()).count("loaded") == 2
    at.router.post("/models/unload", model="one")
    assert states(at)["one"] == "unloaded"


@LLAMA.case(ROUTER, 1, "a key is needed")
def _(at: Servers) -> None:
    error = at.keyed.text(401, prompt=IDS)["error"]
    assert error["type"] == "authentication_error"
    at.keyed.text(prompt=IDS, headers={"authorization": f"Bearer {KEY}"})


LLAMA.apart(ROUTER, 1, "no loading by requests", "a flag: `test_model_residency.py` has it")
LLAMA.apart(ROUTER, 5, "presets in INI, downloads, deletions", "models are a folder, or a TOML")
SAFE = "test_security.py"


@LLAMA.case(SAFE, 7, "health and the page without a key; keys in both headers", "")
def _(at: Servers) -> None:
    at.keyed.get("/health")
    at.keyed.get("/")
    for key in ({}, {"authorization": "Bearer wrong"}):
        error = at.keyed.text(401, prompt=IDS, headers=key)["error"]
        assert error["type"] == "authentication_error"
    for key in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
        at.keyed.text(prompt=IDS, headers=key)


@LLAMA.case(SAFE, 5, "any origin may call", "none may, unless --cors names it")
def _(at: Servers) -> None:
    assert cors(at.chat, "web.mydomain.fr")["access-control-allow-origin"] == "web.mydomain.fr"


@LLAMA.case(SAFE, 11, "an origin that is named may, others may not")
def _(at: Servers) -> None:
    named = "http://localhost:8080"
    assert cors(at.keyed, named)["access-control-allow-origin"] == named
    for other in ("http://evil.com", "http://localhost.evil.com", "http://notlocalhost"):
        assert "access-control-allow-origin" not in cors(at.keyed, other)


LLAMA.apart(SAFE, 1, "headers of its proxy", "there is no proxy")
LLAMA.apart(SAFE, 5, "files of media", MEDIA)
LLAMA.apart("test_sleep.py", 2, "rates since the last look", "metrics are counters")


@LLAMA.case("test_sleep.py", 2, "a model sleeps, is looked at, and wakes for a request")
def _(at: Servers) -> None:
    loaded(at, "two")
    at.router.post("/sleep?model=two&level=2")
    assert at.router.get("/props?model=two")["is_sleeping"] is True
    at.router.text(model="two", prompt=IDS)
    assert at.router.get("/props?model=two")["is_sleeping"] is False


@LLAMA.case("test_stream.py", 1, "a stream is read again, and ended, with slashes in its name")
def _(at: Servers) -> None:
    id = "conv::owner/model:Q8_0"
    path = f"/v1/stream?conv_id={quote(id, safe='')}"
    body = {"messages": HI, "max_tokens": 8, "stream": True}
    whole = at.chat.post("/chat/completions", headers={"X-Conversation-Id": id}, **body)
    assert at.chat.get(f"{path}&from=0") == whole
    with at.chat.running.client() as http:
        assert http.delete(path).status_code == 204
    at.chat.get(f"{path}&from=0", 404)


LLAMA.apart(
    "test_stream.py", 1, "ended while its model loads", "a moment: `test_resumable_streams.py`"
)


@LLAMA.case("test_stream.py", 1, "503 while its model loads", "it waits until the answer comes")
def _(at: Servers) -> None:
    at.router.get("/v1/stream?conv_id=loading", 503)


SLOTS = "test_slot_save.py"


@LLAMA.case(SLOTS, 2, "saved, restored into another slot, erased")
def _(at: Servers) -> None:
    asked = {"prompt": f"{time.time()} What is the capital of France? " * 8, "id_slot": 1}
    first = at.chat.native(**asked, temperature=0)
    saved = at.chat.post("/slots/1?action=save", filename="one.bin")
    assert saved["n_saved"] > 0
    at.chat.post("/slots/1?action=erase")
    assert at.chat.native(**asked, temperature=0)["timings"]["cache_n"] == 0
    at.chat.post("/slots/1?action=erase")
    assert at.chat.post("/slots/0?action=restore", filename="one.bin")["n_restored"] > 0
    again = at.chat.native(**asked | {"id_slot": 0}, temperature=0)
    assert again["timings"]["cache_n"] > 0
    assert again["content"] == first["content"]


LLAMA.apart(SLOTS, 1, "an older form of its files", "files are jinfer's own")
LLAMA.apart(SLOTS, 6, "slots with images", MEDIA)
LLAMA.apart("test_vision_api.py", 20, "images", MEDIA)
LLAMA.apart("test_speculative.py", 3, "made-up rates of acceptance, a shifted context", "not here")
LLAMA.apart(
    "test_speculative.py", 5, "drafts change no token", "`tests/speculate` has it, without HTTP"
)
TEMPLATES = "test_template.py"


@LLAMA.case(TEMPLATES, 27, "prompts end with a thought's begin, or its end where thinking is off")
def _(at: Servers) -> None:
    for tools in (None, [], [TOOL]):
        prompt = at.thinks.post("/apply-template", messages=HI, tools=tools)["prompt"]
        assert prompt.endswith("<|im_start|>assistant\n<think>\n")


@LLAMA.case(TEMPLATES, 2, "with and without the beginning of an answer")
def _(at: Servers) -> None:
    for begin in (True, False):
        asked = {"messages": HI, "add_generation_prompt": begin}
        prompt = at.chat.post("/apply-template", **asked)["prompt"]
        assert prompt.endswith("<|im_start|>assistant\n") is begin


LLAMA.apart(TEMPLATES, 6, "today's date in templates", "`tests/template` has it: strftime_now")


@LLAMA.case("test_tokenize.py", 3, "there and back, specials, pieces")
def _(at: Servers) -> None:
    text = "What is the capital of France ?"
    ids = at.chat.post("/tokenize", content=text)["tokens"]
    assert at.chat.post("/detokenize", tokens=ids)["content"] == text
    at.chat.post("/tokenize", content=text, add_special=True)
    pieces = at.chat.post("/tokenize", content="媽 and 🤗", with_pieces=True)["tokens"]
    assert all(piece["id"] >= 0 and piece["piece"] for piece in pieces)


@LLAMA.case("test_tool_call.py", 6, "no call without tools, of a small model, or with none")
def _(at: Servers) -> None:
    for more in ({"tools": None}, {"tools": [TOOL], "tool_choice": "none"}):
        assert "tool_calls" not in at.chat.chat(**more)["choices"][0]["message"]


LLAMA.apart("test_tool_call.py", 196, "calls of large models", LARGE)
