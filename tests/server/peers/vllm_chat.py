"""vLLM's tests of chats and texts (tests/entrypoints/openai)."""

import json
from typing import Any

from tests.server.peers.llama_chat import said
from tests.server.peers.served import HI, TOOL, Servers
from tests.server.peers.suite import Suite

VLLM = Suite("vLLM")
OWN = "asks vLLM's Python classes, no server"
LARGE = "wants what a larger model says"
CHAT = "chat_completion/test_chat.py"
USAGE = {"include_usage": True}
BOTH = {"include_usage": True, "continuous_usage_stats": True}
BAD_SCHEMA = {"type": "object", "properties": {"foo": "bar"}}
BAD_GRAMMAR = 'root ::= "SELECT " nothing_there'


def logged(answer: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"]
    return found


def counted(pieces: list[dict[str, Any]]) -> None:
    """Continuous usage: sums are right, and tokens only grow."""
    tokens = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert tokens == sorted(tokens)
    for piece in pieces:
        known = piece["usage"]
        assert known["total_tokens"] == known["prompt_tokens"] + known["completion_tokens"]


@VLLM.case(CHAT, 6, "log-probabilities: none, none of others, five")
def _(at: Servers) -> None:
    assert at.chat.chat(logprobs=False)["choices"][0]["logprobs"] is None
    for limit in (0, 5):
        answer = at.chat.chat(logprobs=True, top_logprobs=limit)
        assert len(logged(answer)[0]["top_logprobs"]) == limit


@VLLM.case(CHAT, 2, "more than 20 of them are refused")
def _(at: Servers) -> None:
    at.chat.chat(400, logprobs=True, top_logprobs=21, stream=True)
    at.chat.chat(400, logprobs=True, top_logprobs=30)
    at.chat.chat()


@VLLM.case(CHAT, 5, "prompt_logprobs: 0, 1, 2; -1 is refused; none")
def _(at: Servers) -> None:
    for limit in (0, 1, 2):
        shown = at.chat.chat(prompt_logprobs=limit)["prompt_logprobs"]
        assert shown[0] is None
        assert max(limit, 1) <= len(shown[3]) <= limit + 1
    at.chat.chat(400, prompt_logprobs=-1)
    assert "prompt_logprobs" not in at.chat.chat()


@VLLM.case(CHAT, 4, "a session of two turns; streams like the whole")
def _(at: Servers) -> None:
    first = at.chat.chat(temperature=0)
    usage = first["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    turns = [*HI, first["choices"][0]["message"], {"role": "user", "content": "And?"}]
    assert isinstance(said(at.chat.chat(messages=turns)), str)
    pieces = at.chat.stream("/v1/chat/completions", messages=HI, max_tokens=8, temperature=0)
    assert "".join(p["choices"][0]["delta"].get("content") or "" for p in pieces) == said(first)
    assert sum(p["choices"][0]["finish_reason"] is not None for p in pieces) == 1


@VLLM.case(CHAT, 2, "stream_options, and none without a stream")
def _(at: Servers) -> None:
    path, given = "/v1/chat/completions", {"messages": HI, "max_tokens": 8}
    none = at.chat.stream(path, **given, stream_options={"include_usage": False})
    assert all(item.get("usage") is None for item in none)
    *pieces, last = at.chat.stream(path, **given, stream_options=USAGE)
    assert all(piece["usage"] is None for piece in pieces)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)
    at.chat.chat(400, stream_options=USAGE)
    counted(at.chat.stream(path, **given, stream_options=BOTH, min_tokens=8))


@VLLM.case(CHAT, 5, "choices, schemas, regexes; wrong types; with log-probabilities")
def _(at: Servers) -> None:
    choices = ["Python", "Rust"]
    answer = at.chat.chat(structured_outputs={"choice": choices}, logprobs=True, top_logprobs=5)
    assert said(answer) in choices
    assert all(top["logprob"] >= -9999 for top in logged(answer)[0]["top_logprobs"])
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
    }
    schema["additionalProperties"] = False
    bound = at.chat.chat(structured_outputs={"json": schema}, max_tokens=40)
    assert json.loads(said(bound))["a"] in (1, 2)
    assert said(at.chat.chat(structured_outputs={"regex": "[0-9]{3}"})).isdecimal()
    at.chat.chat(400, structured_outputs={"regex": {"1": "Python"}})


VLLM.apart(CHAT, 3, "what the model says: 1+1 is 2", LARGE)


@VLLM.case(CHAT, 1, "response_format text")
def _(at: Servers) -> None:
    at.chat.chat(response_format={"type": "text"})


@VLLM.case(CHAT, 1, "custom roles", "only those that the template names")
def _(at: Servers) -> None:
    at.chat.chat(messages=[{"role": "my-own", "content": "Hi"}])


@VLLM.case(CHAT, 1, "unknown fields of messages", "refused by name, but in answers given back")
def _(at: Servers) -> None:
    at.chat.chat(messages=[{**HI[0], "extra_field": "0"}])


@VLLM.case(CHAT, 1, "seeds beyond 64 bits are refused", "a seed is any of 64 bits without a sign")
def _(at: Servers) -> None:
    for seed in (2**63, -(2**63) - 1):
        at.chat.chat(400, seed=seed)


@VLLM.case(CHAT, 1, "`/invocations`")
def _(at: Servers) -> None:
    at.chat.post("/invocations", messages=HI)


@VLLM.case(CHAT, 4, "several answers: whole, streamed, with a seed, one")
def _(at: Servers) -> None:
    three = at.chat.chat(n=3, seed=42, temperature=1.0, max_tokens=24)["choices"]
    assert [one["index"] for one in three] == [0, 1, 2]
    assert len({one["message"]["content"] for one in three}) > 1
    pieces = at.chat.stream("/v1/chat/completions", messages=HI, max_tokens=8, n=2)
    assert {one["choices"][0]["index"] for one in pieces} == {0, 1}
    assert len(at.chat.chat(n=1)["choices"]) == 1


VLLM.apart(CHAT, 11, "parameters of a request class", OWN)
MORE = "chat_completion/test_chat_completion.py"


@VLLM.case(MORE, 4, "schemas, regexes and grammars that are wrong, or empty")
def _(at: Servers) -> None:
    for wrong in ({"json": BAD_SCHEMA}, {"regex": "[.*"}, {"grammar": BAD_GRAMMAR}):
        at.chat.chat(400, structured_outputs=wrong)
        at.chat.text(400, structured_outputs=wrong)
    at.chat.chat(400, structured_outputs={"grammar": ""})


VLLM.apart(MORE, 2, "ids from another server", "prefill and decoding are one process here")


@VLLM.case(MORE, 2, "`metrics` in answers", "`timings` have the same times, in llama.cpp's form")
def _(at: Servers) -> None:
    assert "metrics" in at.chat.chat()


@VLLM.case(
    "chat_completion/test_chat_echo.py",
    1,
    "echo of a message that is begun",
    "the answer is what is new",
)
def _(at: Servers) -> None:
    begun = [*HI, {"role": "assistant", "content": "An apple"}]
    at.chat.chat(messages=begun, echo=True, continue_final_message=True)


@VLLM.case("chat_completion/test_chat_echo.py", 1, "a message that is begun, without echo")
def _(at: Servers) -> None:
    begun = [*HI, {"role": "assistant", "content": "An apple a day, keeps"}]
    answer = at.chat.chat(
        messages=begun, echo=False, continue_final_message=True, add_generation_prompt=False
    )
    assert "An apple a day" not in said(answer)


@VLLM.case(
    "chat_completion/test_chat_echo.py",
    2,
    "log-probabilities of the whole vocabulary (-1)",
    "at most 20",
)
def _(at: Servers) -> None:
    at.chat.chat(logprobs=True, top_logprobs=-1)


@VLLM.case(
    "chat_completion/test_chat_logit_bias_validation.py", 4, "ids that are, are not, or are none"
)
def _(at: Servers) -> None:
    at.chat.chat(logit_bias={"49151": 1.0})
    error = at.chat.chat(400, logit_bias={"49153": 1.0})["error"]["message"]
    assert "49153" in error
    at.chat.chat(400, logit_bias={"1": "not_a_number"})


@VLLM.case(
    "chat_completion/test_chat_logit_bias_validation.py",
    1,
    "keys that are no ids are refused together",
    "a key is a text, too, as in llama.cpp",
)
def _(at: Servers) -> None:
    at.chat.chat(400, logit_bias={"bad1": 50.0, "bad2": 20.0})


@VLLM.case("chat_completion/test_root_path.py", 2, "keys, right and wrong")
def _(at: Servers) -> None:
    at.keyed.text(401, prompt=[5], headers={"authorization": "Bearer abc"})
    at.keyed.text(prompt=[5], headers={"authorization": "Bearer sk-own"})


@VLLM.case("chat_completion/test_root_path.py", 2, "--root-path", "a proxy strips its prefix")
def _(at: Servers) -> None:
    at.chat.post("/llm/v1/chat/completions", messages=HI)


VLLM.apart(
    "chat_completion/test_enable_force_include_usage.py", 1, "usage unasked", "a flag of vLLM's"
)
VLLM.apart("chat_completion/test_extra_content_fields.py", 2, "TranslateGemma", LARGE)
TOKENS = "chat_completion/test_logprob_token_ids.py"
VLLM.apart(TOKENS, 4, "parameters of a request class", OWN)


@VLLM.case(TOKENS, 5, "log-probabilities of ids, of what is drawn, and the usual ones; streamed")
def _(at: Servers) -> None:
    more = {"logprobs": True, "return_tokens_as_token_ids": True, "allowed_token_ids": [42]}
    for expected in ([5000], [100, 1000, 5000]):
        answer = at.chat.chat(logprob_token_ids=expected, max_tokens=1, **more)
        (entry,) = logged(answer)
        assert entry["token"] == "token_id:42"
        ids = {int(top["token"].removeprefix("token_id:")) for top in entry["top_logprobs"]}
        assert set(expected) <= ids <= {*expected, 42}
    at.chat.stream(
        "/v1/chat/completions", messages=HI, max_tokens=1, logprob_token_ids=[5000], **more
    )
    assert len(logged(at.chat.chat(logprobs=True, top_logprobs=5))[0]["top_logprobs"]) == 5


THINK = "chat_completion/test_thinking_token_budget.py"


@VLLM.case(THINK, 6, "budgets of thought, beside requests without one; thinking off")
def _(at: Servers) -> None:
    given = {"thinking_token_budget": 5, "return_token_ids": True, "max_tokens": 40}
    answer = at.thinks.chat(**given)
    assert answer["choices"][0]["message"]["reasoning_content"] is not None
    assert at.thinks.chat(max_tokens=16)["choices"][0]["message"]
    assert said(at.chat.chat(chat_template_kwargs={"enable_thinking": False}))


VLLM.apart(THINK, 1, "Qwen 3.5 on two GPUs", "no GPUs here")


@VLLM.case(
    "chat_completion/test_thinking_token_budget_validation.py", 10, "budgets that are wrong, -1"
)
def _(at: Servers) -> None:
    for wrong in (-2, 0.6, 10.5):
        at.thinks.chat(400, thinking_token_budget=wrong)
        at.thinks.text(400, thinking_token_budget=wrong)
    for right in (10, -1):
        at.thinks.chat(thinking_token_budget=right)
        at.thinks.text(thinking_token_budget=right)


@VLLM.case(
    "chat_completion/test_non_object_body_validation.py",
    5,
    "bodies that are no objects; cache_salt",
)
def _(at: Servers) -> None:
    with at.chat.running.client() as http:
        for body in ('"no {{{"', '["a"]', "42", "null"):
            assert http.post("/v1/chat/completions", content=body).status_code == 400
    at.chat.chat(400, cache_salt="")


CALLS = "chat_completion/test_completion_with_function_calling.py"


def call_of(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][0]["message"]["tool_calls"][0]["function"]
    return found


@VLLM.case(CALLS, 24, "calls: auto, required, named; whole, streamed; thinking or not")
def _(at: Servers) -> None:
    named = {"type": "function", "function": {"name": "look"}}
    for choice in ("required", named):
        for kwargs in ({"enable_thinking": True}, {"enable_thinking": False}):
            more = {"tools": [TOOL], "tool_choice": choice, "chat_template_kwargs": kwargs}
            call = call_of(at.chat.chat(**more, max_tokens=80))
            assert json.loads(call["arguments"])["place"] in ("Rome", "Oslo")
        pieces = at.chat.stream("/v1/chat/completions", messages=HI, **more, max_tokens=80)
        assert any(piece["choices"][0]["delta"].get("tool_calls") for piece in pieces)
    at.chat.chat(tools=[TOOL], tool_choice="auto")


@VLLM.case(CALLS, 2, "calls without arguments, given back as {} or nothing")
def _(at: Servers) -> None:
    for arguments in ("{}", ""):
        call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": arguments}}
        turns = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
        at.chat.chat(messages=[*turns, {"role": "tool", "tool_call_id": "c", "content": "12:00"}])


@VLLM.case(CALLS, 2, "choices without tools, unknown or empty ones are refused")
def _(at: Servers) -> None:
    named = {"type": "function", "function": {"name": "other"}}
    at.chat.chat(400, tool_choice=named)
    at.chat.chat(400, tools=[TOOL], tool_choice=named)
    at.chat.chat(400, tools=[TOOL], tool_choice={})


@VLLM.case(CALLS, 2, "one token is too few for a call")
def _(at: Servers) -> None:
    answer = at.chat.chat(tools=[TOOL], tool_choice="required", max_tokens=1)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    assert not choice["message"].get("tool_calls")


BATCH = "chat_completion/test_batched_chat_completions.py"
VLLM.apart(BATCH, 6, "classes of batches", OWN)


@VLLM.case(BATCH, 5, "`/v1/chat/completions/batch`, with schemas and log-probabilities")
def _(at: Servers) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes"]}}}
    more = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    given = {"messages": [HI, HI], "max_tokens": 8}
    answer = at.chat.post("/v1/chat/completions/batch", **given, **more, response_format=format)
    assert [item["index"] for item in answer["choices"]] == [0, 1]
    assert said(answer) == '"yes"'
    assert all(item["token"].startswith("token_id:") for item in logged(answer))


@VLLM.case(
    "chat_completion/test_include_reasoning.py", 5, "thoughts, and none where they are left out"
)
def _(at: Servers) -> None:
    for include in (True, False):
        more = {"include_reasoning": include, "thinking_token_budget": 4, "max_tokens": 24}
        message = at.thinks.chat(**more)["choices"][0]["message"]
        assert bool(message.get("reasoning_content")) is include
        pieces = at.thinks.stream("/v1/chat/completions", messages=HI, **more)
        assert any("reasoning_content" in p["choices"][0]["delta"] for p in pieces) is include


@VLLM.case(
    "chat_completion/test_include_reasoning.py",
    1,
    "tokens of thoughts in usage",
    "/v1/responses has them; chats have not",
)
def _(at: Servers) -> None:
    usage = at.thinks.chat(thinking_token_budget=4, max_tokens=24)["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
