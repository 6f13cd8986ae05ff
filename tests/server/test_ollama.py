"""Ollama's API, through its own package, with the demonstration model."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import numpy as np
import ollama
import pytest

from jinfer.server.http.server_settings import ModelSource, ServerSettings
from jinfer.server.models.served_model import ServedModel
from tests.server.running import SMOL, Running, serving
from tests.server.test_description import schema_of
from tests.server.tool_models import CHATML, NOW, WEATHER

STORY = "Tell me a long story."
HELLO = [{"role": "user", "content": STORY}]
GREEDY = {"temperature": 0, "repeat_penalty": 1, "num_predict": 8}
KEY = "secret"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A model with tool calls, and a model whose template has thoughts."""
    sources = [
        ModelSource(
            name,
            SMOL.path,
            {
                **SMOL.overrides,
                "prompt": {"chat_template": template},
                "engine": {"slots": 2, "context": 512},
            },
        )
        for name, template in (("hermes", CHATML), ("thinker", CHATML + "{# </think> #}"))
    ]
    with serving(sources, ServerSettings(warm_up=False, keys=(KEY,))) as running:
        yield running
        for model in running.service.models.models:
            assert running.holds_nothing(model.name)


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[ollama.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with ollama.Client(running.url, headers=headers, timeout=120) as client:
        yield client


@pytest.fixture
def http(running: Running) -> Iterator[httpx.Client]:
    with running.client(headers={"authorization": f"Bearer {KEY}"}) as http:
        yield http


def openai_text(http: httpx.Client, **body: Any) -> str:
    """Return the same model's answer to a chat completion."""
    answer = http.post("/v1/chat/completions", json={"model": "hermes", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_a_chat(client: ollama.Client, http: httpx.Client) -> None:
    whole = client.chat("hermes:latest", HELLO, options=GREEDY)
    expected = openai_text(http, messages=HELLO, temperature=0, max_tokens=8)
    assert whole.message.content == expected
    assert (whole.model, whole.done, whole.done_reason) == ("hermes", True, "length")
    assert whole.eval_count == 8
    assert (whole.prompt_eval_count or 0) > 8
    assert (whole.total_duration or 0) > (whole.eval_duration or 0) > 0
    *lines, last = client.chat("hermes", HELLO, options=GREEDY, stream=True)
    assert len(lines) > 4
    assert "".join(line.message.content or "" for line in lines) == expected
    assert not any(line.done for line in lines)
    assert (last.message.content, last.done_reason, last.eval_count) == ("", "length", 8)
    for body in ({"stream": False}, {"stream": False, "messages": []}):
        asked = {"model": "hermes", "messages": HELLO, "options": GREEDY, **body}
        jsonschema.validate(
            http.post("/api/chat", json=asked).json(), schema_of("/api/chat", "post")
        )


def test_options(client: ollama.Client, http: httpx.Client) -> None:
    """They choose what the fields of the other routes choose."""
    same = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9}
    same |= {"seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.5, "tfs_z": 0.95}
    same |= {"repeat_penalty": 1.3, "repeat_last_n": 16}
    expected = openai_text(http, messages=HELLO, max_tokens=12, **same)
    found = client.chat("hermes", HELLO, options={**same, "num_predict": 12})
    assert found.message.content == expected
    # What is not said is Ollama's.
    said = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repeat_penalty": 1.1}
    expected = openai_text(http, messages=HELLO, max_tokens=12, repeat_last_n=64, seed=3, **said)
    found = client.chat("hermes", HELLO, options={"num_predict": 12, "seed": 3})
    assert found.message.content == expected
    greedy = client.chat("hermes", HELLO, options=GREEDY).message.content or ""
    stop = greedy[3:6]
    found = client.chat("hermes", HELLO, options={**GREEDY, "stop": [stop]})
    assert found.message.content == greedy[: greedy.index(stop)]
    assert found.done_reason == "stop"
    for unlimited in (0, -1, -2):
        asked = {**GREEDY, "num_predict": unlimited, "stop": stop}
        assert client.chat("hermes", HELLO, options=asked).message.content == found.message.content
    mirostat = {"mirostat": 2, "mirostat_tau": 3, "mirostat_eta": 0.2, "seed": 5}
    given = {**mirostat, **said, "repeat_last_n": 64}
    expected = openai_text(http, messages=HELLO, max_tokens=12, **given)
    found = client.chat("hermes", HELLO, options={**mirostat, "num_predict": 12})
    assert found.message.content == expected
    told = {"num_ctx": 2048, "num_gpu": 1, "penalize_newline": True}
    body = {"messages": HELLO, "options": {**GREEDY, **told}, "keep_alive": "5m"}
    answer = http.post("/api/chat", json={"model": "hermes", "stream": False, **body})
    ignored = {"keep_alive", "options.num_ctx", "options.num_gpu"}
    assert set(answer.headers["x-jinfer-ignored"].split(", ")) == ignored


def test_tokens_and_log_probabilities(client: ollama.Client) -> None:
    options = {**GREEDY, "num_predict": 3}
    given: dict[str, Any] = {"options": options, "logprobs": True, "top_logprobs": 2}
    whole = client.generate("hermes", STORY, **given)
    assert whole.logprobs is not None
    assert "".join(logprob.token for logprob in whole.logprobs) == whole.response
    assert all(logprob.logprob == logprob.top_logprobs[0].logprob for logprob in whole.logprobs)
    raw = list(client.generate("hermes", "Once upon a", raw=True, stream=True, **given))
    assert sum(len(item.logprobs or ()) for item in raw) == 3


def test_a_format(client: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "rains": {"type": "boolean"}},
        "required": ["city", "rains"],
        "additionalProperties": False,
    }
    options = {**GREEDY, "num_predict": 60}
    whole = client.chat("hermes", HELLO, format=schema, options=options).message.content or ""
    jsonschema.validate(json.loads(whole), schema)
    lines = client.generate("hermes", STORY, format=schema, options=options, stream=True)
    jsonschema.validate(json.loads("".join(line.response or "" for line in lines)), schema)
    forms: tuple[Any, ...] = ("json", {})
    for json_form in forms:  # llama.cpp's grammar of an empty schema is an object's
        raw = client.generate("hermes", STORY, format=json_form, raw=True, options=GREEDY)
        assert (raw.response or "").lstrip().startswith("{")
    with pytest.raises(ollama.ResponseError, match="format") as refused:
        client.chat("hermes", HELLO, format={"type": "nothing"})
    assert refused.value.status_code == 400


def turn(city: str) -> list[dict[str, Any]]:
    """A question, a call, the tool's result, and the answer."""
    function = {"name": "weather", "arguments": {"city": city}}
    return [
        {"role": "user", "content": f"What is the weather like in {city}?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "rain", "tool_name": "weather"},
        {"role": "assistant", "content": "It rains."},
    ]


def test_calls(client: ollama.Client) -> None:
    asked: list[Any] = [*turn("Paris"), *turn("Rome"), *turn("Paris"), turn("Rome")[0]]
    options = {**GREEDY, "num_predict": 60}
    given: dict[str, Any] = {"tools": [WEATHER, NOW], "options": options}
    whole = client.chat("hermes", asked, **given)
    [call] = list(whole.message.tool_calls or [])
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
    assert (whole.message.content, whole.done_reason) == ("", "stop")
    *lines, last = client.chat("hermes", asked, stream=True, **given)
    assert [line.message.tool_calls for line in lines] == [[call]]
    assert (last.message.tool_calls, last.done_reason) == (None, "stop")
    # A call that is cut has no arguments that would be an object: it is left out.
    cut = client.chat("hermes", asked, **{**given, "options": {**options, "num_predict": 16}})
    assert (cut.message.tool_calls, cut.message.content) == (None, "")
    assert cut.done_reason == "length"


def test_thinking(client: ollama.Client, http: httpx.Client) -> None:
    given: dict[str, Any] = {"options": GREEDY}
    thought = client.chat("thinker", HELLO, think=True, **given).message
    assert thought.thinking
    assert not thought.content
    lines = list(client.generate("thinker", STORY, think=True, stream=True, **given))
    assert "".join(line.thinking or "" for line in lines) == thought.thinking
    assert not any(line.response for line in lines)
    plain = client.chat("thinker", HELLO, think=False, **given).message
    assert plain.content
    assert plain.thinking is None
    asked = {"model": "thinker", "messages": HELLO, "stream": False, "think": "low", **given}
    answer = http.post("/api/chat", json=asked)
    assert answer.json()["message"]["thinking"] == thought.thinking
    assert answer.headers["x-jinfer-ignored"] == "think"  # how much; that it thinks is followed


def test_a_prompt(client: ollama.Client, http: httpx.Client, running: Running) -> None:
    first = client.generate("hermes", STORY, system="Be brief.", options=GREEDY)
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert first.response == openai_text(http, messages=messages, temperature=0, max_tokens=8)
    session = running.model("hermes").session
    assert list(first.context or ())[:-8] == session.encode_chat(messages)
    # The answer's tokens stand between the two prompts.
    second = client.generate("hermes", "And you?", context=first.context, options=GREEDY)
    more = session.encode_chat([{"role": "user", "content": "And you?"}])
    assert list(second.context or ())[:-8] == [*(first.context or ()), *more]
    prompt = session.tokenizer.decode(list(second.context or ())[:-8], skip_special=False)
    raw = client.generate("hermes", prompt, raw=True, options=GREEDY)
    assert raw.response == second.response
    assert raw.context is None
    jsonschema.validate(
        http.post("/api/generate", json={"prompt": "a", "stream": False, "options": GREEDY}).json(),
        schema_of("/api/generate", "post"),
    )
    body = {"prompt": "a", "raw": True, "think": True, "stream": False, "options": GREEDY}
    assert http.post("/api/generate", json=body).headers["x-jinfer-ignored"] == "think"
    loaded = client.generate("hermes")
    assert (loaded.response, loaded.done, loaded.done_reason) == ("", True, "load")


def test_a_model_without_a_template(
    client: ollama.Client, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is what the model reads; there is no place for what a template would say."""
    raw = client.generate("hermes", "Once upon a", raw=True, options=GREEDY)
    session = running.model("hermes").session
    bare = replace(session.opened.conversation, jinja=None)
    monkeypatch.setattr(session, "opened", replace(session.opened, conversation=bare))
    plain = client.generate("hermes", "Once upon a", options=GREEDY)
    assert plain.response == raw.response
    assert client.generate("hermes", " ", context=plain.context, options=GREEDY).context
    with pytest.raises(ollama.ResponseError, match="system: "):
        client.generate("hermes", "a", system="b")
    with pytest.raises(ollama.ResponseError, match=r"messages: .*no chat template"):
        client.chat("hermes", HELLO)


def test_vectors(client: ollama.Client, http: httpx.Client) -> None:
    found = client.embed("hermes", ["a b c", "d"])
    assert found.prompt_eval_count == 4
    assert np.allclose(np.linalg.norm(found.embeddings, axis=1), 1, atol=1e-5)
    one = client.embed("hermes", "a b c", dimensions=5).embeddings
    first = np.asarray(found.embeddings[0][:5])
    assert np.allclose(one, [first / np.linalg.norm(first)], atol=1e-5)
    old = np.asarray(client.embeddings("hermes", "a b c").embedding)
    assert np.allclose(old / np.linalg.norm(old), found.embeddings[0], atol=1e-5)
    assert not np.isclose(np.linalg.norm(old), 1)
    long = "a " * 600
    assert client.embed("hermes", long).prompt_eval_count
    with pytest.raises(ollama.ResponseError, match=r"input: .*tokens"):
        client.embed("hermes", long, truncate=False)
    assert client.embed("hermes", []).embeddings == []
    assert client.embeddings("hermes").embedding == []
    for path, body in (("embed", {"input": "a"}), ("embeddings", {"prompt": "a"})):
        answer = http.post(f"/api/{path}", json=body).json()
        jsonschema.validate(answer, schema_of(f"/api/{path}", "post"))


def test_the_models_of_ollama(
    client: ollama.Client,
    http: httpx.Client,
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [one.model for one in client.list().models] == ["hermes", "thinker"]
    with monkeypatch.context() as patched:
        adapters = property(lambda one: ["pirate"] if one.name == "hermes" else [])
        patched.setattr(ServedModel, "adapters", adapters)
        first, second, _ = client.list().models
        assert (first.model, second.model) == ("hermes", "pirate")
        assert second.details is not None
        assert second.details.parent_model == "hermes"
        assert first.digest != second.digest
    model = client.ps().models[0]
    assert (model.name, model.context_length) == ("hermes", 512)
    assert model.size == model.size_vram
    shown = client.show("thinker")
    assert shown.capabilities == ["completion", "tools", "thinking", "embedding"]
    assert client.show("hermes").capabilities == ["completion", "tools", "embedding"]
    assert shown.template == CHATML + "{# </think> #}"
    assert shown.details is not None
    assert shown.details.parameter_size == "135M"
    assert (shown.details.format, shown.details.family) == ("gguf", "llama")
    assert shown.details.quantization_level == "Q4_1"
    assert shown.modelinfo is not None
    family = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{family}.context_length"] == 512
    lines = dict(one.split(" ", 1) for one in (shown.parameters or "").splitlines())
    defaults = running.model("thinker").session.opened.defaults
    assert float(lines["temperature"]) == defaults.get("temperature", 0.8)
    for path in ("tags", "ps", "version"):
        answer = http.get(f"/api/{path}").json()
        jsonschema.validate(answer, schema_of(f"/api/{path}", "get"))
    assert http.head("/").status_code == 200


def test_errors_of_ollama(client: ollama.Client, http: httpx.Client, running: Running) -> None:
    for ask, why in (
        (lambda: client.chat("other", HELLO), "no model 'other'"),
        (lambda: client.pull("other"), "its command line"),
        (lambda: list(client.pull("other", stream=True)), "its command line"),
        (lambda: client.create("other", from_="hermes"), "its command line"),
        (lambda: client.copy("hermes", "other"), "its command line"),
        (lambda: client.delete("hermes"), "its command line"),
        (lambda: client.push("hermes"), "its command line"),
        (lambda: client.chat("hermes", HELLO, options={"top_p": 2}), "options.top_p: top_p"),
        (lambda: client.chat("hermes", HELLO, options={"nothing": 2}), "options.nothing: unknown"),
        (lambda: client.generate("hermes", "a", suffix="b"), "suffix: use /infill"),
        (lambda: client.generate("hermes", "a", template="b"), "template: .*its own"),
        (lambda: client.generate("hermes", "a", images=[b"b"]), "images.0: .*cannot see images"),
        (lambda: client.generate("hermes", "a", raw=True, system="b"), "system: a raw prompt"),
        (lambda: client.generate("hermes", "a", context=[1 << 20]), "context: .*vocabulary"),
        (lambda: client.generate("hermes", "a" * 5000), "prompt: .*context length"),
        (
            lambda: client.chat("hermes", [{**HELLO[0], "images": [b"b"]}]),
            "messages.0.images.0: .*cannot see images",
        ),
        (
            lambda: client.chat("hermes", HELLO, top_logprobs=2),
            "top_logprobs: it needs logprobs: true",
        ),
    ):
        with pytest.raises(ollama.ResponseError, match=why) as refused:
            ask()
        assert refused.value.status_code in (400, 404)
    # Also where no handler is reached: a method, a key, a body.
    for answer, status in (
        (http.get("/api/chat"), 405),
        (httpx.get(f"{running.url}/api/tags"), 401),
        (http.post("/api/chat", content="{"), 400),
        (http.post("/api/chat", json={"nothing": 1}), 400),
    ):
        assert answer.status_code == status
        assert isinstance(answer.json()["error"], str)
