"""vLLM's tests of texts and models (tests/entrypoints/openai)."""

from typing import Any

from tests.server.peers.llama_chat import LONG
from tests.server.peers.served import Servers, Target
from tests.server.peers.vllm_chat import (
    BAD_GRAMMAR,
    BAD_SCHEMA,
    BOTH,
    OWN,
    USAGE,
    VLLM,
    counted,
)

TEXT = "completion/test_completion.py"
ROBOT = ["A robot may not injure another robot", "My name is"]


def target_text(at: Target, **body: Any) -> Any:
    return at.text(**body)["choices"][0]


@VLLM.case(TEXT, 2, "texts and ids; the side that is cut")
def _(at: Servers) -> None:
    answer = at.chat.text(max_tokens=5, temperature=0)
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    at.chat.text(prompt=[0] * 5)
    for side, kept in (("right", [0, 1, 2, 3]), ("left", [4, 5, 6, 7])):
        cut = {"truncate_prompt_tokens": 4, "truncation_side": side, "return_token_ids": True}
        choice = target_text(at.chat, prompt=list(range(8)), **cut)
        assert choice["prompt_token_ids"] == kept


@VLLM.case(TEXT, 6, "log-probabilities: none, 0, 5, of ids, too many")
def _(at: Servers) -> None:
    assert target_text(at.chat)["logprobs"] is None
    for limit in (0, 5):
        shown = target_text(at.chat, logprobs=limit)["logprobs"]
        assert max(limit, 1) <= len(shown["top_logprobs"][0]) <= limit + 1
    more = {"logprob_token_ids": [5000], "allowed_token_ids": [42], "logprobs": 1}
    shown = target_text(at.chat, **more, return_tokens_as_token_ids=True, max_tokens=1)
    assert shown["logprobs"]["tokens"] == ["token_id:42"]
    assert "token_id:5000" in shown["logprobs"]["top_logprobs"][0]
    for stream in (False, True):
        at.chat.text(400, logprobs=21, stream=stream)


@VLLM.case(TEXT, 4, "prompt_logprobs of several prompts")
def _(at: Servers) -> None:
    at.chat.text(400, prompt=ROBOT, prompt_logprobs=-1)
    for limit in (0, 1):
        choices = at.chat.text(prompt=ROBOT, prompt_logprobs=limit)["choices"]
        assert all(choice["prompt_logprobs"] for choice in choices)
    assert target_text(at.chat, prompt=ROBOT).get("prompt_logprobs") is None


@VLLM.case(TEXT, 4, "streams, several answers, stream_options")
def _(at: Servers) -> None:
    path, given = "/v1/completions", {"prompt": "What is an LLM?", "max_tokens": 5}
    whole = target_text(at.chat, **given, temperature=0)["text"]
    pieces = at.chat.stream(path, **given, temperature=0)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole
    many = {"n": 3, "seed": 42, "temperature": 1.0, "max_tokens": 24}
    assert len({item["text"] for item in at.chat.text(**many)["choices"]}) == 3
    assert {item["choices"][0]["index"] for item in at.chat.stream(path, **given | many)} == {
        0,
        1,
        2,
    }
    counted(at.chat.stream(path, **given, stream_options=BOTH))
    assert at.chat.stream(path, **given, stream_options={})[-1].get("usage") is None
    at.chat.text(400, stream_options=USAGE)


@VLLM.case(TEXT, 1, "lists of prompts, beams, streamed")
def _(at: Servers) -> None:
    for prompt in (["Hello, my name is"] * 2, [[0] * 5] * 2):
        one, two = at.chat.text(prompt=prompt, temperature=0)["choices"]
        assert one["text"] == two["text"]
        beams = at.chat.text(prompt=prompt, n=2, use_beam_search=True, max_tokens=5)["choices"]
        assert beams[0]["text"] == beams[2]["text"] != beams[1]["text"]


@VLLM.case(TEXT, 2, "echo with log-probabilities")
def _(at: Servers) -> None:
    for limit in (0, 1):
        choice = target_text(at.chat, echo=True, logprobs=limit, max_tokens=5)
        assert choice["text"].startswith("Once upon a time")
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["top_logprobs"][0] is None


@VLLM.case(TEXT, 3, "schemas, regexes, grammars that are wrong")
def _(at: Servers) -> None:
    for wrong in ({"json": BAD_SCHEMA}, {"regex": "[.*"}, {"grammar": BAD_GRAMMAR}):
        at.chat.text(400, structured_outputs=wrong)


VLLM.apart(TEXT, 3, "parameters of a request class", OWN)


@VLLM.case("completion/test_prompt_validation.py", 2, "no prompt; ids beyond the vocabulary")
def _(at: Servers) -> None:
    at.chat.text(400, prompt=None)
    at.chat.text(400, prompt=[999999])


VLLM.apart("completion/test_prompt_validation.py", 49, "tensors of embeddings", OWN)


@VLLM.case("completion/test_token_in_token_out.py", 1, "ids in and out, without a tokenizer")
def _(at: Servers) -> None:
    choice = target_text(at.adapted, prompt=[5, 6, 7], return_token_ids=True)
    assert 0 < len(choice["token_ids"]) <= 8
    assert choice["prompt_token_ids"] == [5, 6, 7]


@VLLM.case("models/test_models.py", 1, "models and their adapters")
def _(at: Servers) -> None:
    item, adapter, *_ = at.adapted.get("/v1/models")["data"]
    assert item["root"]
    assert (adapter["id"], adapter["parent"]) == ("a", "tiny")


@VLLM.case("test_chunked_prompt.py", 2, "usage and log-probabilities of long prompts")
def _(at: Servers) -> None:
    text = "What is the capital of France?" * 200
    given = {"max_tokens": 5, "temperature": 0, "stream_options": BOTH}
    counted(at.chat.stream("/v1/completions", prompt=text, logprobs=5, **given))
    messages = [{"role": "user", "content": text}]
    counted(at.chat.stream("/v1/chat/completions", messages=messages, **given))
    at.chat.chat(400, messages=LONG)
