"""vLLM's tests of responses, messages, tokens, metrics, keys and adapters (tests/entrypoints)."""

import json
import time
from typing import Any

from tests.server.peers.llama_messages import TOOLS
from tests.server.peers.llama_routes import cors
from tests.server.peers.served import HI, KEY, TOOL, Servers
from tests.server.peers.vllm_chat import LARGE, OWN, VLLM

RESPONSES = "/v1/responses"
FLAT = {"type": "function", **TOOL["function"]}
PAIRS = {
    "response.output_item.done": "response.output_item.added",
    "response.content_part.done": "response.content_part.added",
}


def response(at: Servers, status: int = 200, /, **body: Any) -> Any:
    return at.chat.post(RESPONSES, status, **{"input": "Hi", "max_output_tokens": 16, **body})


@VLLM.case(
    "responses/test_basic.py", 6, "texts, instructions, turns, parts, log-probabilities, streams"
)
def _(at: Servers) -> None:
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Hello!"}]}]
    turns = [{"role": "system", "content": "Be brief."}, *HI]
    for given in ({"input": parts}, {"input": turns}, {"instructions": "Be brief."}):
        assert response(at, **given)["output"][-1]["type"] == "message"
    logged = response(at, include=["message.output_text.logprobs"], top_logprobs=5)
    assert len(logged["output"][-1]["content"][-1]["logprobs"][0]["top_logprobs"]) == 5
    kinds = [item["type"] for item in at.chat.stream(RESPONSES, input="Hi", max_output_tokens=300)]
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds
    assert kinds[-1] in ("response.completed", "response.incomplete")


CALLS = "responses/test_function_call.py"


@VLLM.case(CALLS, 4, "calls: required, named, and their outputs; a limit that is too low")
def _(at: Servers) -> None:
    named = {"type": "function", "name": "look"}
    for choice in ("required", named):
        more = {"tool_choice": choice, "parallel_tool_calls": False}
        made = response(at, tools=[FLAT], max_output_tokens=80, **more)
        (call,) = (item for item in made["output"] if item["type"] == "function_call")
        assert json.loads(call["arguments"])["place"] in ("Rome", "Oslo")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny"}
    response(at, input=[*HI, call, output])
    cut = response(at, tools=[FLAT], tool_choice="required", max_output_tokens=1)
    assert cut["incomplete_details"]["reason"] == "max_output_tokens"


@VLLM.case(CALLS, 9, "calls as events: each begun and ended, arguments as in the item")
def _(at: Servers) -> None:
    given: dict[str, Any] = {"input": "Hi", "tools": [FLAT], "max_output_tokens": 80}
    given |= {"tool_choice": "required", "parallel_tool_calls": False}
    events = at.chat.stream(RESPONSES, **given)
    opened: list[str] = []
    for event in events:
        if event["type"] in PAIRS.values():
            opened.append(event["type"])
        elif event["type"] in PAIRS:
            assert opened.pop() == PAIRS[event["type"]]
    assert not opened
    deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    (done,) = (e for e in events if e["type"] == "response.function_call_arguments.done")
    assert "".join(deltas) == done["arguments"]


VLLM.apart(CALLS, 1, "two calls of a model's own", LARGE)
SIMPLE = "responses/test_simple.py"


@VLLM.case(SIMPLE, 7, "effort, reasoning items, streams, limits, sampling")
def _(at: Servers) -> None:
    response(at, reasoning={"effort": "none"})
    thought: dict[str, Any] = {"type": "reasoning", "id": "r", "summary": []}
    thought["content"] = [{"type": "reasoning_text", "text": "I greet."}]
    response(at, input=[{"type": "message", **HI[0]}, thought])
    events = at.chat.stream(RESPONSES, input="Hi", max_output_tokens=300)
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert events[-1]["response"]["output"][-1]["content"][0]["text"] == text
    logged = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    for item in at.chat.stream(RESPONSES, input="Hi", max_output_tokens=8, **logged):
        if item["type"] == "response.output_text.delta":
            assert all(item["logprob"] <= 0 for item in item["logprobs"])
            assert all(len(item["top_logprobs"]) == 3 for item in item["logprobs"])
    cut = response(at, max_output_tokens=3, reasoning={"effort": "low"})
    assert (cut["status"], cut["incomplete_details"]["reason"]) == (
        "incomplete",
        "max_output_tokens",
    )
    response(at, temperature=0.7, top_p=0.9, top_k=40, repetition_penalty=1.2, seed=42)


@VLLM.case(SIMPLE, 2, "tokens of thoughts in usage")
def _(at: Servers) -> None:
    given = {"input": "Hi", "max_output_tokens": 24, "thinking_token_budget": 4}
    usage = at.thinks.post(RESPONSES, **given)["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0


@VLLM.case(SIMPLE, 1, "enable_response_messages", "the prompt is shown by /apply-template")
def _(at: Servers) -> None:
    assert response(at, enable_response_messages=True)["input_messages"]


@VLLM.case("responses/test_stateful.py", 7, "stored, in the background, cancelled, continued")
def _(at: Servers) -> None:
    first = response(at)
    assert at.chat.get(f"{RESPONSES}/{first['id']}")["id"] == first["id"]
    unkept = response(at, store=False)
    at.chat.get(f"{RESPONSES}/{unkept['id']}", 404)
    for _ in range(2):
        response(at, previous_response_id=first["id"])
    response(at, 400, background=True, store=False)
    at.chat.post(f"{RESPONSES}/{first['id']}/cancel", 400)
    begun = response(at, background=True, max_output_tokens=3000, ignore_eos=True)
    assert begun["status"] in ("queued", "in_progress")
    path = f"{RESPONSES}/{begun['id']}"
    assert at.chat.post(f"{path}/cancel")["status"] == "cancelled"
    assert at.chat.get(path)["status"] == "cancelled"
    short = response(at, background=True, max_output_tokens=2)
    end = time.monotonic() + 10
    while at.chat.get(f"{RESPONSES}/{short['id']}")["status"] in ("queued", "in_progress"):
        assert time.monotonic() < end
        time.sleep(0.05)


@VLLM.case("responses/test_structured_output.py", 2, "text.format with a schema")
def _(at: Servers) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
    }
    schema["additionalProperties"] = False
    format = {"type": "json_schema", "name": "event", "schema": schema, "strict": True}
    made = response(at, text={"format": format}, max_output_tokens=60)
    assert json.loads(made["output"][-1]["content"][0]["text"])["a"] in (1, 2)


IDS = "test_return_token_ids.py"


@VLLM.case(IDS, 6, "ids of prompts and answers, whole and streamed; with log-probabilities")
def _(at: Servers) -> None:
    more = {"return_token_ids": True, "return_tokens_as_token_ids": True, "temperature": 0}
    choice = at.chat.text(prompt="I love coding 🚀", echo=True, logprobs=1, **more)["choices"][0]
    shown = [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
    assert shown == choice["prompt_token_ids"] + choice["token_ids"]
    chat = at.chat.chat(return_token_ids=True, tools=[TOOL])
    assert chat["prompt_token_ids"]
    assert chat["choices"][0]["token_ids"]
    assert "token_ids" not in at.chat.chat(return_token_ids=False)["choices"][0]
    pieces = at.chat.stream(
        "/v1/chat/completions", messages=HI, max_tokens=4, return_token_ids=True
    )
    assert pieces[0]["prompt_token_ids"]
    assert not any("prompt_token_ids" in piece for piece in pieces[1:])
    assert sum(len(piece["choices"][0].get("token_ids", ())) for piece in pieces) >= 4


@VLLM.case("test_return_tokens_as_ids.py", 2, "tokens by their ids")
def _(at: Servers) -> None:
    more = {"return_tokens_as_token_ids": True, "temperature": 0}
    choice = at.chat.text(prompt="Say '🎉'", echo=True, logprobs=1, **more)["choices"][0]
    tokens = choice["logprobs"]["tokens"]
    ids = [int(token.removeprefix("token_id:")) for token in tokens]
    assert at.chat.post("/detokenize", tokens=ids)["content"] == choice["text"]


VLLM.apart("test_return_tokens_as_ids.py", 2, "for all requests", "a flag of vLLM's")
VLLM.apart("test_return_tokens_as_ids.py", 1, "the same of responses", OWN)


@VLLM.case(
    "test_openai_schema.py", 2, "the description is kept to: `test_the_description_is_kept_to`"
)
def _(at: Servers) -> None:
    described = at.chat.get("/openapi.json")
    content = described["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert {"application/json", "text/event-stream"} <= content.keys()


MESSAGES = "anthropic/test_messages.py"


@VLLM.case(MESSAGES, 6, "messages, streams, tools, schemas")
def _(at: Servers) -> None:
    given = {"messages": HI, "max_tokens": 16}
    assert at.chat.post("/v1/messages", **given, system="Be brief.")["role"] == "assistant"
    begun = at.chat.stream("/v1/messages", **given)[0]["message"]["usage"]
    assert begun["output_tokens"] == 0
    choice = {"type": "tool", "name": "look"}
    used = at.chat.post(
        "/v1/messages", **given | {"max_tokens": 80}, tools=TOOLS, tool_choice=choice
    )
    assert used["stop_reason"] in ("tool_use", "max_tokens")
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
    }
    schema["additionalProperties"] = False
    config = {"format": {"type": "json_schema", "schema": schema}}
    made = at.chat.post("/v1/messages", **given | {"max_tokens": 60}, output_config=config)
    assert json.loads(made["content"][0]["text"]) == {"a": 1}


@VLLM.case(MESSAGES, 1, "tokens that were put into a cache", "all are, so the count is 0")
def _(at: Servers) -> None:
    long = [{"role": "user", "content": f"{time.time()} sentinel " * 128}]
    usage = at.chat.post("/v1/messages", messages=long, max_tokens=1)["usage"]
    assert usage["cache_creation_input_tokens"] > 0


TOKENS = "serve/tokenize/test_tokenization.py"


@VLLM.case(
    TOKENS, 9, "texts, conversations, tools, strings of tokens, there and back, the tokenizer"
)
def _(at: Servers) -> None:
    for special in (False, True):
        item = at.chat.post("/tokenize", prompt="vllm1 This is a test.", add_special_tokens=special)
        assert item["count"] == len(item["tokens"])
        assert item["max_model_len"] > 0
        assert item["token_strs"] is None
    for tools in (None, [TOOL]):
        for begin in (False, True):
            at.chat.post("/tokenize", messages=HI, tools=tools, add_generation_prompt=begin)
    shown = at.chat.post("/tokenize", prompt="a test!", return_token_strs=True)
    assert len(shown["token_strs"]) == shown["count"]
    assert at.chat.post("/detokenize", tokens=shown["tokens"])["prompt"] == "a test!"
    info = at.chat.get("/tokenizer_info")
    assert info["tokenizer_class"]
    assert info["chat_template"].strip()


BASIC = "serve/instrumentator/test_basic.py"


@VLLM.case(BASIC, 3, "version, health, requests whose clients have gone")
def _(at: Servers) -> None:
    assert at.chat.get("/version")["version"]
    at.chat.get("/health")


@VLLM.case(BASIC, 1, "bodies of another type are refused", "JSON is read whatever it is called")
def _(at: Servers) -> None:
    at.chat.chat(400, headers={"content-type": "application/x-www-form-urlencoded"})


@VLLM.case(BASIC, 1, "`/load`")
def _(at: Servers) -> None:
    assert at.chat.get("/load") == {"server_load": 0}


VLLM.apart(BASIC, 1, "an engine that died", OWN)
METRICS = "serve/instrumentator/test_metrics.py"


@VLLM.case(METRICS, 6, "counts of requests and tokens; gauges go back (names with jinfer:)")
def _(at: Servers) -> None:
    at.chat.text()
    text = at.chat.get("/metrics")
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens_total"),
        *("generation_tokens_total", "request_success_total", "time_to_first_token_seconds"),
        *("inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds"),
        "request_decode_time_seconds",
    ):
        assert f"jinfer:{name}" in text
    end = time.monotonic() + 5
    while 'num_requests_running{model_name="smol"} 0.0' not in at.chat.get("/metrics"):
        assert time.monotonic() < end


@VLLM.case(METRICS, 3, "histograms of requests' parameters, the cache's size", "not all of vLLM's")
def _(at: Servers) -> None:
    assert "request_params_max_tokens" in at.chat.get("/metrics")


VLLM.apart(METRICS, 10, "images; hidden metrics; a batch command", "vLLM's own")
VLLM.apart("serve/instrumentator/test_orca_metrics.py", 2, "load in headers (ORCA)", "for Envoy")


@VLLM.case("serve/instrumentator/test_orca_metrics.py", 1, "a text, with its usage")
def _(at: Servers) -> None:
    assert at.chat.text(max_tokens=5)["usage"]["completion_tokens"] == 5


VLLM.apart("serve/instrumentator/test_uds.py", 1, "a Unix socket", "a flag: `test_run_server.py`")


@VLLM.case("serve/middleware/test_cors_middleware.py", 2, "other origins may not, named ones may")
def _(at: Servers) -> None:
    assert "access-control-allow-origin" not in cors(at.chat, "http://attacker.example")
    named = "http://localhost:8080"
    assert cors(at.keyed, named)["access-control-allow-origin"] == named


@VLLM.case("serve/middleware/test_optional_middleware.py", 6, "keys; request ids, also own ones")
def _(at: Servers) -> None:
    at.chat.get("/v1/models")
    at.keyed.get("/v1/models", 401)
    at.keyed.get("/v1/models", authorization=f"Bearer {KEY}")
    at.keyed.get("/health")
    with at.chat.running.client() as http:
        assert len(http.get("/health").headers["x-request-id"]) == 32
        own = http.get("/health", headers={"X-Request-Id": "Custom"})
        assert own.headers["x-request-id"] == "Custom"


VLLM.apart(
    "serve/middleware/test_optional_middleware.py", 1, "no ids unasked", "ids are always there"
)


@VLLM.case("serve/middleware/test_optional_middleware.py", 2, "`/v2/embed` needs the key")
def _(at: Servers) -> None:
    at.keyed.post("/v2/embed", 401, texts=["a"])
    at.vectors.post("/v2/embed", texts=["a"], embedding_types=["float"])


VLLM.apart("serve/middleware/test_authentication_middleware.py", 2, "routes by task", OWN)
LORA = "serve/lora/test_lora_adapters.py"


def load(at: Servers, status: int = 200, /, **more: Any) -> Any:
    return at.adapted.post("/v1/load_lora_adapter", status, **more)


@VLLM.case(
    LORA, 6, "adapters: their models, loaded, twice, beside requests, with beams; wrong files"
)
def _(at: Servers) -> None:
    path = str(at.folder / "adapter")
    load(at, lora_name="b", lora_path=path)
    listed = at.adapted.get("/v1/models")["data"]
    assert (listed[-1]["id"], listed[-1]["parent"]) == ("b", "tiny")
    load(at, 400, lora_name="b", lora_path=path)
    at.adapted.text(model="b", prompt=[5, 6], use_beam_search=True)
    broken = at.folder / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "adapter_config.json").write_text("no json")
    load(at, 400, lora_name="c", lora_path=str(broken))
    at.adapted.text(model="a", prompt=[5, 6])
    at.adapted.post("/v1/unload_lora_adapter", lora_name="b")


@VLLM.case(LORA, 1, "a folder that is not there: 404", "400: it is a field that is wrong")
def _(at: Servers) -> None:
    load(at, 404, lora_name="x", lora_path="/not/an/adapter")


VLLM.apart(LORA, 4, "ranks, DoRA, PiSSA that vLLM refuses", "DoRA is computed; `test_adapters.py`")


@VLLM.case(LORA, 1, "load_inplace", "unloaded and loaded again")
def _(at: Servers) -> None:
    path = str(at.folder / "adapter")
    load(at, lora_name="a", lora_path=path, load_inplace=True)


@VLLM.case(LORA, 1, "more adapters than places: the least recently used leaves", "they are refused")
def _(at: Servers) -> None:
    for number in range(4):
        load(at, lora_name=f"many{number}", lora_path=str(at.folder / "adapter"))


VLLM.apart(
    "generate, decisions", 21, "`/generative_scoring`, `/v1/decisions`", "experiments of vLLM's"
)
