"""Text completions: OpenAI's format, vLLM's fields, and requests of lm-eval."""

import json
from typing import Any

import numpy as np
import openai
import pytest

from jinfer import SamplingParams
from tests.server.running import Running

TEXT = "The capital of France is"


def asked(smol: Running, **body: Any) -> dict[str, Any]:
    """A whole answer."""
    with smol.client() as http:
        answer = http.post("/v1/completions", json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_text(client: openai.OpenAI, smol: Running) -> None:
    answer = client.completions.create(model="smol", prompt=TEXT, temperature=0, max_tokens=8)
    expected = smol.model().llm.generate([TEXT], SamplingParams(max_tokens=8))[0]
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_sixteen_tokens_by_default(smol: Running) -> None:
    assert asked(smol, prompt=TEXT, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_several_prompts(client: openai.OpenAI, smol: Running) -> None:
    prompts = [f"{number} and {number + 1} are" for number in range(20)]
    answer = client.completions.create(model="smol", prompt=prompts, temperature=0, max_tokens=4)
    expected = smol.model().llm.generate(prompts, SamplingParams(max_tokens=4))
    assert [choice.text for choice in answer.choices] == [item.text for item in expected]
    assert [choice.index for choice in answer.choices] == list(range(20))
    ids = [smol.model().llm.encode(prompt) for prompt in prompts]
    again = client.completions.create(model="smol", prompt=ids, temperature=0, max_tokens=4)
    assert [choice.text for choice in again.choices] == [item.text for item in expected]
    assert again.usage is not None
    assert again.usage.prompt_tokens == sum(map(len, ids))
    item = client.completions.create(model="smol", prompt=ids[0], temperature=0, max_tokens=4)
    assert item.choices[0].text == expected[0].text


def test_a_stream(client: openai.OpenAI, smol: Running) -> None:
    expected = smol.model().llm.generate([TEXT, "One, two,"], SamplingParams(max_tokens=6))
    chunks = client.completions.create(
        model="smol",
        prompt=[TEXT, "One, two,"],
        temperature=0,
        max_tokens=6,
        echo=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [TEXT + expected[0].text, "One, two," + expected[1].text]
    assert chunk.usage is not None
    assert chunk.usage.completion_tokens == 12


def test_echo_and_log_probabilities(smol: Running) -> None:
    llm = smol.model().llm
    ids = llm.encode(TEXT)
    answer = asked(smol, prompt=TEXT, echo=True, logprobs=3, max_tokens=2)
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    assert choice["text"].startswith(TEXT)
    assert "".join(found["tokens"]) == choice["text"]
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    scores = llm.score([ids])[0]
    np.testing.assert_allclose(found["token_logprobs"][1 : len(ids)], scores, atol=1e-4)
    places = zip(found["tokens"], found["text_offset"], strict=True)
    assert all(choice["text"][at:].startswith(token) for token, at in places)
    for top, token, logprob in zip(
        found["top_logprobs"][1:], found["tokens"][1:], found["token_logprobs"][1:], strict=True
    ):
        assert top[token] == logprob
        assert len(top) in (3, 4)
        assert max(top.values()) >= logprob


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_in_characters_of_the_text(smol: Running, ids: bool, stream: bool) -> None:
    """Tokens inside a character have its offset, and none is beyond the text."""
    text = "naïve 😀 café 한국"
    llm = smol.model().llm
    prompt = llm.encode(text) if ids else text
    more = {"temperature": 0, "logprobs": 0, "stop": [" is"], "max_tokens": 6}
    if stream:
        with smol.client() as http:
            answer = http.post("/v1/completions", json={"prompt": prompt, "stream": True, **more})
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
        shown = "".join(choice["text"] for choice in choices)
        offsets = [at for choice in choices for at in choice["logprobs"]["text_offset"]]
        tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    else:
        (choice,) = asked(smol, prompt=prompt, echo=True, **more)["choices"]
        shown, found = choice["text"], choice["logprobs"]
        offsets, tokens = found["text_offset"], found["tokens"]
        assert shown.startswith(text)
        word = next(i for i, token in enumerate(tokens) if token.startswith(" c"))
        assert offsets[word] == text.index(" caf")
        assert max(map(offsets.count, offsets)) > 1
    assert offsets == sorted(offsets)
    assert all(at <= len(shown) for at in offsets)
    for token, at in zip(tokens, offsets, strict=True):
        assert "\ufffd" in token or shown[at:].startswith(token) or at == len(shown)


def test_offsets_of_the_end_of_a_prompt(smol: Running) -> None:
    given = {"echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
    (choice,) = asked(smol, prompt=TEXT, truncate_prompt_tokens=2, **given)["choices"]
    found = choice["logprobs"]
    assert choice["text"].startswith(TEXT)
    for token, at in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][at:].startswith(token)


@pytest.mark.parametrize("limit", [0, 1])
def test_what_lm_eval_asks_for(smol: Running, limit: int) -> None:
    """Its `local-completions` reads the log-probabilities of a prompt's end."""
    llm = smol.model().llm
    context, end = llm.encode("The sky is"), llm.encode(" blue")
    answer = asked(
        smol,
        model="smol",
        prompt=[context + end],
        temperature=0,
        max_tokens=limit,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    found = answer["choices"][0]["logprobs"]
    assert len(found["token_logprobs"]) == len(context + end) + limit
    scored = found["token_logprobs"][len(context) : len(context + end)]
    np.testing.assert_allclose(sum(scored), llm.score([context + end])[0][-1], atol=1e-4)
    assert answer["usage"]["completion_tokens"] == limit


def test_prompt_log_probabilities(smol: Running) -> None:
    ids = smol.model().llm.encode(TEXT)
    choice = asked(smol, prompt=TEXT, prompt_logprobs=2, max_tokens=1)["choices"][0]
    found = choice["prompt_logprobs"]
    assert found[0] is None
    assert len(found) == len(ids)
    assert all(str(id) in item for id, item in zip(ids[1:], found[1:], strict=True))
    assert [item["rank"] for item in found[1].values() if "rank" in item] == [1, 2]


def test_ids_of_an_answer(smol: Running) -> None:
    llm = smol.model().llm
    choice = asked(smol, prompt=TEXT, return_token_ids=True, max_tokens=3)["choices"][0]
    assert choice["prompt_token_ids"] == llm.encode(TEXT)
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(choice["token_ids"]) == choice["text"]


def test_several_greedy_answers_are_equal(smol: Running) -> None:
    choices = asked(smol, prompt=TEXT, temperature=0, n=2, max_tokens=4)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert choices[0]["text"] == choices[1]["text"] != ""


def test_the_best_of_several(smol: Running) -> None:
    answer = asked(smol, prompt=TEXT, temperature=1.5, seed=3, best_of=4, n=2, max_tokens=4)
    assert len(answer["choices"]) == 2
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("truncate_prompt_tokens", 2, None),
        ("add_special_tokens", False, None),
        ("cache_prompt", False, None),
        ("bad_words", ["Paris"], None),
        ("logit_bias", {"7042": -100}, None),
        ("logit_bias", [[" Paris", False]], None),
        ("regex", "[0-9]{3}", None),
        ("structured_outputs", {"choice": ["Rome", "Oslo"]}, None),
        ("grammar", 'root ::= "Oslo" | "Rome"', None),
        ("use_beam_search", True, None),
        ("skip_special_tokens", False, None),
        ("min_tokens", 8, None),
        ("priority", -1, None),
        ("strategy", "fsd", None),
        ("samplers", ["top_k", "temperature"], None),
    ],
)
def test_a_field_is_honoured(smol: Running, field: str, value: Any, text: str | None) -> None:
    answer = asked(smol, prompt=TEXT, max_tokens=8, **{field: value})
    choice, usage = answer["choices"][0], answer["usage"]
    match field:
        case "truncate_prompt_tokens":
            assert usage["prompt_tokens"] == 2
        case "cache_prompt":
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        case "bad_words" | "logit_bias":
            assert "Paris" not in choice["text"]
        case "regex":
            assert choice["text"].isdecimal()
            assert len(choice["text"]) == 3
        case "structured_outputs" | "grammar":
            assert choice["text"] in ("Rome", "Oslo")
        case _:
            assert choice["text"]


def test_the_best_beams(smol: Running) -> None:
    given = {"prompt": TEXT, "max_tokens": 6, "use_beam_search": True, "beams": 3}
    best = asked(smol, **given)["choices"][0]["text"]
    texts = [item["text"] for item in asked(smol, **given, n=3)["choices"]]
    assert texts[0] == best
    assert len(set(texts)) == 3
    for more in ({"n": 4}, {"n": 2, "best_of": 3}):
        with smol.client() as http:
            assert http.post("/v1/completions", json={**given, **more}).status_code == 400


def test_no_end_before_there_are_enough_tokens(smol: Running) -> None:
    text = asked(smol, prompt=TEXT, max_tokens=8, temperature=0)["choices"][0]["text"]
    given = {"prompt": TEXT, "temperature": 0, "stop": [text[:3]]}
    assert asked(smol, **given, max_tokens=8)["choices"][0]["text"] == ""
    later = asked(smol, **given, max_tokens=8, min_tokens=4)["choices"][0]
    assert (later["text"], later["finish_reason"]) == (text, "length")


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_tokens_by_their_ids(smol: Running, route: str) -> None:
    chat = route != "/v1/completions"
    given: dict[str, Any] = {"max_tokens": 2, "return_token_ids": True, "temperature": 0}
    given |= {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 1}
    if not chat:
        given = {"prompt": "Hi", "logprobs": 1, "echo": True, **given}
        given = {k: v for k, v in given.items() if k not in ("messages", "top_logprobs")}
        given["logprobs"] = 1
    with smol.client() as http:
        answer = http.post(route, json={**given, "return_tokens_as_token_ids": True}).json()
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    ids = choice["token_ids"] if chat else [*choice["prompt_token_ids"], *choice["token_ids"]]
    tokens = [item["token"] for item in found["content"]] if chat else found["tokens"]
    assert tokens == [f"token_id:{id}" for id in ids]
    tops = [item["top_logprobs"][0]["token"] for item in found["content"]] if chat else [
        name for item in found["top_logprobs"] if item for name in item
    ]  # fmt: skip
    assert all(name.startswith("token_id:") for name in tops)


def test_a_stream_is_one_event_for_each_token(smol: Running) -> None:
    body = {"prompt": TEXT, "temperature": 0, "max_tokens": 5, "stream": True}
    more = {"timings_per_token": True, "return_token_ids": True}
    options = {"stream_options": {"continuous_usage_stats": True, "include_usage": True}}
    with (
        smol.client() as http,
        http.stream("POST", "/v1/completions", json=body | more | options) as answer,
    ):
        events = [line for line in answer.iter_lines() if line]
    chunks = [json.loads(line.removeprefix("data: ")) for line in events[:-1]]
    pieces = [chunk for chunk in chunks if chunk["choices"]]
    assert [chunk["usage"]["completion_tokens"] for chunk in pieces] == sorted(
        chunk["usage"]["completion_tokens"] for chunk in pieces
    )
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in pieces] == [1] * 5
    assert all(chunk["timings"]["predicted_n"] for chunk in pieces)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/completion"])
def test_max_tokens_zero_shows_no_token(smol: Running, route: str) -> None:
    """The engine samples a token, whose text, id and time are never shown."""
    body: dict[str, Any] = {"prompt": TEXT, "max_tokens": 0, "return_token_ids": True}
    if "chat" in route:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        body |= {"logprobs": True, "top_logprobs": 2}
    elif route == "/completion":
        body = {"prompt": TEXT, "n_predict": 0, "return_tokens": True, "n_probs": 2}
    else:
        body["logprobs"] = 2
    options: dict[str, Any] = {"stream": True, "timings_per_token": True}
    if route != "/completion":
        options["stream_options"] = {"include_usage": True}
    with smol.client() as http:
        whole = http.post(route, json=body)
        streamed = http.post(route, json={**body, **options})
    assert (whole.status_code, streamed.status_code) == (200, 200), whole.text + streamed.text
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    pieces = [json.loads(line) for line in lines if line != "[DONE]"]
    for answer in [whole.json(), *pieces]:
        timings = answer.get("timings", {})
        assert (timings.get("predicted_n", 0), timings.get("predicted_ms", 0)) == (0, 0)
        assert (answer.get("usage") or {}).get("completion_tokens", 0) == 0
        assert answer.get("tokens_predicted", 0) == 0
        for told in (answer, *answer.get("choices", ())):
            message = told.get("message") or told.get("delta") or {}
            logprobs = told.get("logprobs") or {}
            assert not told.get("text")
            assert not told.get("content")
            assert not message.get("content")
            assert not told.get("token_ids")
            assert not told.get("tokens")
            assert not logprobs.get("content")
            assert not logprobs.get("token_logprobs")
            assert not told.get("completion_probabilities")
    counted = whole.json()["timings"]
    assert counted["prompt_n"] + counted["cache_n"] > 0
    for told in (whole.json(), [piece for piece in pieces if piece.get("choices", True)][-1]):
        ended = told if route == "/completion" else told["choices"][0]
        assert ended.get("stop_type", ended.get("finish_reason")) in ("limit", "length")
