"""The routes that are neither chat nor completions nor vectors."""

import json
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from jinfer import SamplingParams
from jinfer.loader.config.source_errors import SourceError
from jinfer.server.serve_flags import named_functions
from tests.server.running import Running
from tests.server.test_operation import until

HELLO = [{"role": "user", "content": "Hello"}]


def got(smol: Running, path: str) -> Any:
    with smol.client() as http:
        answer = http.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def posted(smol: Running, path: str, **body: Any) -> Any:
    with smol.client() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_health(smol: Running) -> None:
    for path in ("/health", "/v1/health", "/ping"):
        assert got(smol, path) == {"status": "ok"}


def test_version(smol: Running) -> None:
    assert set(got(smol, "/version")) == {"version", "jax"}
    until(lambda: got(smol, "/load") == {"server_load": 0}, 20)


def test_models(client: openai.OpenAI, smol: Running) -> None:
    (model,) = client.models.list().data
    assert model.id == "smol"
    assert client.models.retrieve("smol") == model
    shown = got(smol, "/models")["data"][0]
    assert shown["root"] == smol.model().source.path
    assert shown["max_model_len"] == 4096
    assert shown["meta"]["n_vocab"] == 49152
    assert shown["meta"]["n_params"] == 134515008
    assert shown["capabilities"] == ["embeddings", "completion", "chat"]


def test_metrics(smol: Running) -> None:
    posted(smol, "/v1/completions", prompt="Hello", max_tokens=3, temperature=0)
    with smol.client() as http:
        text = http.get("/metrics").text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = '{model_name="smol"}'
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "kv_cache_blocks_held",
        "prefix_offload_disk_bytes",
        "prefix_offload_restored_blocks_total",
    ):
        assert float(figures[f"jinfer:{name}{label}"]) == 0
    assert float(figures[f"jinfer:kv_cache_blocks{label}"]) == smol.model().llm.stats().blocks
    for name in (
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "compilations_total",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
        "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count",
    ):
        assert float(figures[f"jinfer:{name}{label}"]) >= 0, name
    assert float(figures[f"jinfer:generation_tokens_total{label}"]) >= 3
    ended = 'jinfer:request_success_total{finished_reason="length",model_name="smol"}'
    assert float(figures[ended]) >= 1


def test_tokens_as_llama_cpp_asks(smol: Running) -> None:
    llm = smol.model().llm
    assert llm.tokenizer is not None
    text = "Grüße <|im_end|>"
    plain = llm.tokenizer.encode(text, special=False, parse_special=False)
    parsed = llm.tokenizer.encode(text, special=False)
    assert posted(smol, "/tokenize", content=text) == {"tokens": parsed}
    assert posted(smol, "/tokenize", content=text, parse_special=False) == {"tokens": plain}
    pieces = posted(smol, "/tokenize", content="né", with_pieces=True)["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == "né"
    split = posted(smol, "/tokenize", content="🦙", with_pieces=True)["tokens"]
    assert any(isinstance(item["piece"], list) for item in split)
    assert posted(smol, "/tokenize", content=[5, "a", 6])["tokens"][0] == 5
    answer = posted(smol, "/detokenize", tokens=parsed)
    assert answer["content"] == text


def test_tokens_as_vllm_asks(smol: Running) -> None:
    llm = smol.model().llm
    answer = posted(smol, "/tokenize", prompt="Hello there", return_token_strs=True)
    assert answer["tokens"] == llm.encode("Hello there")
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 4096
    assert "".join(answer["token_strs"]) == "Hello there"
    ids = posted(smol, "/tokenize", messages=HELLO)["tokens"]
    assert ids == llm.encode_chat(HELLO)
    shorter = posted(smol, "/tokenize", messages=HELLO, add_generation_prompt=False)["tokens"]
    assert ids[: len(shorter)] == shorter
    assert len(shorter) < len(ids)
    assert posted(smol, "/detokenize", tokens=answer["tokens"])["prompt"] == "Hello there"


def test_tokens_of_a_conversation_with_tools(smol: Running) -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    ids = posted(smol, "/tokenize", messages=HELLO, tools=[tool])["tokens"]
    prompt = posted(smol, "/apply-template", messages=HELLO, tools=[tool])["prompt"]
    assert "weather" in prompt
    assert posted(smol, "/detokenize", tokens=ids)["content"] == prompt
    none = posted(smol, "/tokenize", messages=HELLO, tools=[tool], tool_choice="none")["tokens"]
    assert none == posted(smol, "/tokenize", messages=HELLO)["tokens"]


def test_prompts_of_llama_cpp(smol: Running) -> None:
    given = {"n_predict": 2, "temperature": 0}
    plain = posted(smol, "/completion", prompt="One two", **given)["content"]
    text = {"prompt_string": "One two"}
    assert posted(smol, "/completion", prompt=text, **given)["content"] == plain
    ids = posted(smol, "/tokenize", content=" two")["tokens"]
    several = posted(smol, "/completion", prompt=[text, ["One", *ids], "One two"], **given)
    assert [item["content"] for item in several] == [plain] * 3


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "a", "prompt": "a"}, "content"),
        ("/tokenize", {"content": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "with_pieces": True}, "with_pieces"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/apply-template", {"messages": []}, "messages"),
        ("/completion", {}, "prompt"),
        ("/completion", {"prompt": "a", "id_slot": "3"}, "id_slot"),
        (
            "/completion",
            {"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}},
            "prompt.multimodal_data",
        ),
        ("/completion", {"prompt": "a", "n_keep": 5}, "n_keep"),
        ("/completion", {"prompt": "a", "lora": [{"id": 0}]}, "lora"),
        ("/completion", {"prompt": "a", "post_sampling_probs": 0}, "post_sampling_probs"),
        ("/completion", {"prompt": "a", "min_keep": False}, "min_keep"),
        ("/", {}, "text"),
        ("/", {"text": "a", "decoding_alg": "magic"}, "decoding_alg"),
        ("/", {"text": "a", "n": 2}, "n"),
        ("/", {"text": "a", "n_probs": 2}, "n_probs"),
        ("/", {"text": "a", "prompt_logprobs": 0}, "prompt_logprobs"),
        ("/", {"text": "a", "return_token_ids": True}, "return_token_ids"),
        ("/", {"text": "a", "timings_per_token": True}, "timings_per_token"),
        ("/", {"text": "a", "return_progress": True}, "return_progress"),
        ("/completion", {"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs"),
        ("/completion", {"prompt": "a", "return_token_ids": True}, "return_token_ids"),
        ("/v1/completions", {"prompt": "a", "n_probs": 2}, "n_probs"),
        ("/v1/chat/completions", {"messages": HELLO, "n_probs": 2}, "n_probs"),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "stream": True, "prompt_logprobs": 2},
            "prompt_logprobs",
        ),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "use_beam_search": True, "logprobs": True},
            "use_beam_search",
        ),
        ("/", {"text": "a", "encoder_input_template": "{query}"}, "encoder_input_template"),
        ("/", {"text": "a", "decoder_input_template": "{query}"}, "decoder_input_template"),
        ("/", {"text": "a", "is_streaming_mode": 5}, "is_streaming_mode"),
        ("/v1/rerank", {"query": "a", "documents": ["a", "b"]}, "model"),
        ("/score", {"text_1": "a", "text_2": "b"}, "model"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name"),
    ],
)
def test_what_is_refused(smol: Running, path: str, body: dict[str, Any], param: str) -> None:
    with smol.client() as http:
        answer = http.post(path, json=body)
    assert answer.status_code in (400, 403, 501), answer.text
    assert answer.json()["error"]["param"] == param


def test_tokens_of_a_chat(smol: Running) -> None:
    """The count equals the answer's usage."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    with smol.client() as http:
        usage = http.post("/v1/chat/completions", json=body).json()["usage"]
        for path in ("/v1/chat/completions", "/chat/completions"):
            counted = http.post(f"{path}/input_tokens", json=body)
            assert counted.json() == {"input_tokens": usage["prompt_tokens"]}


def test_a_template(smol: Running) -> None:
    prompt = posted(smol, "/apply-template", messages=HELLO)["prompt"]
    assert prompt.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    llm = smol.model().llm
    assert llm.tokenizer is not None
    assert llm.tokenizer.encode(prompt, special=False) == llm.encode_chat(HELLO)


def test_a_tokenizer_described(smol: Running) -> None:
    info = got(smol, "/tokenizer_info?model=smol")
    assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "im_start" in info["chat_template"]


def test_props_and_slots(smol: Running) -> None:
    props = got(smol, "/props")
    assert props["total_slots"] == 8
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert "im_start" in props["chat_template"]
    assert props["model_alias"] == "smol"
    slots = got(smol, "/slots?model=smol")
    assert [slot["id"] for slot in slots] == list(range(8))
    assert not any(slot["is_processing"] for slot in slots)
    body = {"prompt": "Once upon a time", "n_predict": 2000, "ignore_eos": True, "stream": True}
    with smol.client() as http, http.stream("POST", "/completion", json=body) as answer:
        lines = answer.iter_lines()  # which would close the answer if it were let go
        next(lines)
        (busy,) = [slot for slot in got(smol, "/slots") if slot["is_processing"]]
        assert busy["n_prompt_tokens"] == 4
        assert busy["next_token"]["n_remain"] > 0
        assert "Once" not in json.dumps(busy)


def test_completion_as_llama_cpp_has_it(smol: Running) -> None:
    llm = smol.model().llm
    expected = llm.generate(["One, two,"], SamplingParams(max_tokens=5))[0]
    body = {"prompt": "One, two,", "n_predict": 5, "temperature": 0}
    answer = posted(smol, "/completion", **body, return_tokens=True, n_probs=2)
    assert answer["content"] == expected.text
    assert answer["tokens"] == expected.token_ids
    assert answer["stop"]
    assert answer["stop_type"] == "limit"
    assert answer["tokens_predicted"] == 5
    assert answer["tokens_evaluated"] == 4
    assert answer["generation_settings"]["n_predict"] == 5
    assert answer["timings"]["predicted_n"] == 5
    probabilities = answer["completion_probabilities"]
    assert [probability["id"] for probability in probabilities] == expected.token_ids
    assert all(len(probability["top_logprobs"]) == 2 for probability in probabilities)
    few = posted(smol, "/completion", **body, response_fields=["content", "timings/predicted_n"])
    assert few == {"content": expected.text, "timings/predicted_n": 5}
    both = posted(smol, "/completion", **{**body, "prompt": ["One, two,", "One, two,"]})
    assert [item["content"] for item in both] == [expected.text] * 2
    ids = llm.encode("One, two,")
    mixed = posted(smol, "/completion", **{**body, "prompt": [*ids[:2], " two,"]})
    assert mixed["content"] == expected.text


def test_how_a_completion_ended(smol: Running) -> None:
    body = {"prompt": "One, two, three, four,", "temperature": 0, "n_predict": 20}
    answer = posted(smol, "/completion", **body, stop=[" six"])
    assert answer["stop_type"] == "word"
    assert answer["stopping_word"] == " six"
    chat = posted(smol, "/apply-template", messages=HELLO)["prompt"]
    answer = posted(smol, "/completion", **{**body, "prompt": chat})
    assert answer["stop_type"] == "eos"


def test_a_stream_as_llama_cpp_has_it(smol: Running) -> None:
    body = {"prompt": "One, two,", "n_predict": 5, "temperature": 0, "stream": True}
    whole = posted(smol, "/completion", **{**body, "stream": False})
    with smol.client() as http, http.stream("POST", "/completion", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    *pieces, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert not any(piece["stop"] for piece in pieces)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert last["stop"]
    assert last["content"] == ""
    assert last["tokens_predicted"] == 5


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("words", "tokens"), [(90, 400), pytest.param(300, 1200, marks=pytest.mark.soak)]
)
def test_the_progress_of_a_long_prompt(smol: Running, path: str, words: int, tokens: int) -> None:
    chat = "chat" in path
    text = " ".join(f"{path}{i}" for i in range(words))
    prompt = [1 + (i * len(path)) % 40000 for i in range(tokens)]
    asked = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": prompt}
    more = {"return_progress": True, "timings_per_token": True}
    body = {"n_predict": 24, "ignore_eos": True, "stream": True, **more, **asked}
    with smol.client() as http, http.stream("POST", path, json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    pieces = [json.loads(line[6:]) for line in lines]
    roles = [one for one in pieces if chat and "role" in one["choices"][0]["delta"]]
    assert all("timings" in one for one in pieces if one not in roles)
    found = [one.get("prompt_progress") for one in pieces]
    first = next(one for one in found if one)
    assert first["processed"] == first["cache"]
    done = [one["processed"] for one in found if one]
    assert done == sorted(done)
    assert all(chat or one["total"] == tokens for one in found if one)
    assert all(0 <= one["processed"] <= one["total"] for one in found if one)


@pytest.mark.parametrize("stream", [False, True, 0, 1, None])
def test_inferflow(smol: Running, stream: Any) -> None:
    body: dict[str, Any] = {
        "text": "Hello",
        "decoding_alg": "sample.greedy",
        "random_seed": 0,
        "temperature": 1.0,
        "max_output_len": 20,
        "header": {"fn": "x", "user": "me"},
    }
    if stream is not None:
        body["is_streaming_mode"] = stream
    with smol.client() as http:
        answer = http.post("/", json=body)
    assert answer.status_code == 200, answer.text
    pieces = [json.loads(part) for part in answer.text.split("\n\n") if part]
    assert "".join(piece["text"] for piece in pieces) == "Hello! How can I assist you today?"
    assert pieces[-1]["is_end"] == 1
    assert all("is_end" not in piece for piece in pieces[:-1])
    assert all({"text", "ret_code", "error_text", "time_cost"} <= set(piece) for piece in pieces)
    if stream in (False, 0):
        assert pieces[0]["ret_code"] == "succ"
    else:
        assert answer.headers["transfer-encoding"] == "chunked"
        assert len(pieces) > 2


def test_inferflow_with_the_beginning_of_an_answer(smol: Running) -> None:
    body = {
        "text": "Hello",
        "system_prompt": "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
        "res_prefix": "Hello! How can",
        "decoding_alg": {"name": "sample.greedy"},
        "is_streaming_mode": False,
    }
    assert posted(smol, "/", **body)["text"] == " I assist you today?"


def _even(logits: Any, tokens: Any, lengths: Any) -> Any:
    import jax.numpy as jnp

    return jnp.where(jnp.arange(logits.shape[1]) % 2 == 0, logits, -jnp.inf)


def test_named_processors(smol: Running) -> None:
    body = {"prompt": "Once", "n_predict": 6, "return_tokens": True, "logits_processors": ["even"]}
    with smol.client() as http:
        unknown = http.post("/completion", json=body)
        assert unknown.status_code == 400
        assert unknown.json()["error"]["param"] == "logits_processors"
        settings = smol.service.settings
        object.__setattr__(settings, "logits_processors", {"even": _even})
        try:
            answer = http.post("/completion", json=body).json()
        finally:
            object.__setattr__(settings, "logits_processors", {})
    assert len(answer["tokens"]) == 6
    assert not any(id % 2 for id in answer["tokens"])
    assert answer["generation_settings"]["logits_processors"] == ["even"]


def test_functions_of_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_processors.py").write_text("def same(a, b, c):\n    return a\nnumber = 5\n")
    assert named_functions(["x=own_processors:same"])["x"](1, 2, 3) == 1
    for text, says in (
        ("own_processors:same", "write NAME=MODULE:FUNCTION"),
        ("x=own_processors:other", "AttributeError"),
        ("x=no_such_module:same", "ModuleNotFoundError"),
        ("x=own_processors:number", "int is not a function"),
    ):
        with pytest.raises(SourceError, match=says):
            named_functions([text])
    with pytest.raises(SourceError, match="occurs twice"):
        named_functions(["x=own_processors:same"] * 2)


def test_probabilities_after_the_samplers(smol: Running) -> None:
    body = {"prompt": "Once", "n_predict": 2, "n_probs": 5, "post_sampling_probs": True, "seed": 1}
    filters = {"top_k": 3, "top_p": 1, "min_p": 0}
    first, _ = posted(smol, "/completion", **body, **filters)["completion_probabilities"]
    shares = [one["prob"] for one in first["top_probs"]]
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(1, abs=1e-4)
    assert first["prob"] in shares
    greedy = posted(smol, "/completion", **body, temperature=0)["completion_probabilities"]
    assert [one["prob"] for one in greedy] == [1, 1]


def test_logprobs_of_ids(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(
        model="smol", messages=[{"role": "user", "content": "Hi"}], max_tokens=2, logprobs=True,
        extra_body={"logprob_token_ids": [9, 5], "return_tokens_as_token_ids": True},
    )  # fmt: skip
    for item in answer.choices[0].logprobs.content:
        assert [top.token for top in item.top_logprobs] == ["token_id:9", "token_id:5"]
