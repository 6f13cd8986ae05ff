"""llama.cpp's tests of chats and texts (tools/server/tests/unit)."""

import json
import re
import time
from typing import Any

import openai

from tests.server.peers.served import HI, Servers, Target
from tests.server.peers.suite import Suite

LLAMA = Suite("llama.cpp")
LARGE = "wants a model of billions of parameters from the network"
MEDIA = "models here read text alone"
CHAT, TEXT, NATIVE = "test_chat_completion.py", "test_completion.py", "/completion"
LONG = [{"role": "user", "content": "word " * 9000}]


def sdk(at: Target) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{at.running.url}/v1", api_key="dummy", max_retries=0)


def said(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


@LLAMA.case("test_basic.py", 1, "health")
def _(at: Servers) -> None:
    at.chat.get("/health")


@LLAMA.case("test_basic.py", 1, "props: path, slots, context, seed")
def _(at: Servers) -> None:
    props = at.chat.get("/props")
    assert "smollm2" in props["model_path"]
    assert props["total_slots"] == 4
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] > 0


@LLAMA.case("test_basic.py", 1, "one model is listed by its alias")
def _(at: Servers) -> None:
    (item,) = at.chat.get("/models")["data"]
    assert item["id"] == "smol"


@LLAMA.case("test_basic.py", 1, "slots, without their parameters")
def _(at: Servers) -> None:
    slots = at.chat.get("/slots")
    assert len(slots) == 4
    assert slots[0]["n_ctx"] > 0
    assert "params" not in slots[0]


LLAMA.apart("test_basic.py", 1, "a set of shards", "tests/loader open such sets; no network here")
LLAMA.apart("test_basic.py", 1, "several hosts", "flags of a command: `test_run_server.py` has it")


@LLAMA.case("test_basic.py", 1, "a page, and none without it")
def _(at: Servers) -> None:
    assert "<!doctype html>" in at.chat.get("/").lower()


@LLAMA.case("test_basic.py", 1, "aliases and tags", "aliases are listed; there are no tags")
def _(at: Servers) -> None:
    (item,) = at.chat.get("/models")["data"]
    assert "gpt-4o" in item["aliases"]
    assert item["tags"] == []


@LLAMA.case(CHAT, 10, "whole answers: id, fingerprint, usage, reason, parts, templates")
def _(at: Servers) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the best book"}]
    for content in ("What is the best book", parts):
        messages = [{"role": "system", "content": "Book"}, {"role": "user", "content": content}]
        answer = at.chat.post("/chat/completions", model=None, messages=messages, max_tokens=8)
        assert "cmpl" in answer["id"]
        assert answer["system_fingerprint"]
        assert answer["usage"]["completion_tokens"] == 8
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["message"]["role"] == "assistant"


@LLAMA.case(CHAT, 1, "tokens that were cached")
def _(at: Servers) -> None:
    messages = [{"role": "user", "content": "1 2 3 4 5 6 " * 20}]
    at.chat.chat(messages=messages)
    usage = at.chat.chat(messages=messages)["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


@LLAMA.case(CHAT, 2, "streams: first role, one id, last reason without content")
def _(at: Servers) -> None:
    first, *rest = at.chat.stream("/chat/completions", messages=HI, max_tokens=8)
    delta = first["choices"][0]["delta"]
    assert delta["role"] == "assistant"
    assert not delta["content"]
    assert not any("role" in one["choices"][0]["delta"] for one in rest if one["choices"])
    assert len({one["id"] for one in rest}) == 1
    last = rest[-1]["choices"][0]
    assert last["finish_reason"] == "length"
    assert "content" not in last["delta"]


@LLAMA.case(CHAT, 3, "openai-python with any model's name; log-probabilities, also streamed")
def _(at: Servers) -> None:
    ask: dict[str, Any] = {"model": "gpt-3.5-turbo-instruct", "messages": HI, "max_tokens": 5}
    with sdk(at.chat) as client:
        made = client.chat.completions.create(**ask, temperature=0, logprobs=True, top_logprobs=10)
        choice = made.choices[0]
        assert choice.logprobs is not None
        tokens = choice.logprobs.content or []
        assert "".join(token.token for token in tokens) == choice.message.content
        assert all(token.logprob <= 0 and token.bytes and token.top_logprobs for token in tokens)
        more: dict[str, Any] = {"logprobs": True, "top_logprobs": 10, "stream": True}
        text = shown = ""
        for piece in client.chat.completions.create(**ask, temperature=0, **more):
            if piece.choices and piece.choices[0].logprobs:
                shown += "".join(item.token for item in piece.choices[0].logprobs.content or [])
                text += piece.choices[0].delta.content or ""
        assert text == shown != ""


@LLAMA.case(CHAT, 2, "verbose: what the model reads")
def _(at: Servers) -> None:
    messages = [{"role": "system", "content": "Book"}, *HI]
    assert "Book" in at.chat.chat(messages=messages, verbose=True)["__verbose"]["prompt"]
    assert "__verbose" not in at.chat.chat(messages=messages, verbose=False)


@LLAMA.case(
    CHAT,
    2,
    "an assistant's last message is begun, unasked",
    "it is, where `continue_final_message` says so; else a turn of its own, as templates have it",
)
def _(at: Servers) -> None:
    messages = [*HI, {"role": "assistant", "content": "Whill"}]
    shown = at.chat.chat(messages=messages, verbose=True)
    assert shown["__verbose"]["prompt"].endswith("Whill")


@LLAMA.case(CHAT, 2, "continue_final_message, not beside add_generation_prompt")
def _(at: Servers) -> None:
    messages = [*HI, {"role": "assistant", "content": "Whill"}]
    given = {"messages": messages, "continue_final_message": True, "verbose": True}
    shown = at.chat.chat(**given, add_generation_prompt=False)
    assert shown["__verbose"]["prompt"].endswith("<|im_start|>assistant\nWhill")
    at.chat.chat(400, **given, add_generation_prompt=True)


@LLAMA.case(CHAT, 1, "a template applied")
def _(at: Servers) -> None:
    prompt = at.chat.post("/apply-template", messages=HI)["prompt"]
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@LLAMA.case(CHAT, 8, "response_format: schemas, objects, and wrong ones")
def _(at: Servers) -> None:
    right: list[dict[str, Any]] = [
        {"type": "json_object", "schema": {"const": "42"}},
        {"type": "json_schema", "json_schema": {"schema": {"const": "foooooo"}}},
        {"type": "json_object", "schema": {"type": "array", "items": {"type": "integer"}}},
    ]
    for item in right[:2]:
        assert json.loads(said(at.chat.chat(response_format=item, max_tokens=12)))
    at.chat.chat(response_format=right[2])
    assert said(at.chat.chat(response_format={"type": "json_object"})).lstrip()[0] == "{"
    wrong: list[dict[str, Any]] = [
        {"type": "sound"},
        *({"type": "json_object", "schema": s} for s in (123, {"type": 123}, {"type": "hiccup"})),
    ]
    for item in wrong:
        assert "error" in at.chat.chat(400, response_format=item)


@LLAMA.case(CHAT, 5, "json_schema and grammar (GBNF), and one that is wrong")
def _(at: Servers) -> None:
    assert said(at.chat.chat(json_schema={"const": "42"})) == '"42"'
    assert said(at.chat.chat(grammar='root ::= "a"{5,5}')) == "aaaaa"
    at.chat.chat(400, grammar="root ::= this is (not valid GBNF")


@LLAMA.case(CHAT, 7, "messages that are wrong")
def _(at: Servers) -> None:
    some: list[Any] = [None, "text", [123], [{}], [{"role": 123}]]
    some += [[{"role": "system", "content": 123}], [{"role": "system", "content": "a"}, {}]]
    for messages in some:
        assert "error" in at.chat.post("/chat/completions", 400, messages=messages)


@LLAMA.case(
    CHAT, 1, "two assistant messages at the end are refused", "a template has them as they are"
)
def _(at: Servers) -> None:
    twice = [{"role": "assistant", "content": "a"}] * 2
    at.chat.chat(400, messages=[*HI, *twice])


@LLAMA.case(CHAT, 1, "timings in pieces")
def _(at: Servers) -> None:
    given = {"stream_options": {"include_usage": True}, "timings_per_token": True}
    first, *_, last = at.chat.stream("/chat/completions", messages=HI, max_tokens=8, **given)
    assert "timings" not in first
    assert last["choices"] == []
    assert {"prompt_per_second", "predicted_per_second"} <= last["timings"].keys()
    assert last["timings"]["predicted_n"] <= 8


@LLAMA.case(CHAT, 1, "logit_bias by ids")
def _(at: Servers) -> None:
    ids = at.chat.post("/tokenize", content=" the a is it and")["tokens"]
    biased = at.chat.chat(logit_bias={str(id): -100 for id in ids}, temperature=0, max_tokens=32)
    assert not re.search(r" (the|a|is|it|and) ", said(biased))


@LLAMA.case(
    CHAT,
    2,
    "a context that is full: type and counts in the error",
    "a 400 in OpenAI's words (`context_length_exceeded`), with the counts in its message",
)
def _(at: Servers) -> None:
    error = at.chat.chat(400, messages=LONG)["error"]
    assert error["type"] == "exceed_context_size_error"


@LLAMA.case(CHAT, 2, "progress of a long prompt")
def _(at: Servers) -> None:
    messages = [{"role": "user", "content": f"{time.time()} this is a test " * 60}]
    for _ in range(2):
        pieces = at.chat.stream(
            "/chat/completions", messages=messages, max_tokens=2, return_progress=True
        )
        shown = [piece["prompt_progress"] for piece in pieces if "prompt_progress" in piece]
        assert shown[0]["cache"] == shown[0]["processed"] < shown[0]["total"]
    assert shown[0]["cache"] > 0


@LLAMA.case(CHAT, 1, "several answers on a slot that is named")
def _(at: Servers) -> None:
    for _ in range(2):
        assert len(at.chat.chat(n=2, id_slot=0)["choices"]) == 2


@LLAMA.case(CHAT, 1, "the tokens of a conversation are counted")
def _(at: Servers) -> None:
    assert at.chat.post("/chat/completions/input_tokens", messages=HI)["input_tokens"] > 5


@LLAMA.case(TEXT, 2, "whole and streamed: counts, tokens, reasons, settings")
def _(at: Servers) -> None:
    whole = at.chat.native(return_tokens=True)
    assert whole["timings"]["predicted_n"] == 8
    assert whole["timings"]["prompt_n"] + whole["timings"]["cache_n"] == whole["tokens_evaluated"]
    assert whole["truncated"] is False
    assert isinstance(whole["has_new_line"], bool)
    assert all(isinstance(item, int) for item in whole["tokens"])
    assert at.chat.native()["tokens"] == []
    *pieces, last = at.chat.stream(NATIVE, prompt="Once upon a time", n_predict=8)
    assert all(piece["stop"] is False and piece["tokens"] for piece in pieces)
    assert (last["stop"], last["stop_type"]) == (True, "limit")
    settings = last["generation_settings"]
    assert settings["n_predict"] == 8
    assert "seed" in settings


@LLAMA.case(TEXT, 2, "settings of the adaptive sampler, which is off")
def _(at: Servers) -> None:
    assert "adaptive_target" in at.chat.native()["generation_settings"]


@LLAMA.case(TEXT, 1, "a stream has the text of the whole")
def _(at: Servers) -> None:
    given = {"prompt": "The meaning of life is", "n_predict": 8, "temperature": 0}
    pieces = at.chat.stream(NATIVE, **given)
    assert "".join(piece["content"] for piece in pieces) == at.chat.native(**given)["content"]


@LLAMA.case(TEXT, 2, "openai-python, whole and streamed, any model's name")
def _(at: Servers) -> None:
    with sdk(at.chat) as client:
        ask: dict[str, Any] = {"model": "davinci-002", "prompt": "Life is", "max_tokens": 8}
        whole = client.completions.create(**ask)
        assert whole.choices[0].finish_reason == "length"
        assert whole.system_fingerprint
        pieces = client.completions.create(**ask, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces)


LLAMA.apart(TEXT, 1, "stop texts of a large model", LARGE)
LLAMA.apart(TEXT, 1, "cached and computed prompts alike", "they skip it")


@LLAMA.case(TEXT, 6, "the same with the same seed, another with another one")
def _(at: Servers) -> None:
    def drawn(**more: Any) -> str:
        return str(at.chat.native(n_predict=16, cache_prompt=False, **more)["content"])

    assert len({drawn(seed=42, temperature=0) for _ in range(3)}) == 1
    assert len({drawn(seed=seed, temperature=1.0) for seed in range(4)}) > 1
    assert drawn(seed=3, temperature=1.0) == drawn(seed=3, temperature=1.0)


@LLAMA.case(TEXT, 3, "prompts that are too long, objects, media")
def _(at: Servers) -> None:
    at.chat.native(400, prompt="word " * 9000, cache_prompt=False)
    at.chat.native(prompt={"prompt_string": "Life is"})
    at.chat.native(400, prompt={"prompt_string": "<__media__>", "multimodal_data": ["iVBO"]})


@LLAMA.case(TEXT, 1, "ids, lists, objects, and mixtures of them")
def _(at: Servers) -> None:
    ids = at.chat.post("/tokenize", content="Life is", add_special=True)["tokens"]
    assert isinstance(at.chat.native(prompt=ids)["content"], str)
    for mixed in ([ids, ids], [ids, "Life is"], [ids, {"prompt_string": "Life is"}]):
        one, two = at.chat.native(prompt=mixed, temperature=0)
        assert one["content"] == two["content"]
    assert isinstance(at.chat.native(prompt=[1, 2, "a", 3, "b"])["content"], str)


@LLAMA.case(TEXT, 5, "more requests than slots")
def _(at: Servers) -> None:
    answers = at.chat.native(prompt=["a", "b", "c", "d", "e", "f"], seed=42)
    assert len(answers) == 6
    assert sum(item["is_processing"] for item in at.chat.get("/slots")) == 0


LLAMA.apart(TEXT, 4, "requests that overflow a common cache", "blocks are preempted, none fails")


@LLAMA.case(TEXT, 2, "response_fields: some of the answer")
def _(at: Servers) -> None:
    expected = ["content", "generation_settings/n_predict", "prompt"]
    assert at.chat.native(response_fields=expected).keys() == set(expected)


@LLAMA.case(TEXT, 4, "probabilities: before and after the samplers, also streamed")
def _(at: Servers) -> None:
    given = {"n_probs": 10, "n_predict": 5}
    known = at.chat.native(**given, temperature=0)["completion_probabilities"]
    assert len(known) == 5
    for item in known:
        assert item["logprob"] <= 0
        assert isinstance(item["bytes"], list)
        assert len(item["top_logprobs"]) == 10
    pieces = at.chat.stream(NATIVE, prompt="a", **given, temperature=0)
    assert all(len(piece["completion_probabilities"]) == 1 for piece in pieces[:-1])
    after = at.chat.native(**given, temperature=1.0, post_sampling_probs=True)
    for item in after["completion_probabilities"]:
        assert 0 < item["prob"] <= 1
        assert all(0 < top["prob"] <= 1 for top in item["top_probs"])


@LLAMA.case(TEXT, 4, "logit_bias of ids and texts, as pairs and as an object")
def _(at: Servers) -> None:
    ids = at.chat.post("/tokenize", content=" the a")["tokens"]
    pairs: list[list[Any]] = [[id, -100] for id in ids]
    for bias in (pairs, {str(id): -100 for id in ids}, [[" the ", -100]], {" the ": -100}):
        answer = at.chat.native(logit_bias=bias, n_predict=32, temperature=0)
        assert " the " not in answer["content"]


@LLAMA.case(TEXT, 1, "a client that goes frees its slot")
def _(at: Servers) -> None:
    with at.chat.running.client() as http:
        body = {"prompt": "a", "n_predict": -1, "stream": True, "ignore_eos": True}
        with http.stream("POST", NATIVE, json=body) as answer:
            next(answer.iter_lines())
    end = time.monotonic() + 5
    while any(item["is_processing"] for item in at.chat.get("/slots")):
        assert time.monotonic() < end
        time.sleep(0.05)


@LLAMA.case(TEXT, 1, "prompts in and out of the cache")
def _(at: Servers) -> None:
    for number in (0, 1, 0, 2, 1, 0):
        answer = at.chat.native(prompt=f" Hello {number}" * (40 + number), n_predict=3)
        timings = answer["timings"]
        assert timings["prompt_n"] + timings["cache_n"] == answer["tokens_evaluated"]
        assert timings["predicted_n"] == 3


@LLAMA.case("test_compat_oai_responses.py", 2, "openai-python's responses")
def _(at: Servers) -> None:
    with sdk(at.chat) as client:
        made = client.responses.create(model="gpt-4.1", input="Hi", max_output_tokens=8)
        assert made.id.startswith("resp_")
        assert (made.output[0].id or "").startswith("msg_")
        events = list(
            client.responses.create(model="gpt-4.1", input="Hi", max_output_tokens=8, stream=True)
        )
        text = "".join(
            event.delta for event in events if event.type == "response.output_text.delta"
        )
        assert text == events[-1].response.output_text  # type: ignore[union-attr]


@LLAMA.case(
    "test_compat_oai_responses.py", 1, "progress and timings", "responses have no place for them"
)
def _(at: Servers) -> None:
    more = {"timings_per_token": True, "return_progress": True}
    at.chat.post("/v1/responses", input="Hi", max_output_tokens=4, **more)
