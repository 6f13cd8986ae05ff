"""Images over HTTP, in each dialect, with a tiny vision-language model whose answers are known."""

import base64
import io
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from jinfer.loader.open_model import open_files
from jinfer.server.http import fetch_image as fetching
from jinfer.server.http.request_body import HEADER
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from tests.server.running import GOLDENS, Running, serving
from tests.server.test_fetch_image import Site, respond
from tests.server.tool_models import CHATML
from tools.bench_models import LlamaShape, make_up

GOLDEN, IMAGES = GOLDENS / "vlm_smolvlm", GOLDENS / "vlm_images"
FILES = [(IMAGES / f"img{number}.png").read_bytes() for number in (0, 1)]
CODED = [base64.b64encode(data).decode() for data in FILES]
URLS = [f"data:image/png;base64,{text}" for text in CODED]
CHAT = "/v1/chat/completions"
JSON = dict[str, Any]
GREEDY: JSON = {"temperature": 0, "max_tokens": 9}


def text(content: str) -> JSON:
    return {"type": "text", "text": content}


def image(url: str, **more: Any) -> JSON:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def user(*parts: JSON) -> list[JSON]:
    return [{"role": "user", "content": list(parts)}]


# The prompts of the golden, by the names of its arrays.
ONE = user(text("Look at "), image(URLS[0]), text(" what is it?"))
TWO = user(text("One "), image(URLS[0]), text(" and two "), image(URLS[1]), text(" compare."))
NONE = user(text("Say yes."))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("images")
    (made / "a.png").write_bytes(FILES[0])
    return made


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Running]:
    """A vision-language model, and one that reads text alone."""
    tiny = tmp_path_factory.mktemp("tiny") / "model.gguf"
    words = open_files("smollm2_135m_instruct", {}).weights
    make_up(LlamaShape(2, 64, 4, 2, 96, context=4096), words, tiny, "Q8_0")
    sees = ModelSource("sees", str(GOLDEN), {"dtype": "float32"})
    reads = ModelSource("reads", str(tiny), {"prompt": {"chat_template": CHATML}})
    settings = ServerSettings(
        warm_up=False,
        limit_images=2,
        image_hosts=("images.test",),
        image_folder=str(folder),
        max_responses=10,
    )
    with serving([sees, reads], settings) as running:
        yield running
        for each in running.service.models.models:
            assert running.holds_nothing(each.name)


@pytest.fixture(scope="module")
def golden() -> Any:
    """The arrays of transformers: ids of the prompts, and greedy answers."""
    return np.load(GOLDEN / "expected.npz")


def post(running: Running, path: str = CHAT, **body: Any) -> httpx.Response:
    return httpx.post(running.url + path, json={"model": "sees"} | body, timeout=60)


def chat(running: Running, messages: list[JSON], **more: Any) -> JSON:
    response = post(running, messages=messages, **GREEDY | more)
    assert response.status_code == 200, response.text
    found: JSON = response.json()
    return found


def content(answer: JSON) -> str:
    found: str = answer["choices"][0]["message"]["content"]
    return found


def refusal(response: httpx.Response) -> str:
    """The message of a 400, which is one line."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    message: str = error if isinstance(error, str) else error["message"]
    assert "\n" not in message
    assert len(message) < 500
    return message


@pytest.mark.parametrize(("name", "messages"), [("a", ONE), ("b", TWO), ("c", NONE)])
def test_tokens_are_those_of_transformers(
    name: str, messages: list[JSON], running: Running, golden: Any
) -> None:
    answer = chat(running, messages, return_token_ids=True)
    assert answer["prompt_token_ids"] == golden[f"input_ids_{name}"].tolist()
    assert answer["choices"][0]["token_ids"] == golden[f"greedy_{name}"].tolist()[:9]
    assert answer["usage"]["prompt_tokens"] == golden[f"input_ids_{name}"].size
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["choices"][0]["finish_reason"] == "length"


def still_answers_texts(running: Running) -> bool:
    expected = np.load(GOLDEN / "expected.npz")["greedy_c"].tolist()[:9]
    answer = chat(running, NONE, return_token_ids=True)
    return bool(answer["choices"][0]["token_ids"] == expected)


def test_a_stream_has_the_text_of_the_whole_answer(running: Running) -> None:
    body = {"model": "sees", "messages": TWO, "stream": True, **GREEDY}
    body["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", running.url + CHAT, json=body, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines if not line.startswith(":")]
    usage = events.pop()["usage"]
    deltas = [event["choices"][0]["delta"] for event in events]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert [reason for reason in reasons if reason] == ["length"]
    whole = chat(running, TWO)
    assert "".join(delta.get("content", "") for delta in deltas) == content(whole)
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_several_answers_and_log_probabilities(running: Running) -> None:
    answer = chat(running, ONE, n=2, logprobs=True, top_logprobs=3)
    first, second = answer["choices"]
    assert first["message"]["content"] == second["message"]["content"]
    assert len(first["logprobs"]["content"]) == 9
    assert all(len(entry["top_logprobs"]) == 3 for entry in first["logprobs"]["content"])


def test_images_of_earlier_turns_stay(running: Running) -> None:
    first = chat(running, ONE)
    answered = {"role": "assistant", "content": content(first)}
    second = chat(running, [*ONE, answered, *NONE])
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
    without = chat(running, [*user(text("Look at  what is it?")), answered, *NONE])
    assert content(second) != content(without)


def test_the_prefix_cache_tells_images_apart(running: Running) -> None:
    """Prompts of more than a block each, alike but for one image."""
    long = text("a b c d e f g h " * 12)
    asked = [user(long, image(url), long, text("Say.")) for url in URLS]
    other_text = user(long, image(URLS[0]), text("Tell."))
    alone = [chat(running, messages, cache_prompt=False) for messages in (*asked, other_text)]
    again = [chat(running, messages) for messages in (*asked, other_text, *asked)]
    expected = [content(answer) for answer in alone]
    assert expected[0] != expected[1]
    assert [content(answer) for answer in again] == [*expected, *expected[:2]]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in again]
    assert cached[3] > cached[1]  # the same image is found; of another image the text before it
    assert cached[2] > 0


def test_names_of_placeholders_in_texts_are_text(running: Running) -> None:
    marked = "an <image> here"
    alone = chat(running, user(text(marked)))
    assert alone["usage"]["prompt_tokens"] > chat(running, NONE)["usage"]["prompt_tokens"]
    both = chat(running, user(text(marked), image(URLS[0])))
    assert both["usage"]["prompt_tokens"] > alone["usage"]["prompt_tokens"] + 20


def test_detail_and_uuid_are_accepted(running: Running) -> None:
    for detail in ("low", "high", "auto"):
        part = image(URLS[0], detail=detail) | {"uuid": "mine"}
        response = post(running, messages=user(part), **GREEDY)
        assert response.status_code == 200
        ignored = response.headers.get(HEADER, "")
        assert ("image_url.detail" in ignored) == (detail != "auto")


BOMB = b"".join(
    struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    for kind, data in [
        (b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(1000))),
        (b"IEND", b""),
    ]
)
WRONG: dict[str, tuple[Any, str]] = {
    "a bare string": ({"type": "image_url", "image_url": URLS[0]}, "write an object"),
    "nothing": ({"type": "image_url"}, "needs image_url"),
    "a uuid alone": ({"type": "image_url", "image_url": None, "uuid": "mine"}, "needs image_url"),
    "no url": ({"type": "image_url", "image_url": {}}, "url"),
    "another key": ({"type": "image_url", "image_url": {"url": URLS[0], "size": 3}}, "size"),
    "another detail": (image(URLS[0], detail="best"), "detail"),
    "malformed": (image("malformed"), "neither http: nor https:"),
    "an empty url": (image(""), "neither http: nor https:"),
    "no base64": (image("data:image/png,abc"), "data:image/png;base64,"),
    "wrong base64": (image("data:image/png;base64,@@@@"), "base64"),
    "spaces in base64": (image(URLS[0][:60] + " " + URLS[0][60:]), "base64"),
    "padding too much": (image(URLS[0].rstrip("=") + "====="), "base64"),
    "empty": (image("data:image/png;base64,"), "empty"),
    "garbage": (image("data:image/png;base64," + base64.b64encode(b"garbage").decode()), "PNG"),
    "half a file": (
        image("data:image/png;base64," + base64.b64encode(FILES[0][: len(FILES[0]) // 2]).decode()),
        "damaged",
    ),
    "a header": (
        image("data:image/png;base64," + base64.b64encode(FILES[0][:20]).decode()),
        "damaged",
    ),
    "too many pixels": (
        image("data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + BOMB).decode()),
        "pixels",
    ),
    "svg": (
        image("data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode()),
        "PNG",
    ),
    "audio": ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "audio"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_images(name: str, running: Running) -> None:
    """Each is a 400 of one line, and the server answers texts afterwards."""
    part, reason = WRONG[name]
    assert reason in refusal(post(running, messages=user(text("Look"), part), **GREEDY))
    assert still_answers_texts(running)


def test_the_image_at_fault_is_named(running: Running) -> None:
    bad = image("data:image/png;base64," + base64.b64encode(b"garbage").decode())
    assert refusal(post(running, messages=user(image(URLS[0]), bad))).startswith("image 2 of 2: ")
    response = post(running, messages=user(image(URLS[0]), image("ftp://a/b.png")))
    assert response.json()["error"]["param"] == "messages.0.content.1.image_url"


def test_more_images_than_are_allowed(running: Running) -> None:
    three = [*TWO, {"role": "assistant", "content": "yes"}, *ONE]
    assert "--limit-images" in refusal(post(running, messages=three, **GREEDY))
    assert still_answers_texts(running)


def test_a_model_of_text_alone(running: Running) -> None:
    """Each dialect says so in one line."""
    answers = [
        post(running, messages=ONE, model="reads"),
        post(
            running,
            "/v1/responses",
            model="reads",
            input=user({"type": "input_image", "image_url": URLS[0]}),
        ),
        post(
            running,
            "/v1/messages",
            model="reads",
            max_tokens=3,
            messages=user({"type": "image", "source": base64_source(CODED[0])}),
        ),
        post(
            running,
            "/api/chat",
            model="reads",
            messages=[{"role": "user", "content": "Look", "images": CODED[:1]}],
        ),
        post(running, "/api/generate", model="reads", prompt="Look", images=CODED[:1]),
        post(running, "/completion", model="reads", prompt=marked("Look <__media__>", CODED[:1])),
    ]
    for response in answers:
        assert "cannot see images" in refusal(response)
    assert content(chat(running, NONE, model="reads"))


def test_urls_of_other_hosts_are_not_fetched(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site()
    monkeypatch.setattr(fetching, "is_public", lambda address: True)
    for url in (site.url(host="127.0.0.1"), site.url(host="localhost")):
        assert "--image-hosts" in refusal(post(running, messages=user(image(url))))
    assert site.connections == 0
    site.close()


def test_a_url_gives_the_answer_of_its_bytes(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site()
    site.answers |= {"/a.png": respond(body=FILES[0]), "/page": respond(body=b"<html></html>")}
    host = f"127.0.0.1:{site.port}"
    settings = running.service.settings
    monkeypatch.setattr(fetching, "is_public", lambda address: True)
    object.__setattr__(settings, "image_hosts", (host,))
    messages = user(text("Look at "), image(site.url(host="127.0.0.1")), text(" what is it?"))
    assert content(chat(running, messages)) == content(chat(running, ONE))
    page = user(image(site.url("/page", "127.0.0.1")))
    assert "PNG" in refusal(post(running, messages=page))
    missing = user(image(site.url("/missing", "127.0.0.1")))
    assert "status 404" in refusal(post(running, messages=missing))
    hits = len(site.hits)
    assert "cannot see images" in refusal(post(running, messages=messages, model="reads"))
    assert len(site.hits) == hits
    object.__setattr__(settings, "image_hosts", ("images.test",))
    site.close()


def test_files_of_the_folder(running: Running, folder: Path) -> None:
    messages = user(text("Look at "), image(f"file://{folder}/a.png"), text(" what is it?"))
    assert content(chat(running, messages)) == content(chat(running, ONE))
    for url in ("file:///etc/passwd", f"file://{folder}/../a.png", f"file://{IMAGES}/img0.png"):
        assert "--image-folder" in refusal(post(running, messages=user(image(url))))


def test_formats_and_modes(running: Running) -> None:
    """The same pixels in any lossless format give the same answer."""
    original = Image.open(io.BytesIO(FILES[0])).convert("RGB")
    expected = content(chat(running, ONE))
    for kind, options in [("BMP", {}), ("WEBP", {"lossless": True}), ("PNG", {"optimize": True})]:
        data = io.BytesIO()
        original.save(data, kind, **options)
        url = "data:;base64," + base64.b64encode(data.getvalue()).decode()
        messages = user(text("Look at "), image(url), text(" what is it?"))
        assert content(chat(running, messages)) == expected, kind
    for mode in ("L", "P", "CMYK", "1", "RGBA", "LA"):
        data = io.BytesIO()
        original.convert(mode).save(data, "JPEG" if mode == "CMYK" else "PNG")
        url = "data:;base64," + base64.b64encode(data.getvalue()).decode()
        assert content(chat(running, user(image(url))))


def test_fields_that_do_not_go_with_images(running: Running) -> None:
    response = post(running, messages=ONE, prompt_logprobs=1)
    assert "prompt_logprobs" in response.json()["error"]["param"]
    refusal(response)
    assert "not truncated" in refusal(post(running, messages=ONE, truncate_prompt_tokens=20))
    assert post(running, messages=ONE, truncate_prompt_tokens=200, max_tokens=1).is_success


def test_a_prompt_longer_than_the_context(running: Running) -> None:
    long = user(image(URLS[0]), text("a b c d " * 2000))
    assert "maximum context length" in refusal(post(running, messages=long))


def test_a_system_message_with_an_image(running: Running) -> None:
    messages = [{"role": "system", "content": [text("This is the sky: "), image(URLS[0])]}, *NONE]
    assert content(chat(running, messages))


def test_tools_and_images(running: Running) -> None:
    """The model's template has no tools, so that they and their results are written as text."""
    call = {"id": "a", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "see", "parameters": {"type": "object"}}}
    messages = [
        *NONE,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [text("seen: "), image(URLS[0])]},
    ]
    answer = chat(running, messages, tools=[tool])
    without = [*messages[:2], {"role": "tool", "tool_call_id": "a", "content": "seen: "}]
    more = chat(running, without, tools=[tool])["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens"] > more + 20


# --- other dialects


def base64_source(data: str) -> JSON:
    return {"type": "base64", "media_type": "image/png", "data": data}


def marked(prompt: str, data: list[str]) -> JSON:
    return {"prompt_string": prompt, "multimodal_data": data}


def test_responses(running: Running) -> None:
    parts = [
        {"type": "input_text", "text": "Look at "},
        {"type": "input_image", "image_url": URLS[0], "detail": "auto"},
        {"type": "input_text", "text": " what is it?"},
    ]
    asked = {"input": user(*parts), "temperature": 0, "max_output_tokens": 9}
    response = post(running, "/v1/responses", **asked).json()
    whole = chat(running, ONE)
    assert response["output"][0]["content"][0]["text"] == content(whole)
    assert response["usage"]["input_tokens"] == whole["usage"]["prompt_tokens"]
    # A stored response keeps its image.
    more = {"input": "Say yes.", "previous_response_id": response["id"]}
    second = post(running, "/v1/responses", **asked | more).json()
    answered = {"role": "assistant", "content": content(whole)}
    expected = chat(running, [*ONE, answered, {"role": "user", "content": "Say yes."}])
    assert second["output"][0]["content"][0]["text"] == content(expected)
    assert second["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]


def test_responses_of_functions_and_files(running: Running) -> None:
    seen = [{"type": "input_image", "image_url": URLS[0]}]
    items: list[JSON] = [
        {"role": "user", "content": "See."},
        {"type": "function_call", "call_id": "a", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": seen},
    ]
    counts = []
    for output in (seen, "none"):
        items[2]["output"] = output
        answer = post(running, "/v1/responses", input=items, max_output_tokens=3).json()
        counts.append(answer["usage"]["input_tokens"])
    assert counts[0] > counts[1] + 20
    file = user({"type": "input_image", "file_id": "file-1"})
    assert "file_id" in refusal(post(running, "/v1/responses", input=file))


def test_messages(running: Running) -> None:
    parts = [text("Look at"), {"type": "image", "source": base64_source(CODED[0])}]
    asked = {"messages": user(*parts), "max_tokens": 9, "temperature": 0}
    answer = post(running, "/v1/messages", **asked).json()
    same = chat(running, user(text("Look at"), image(URLS[0])))
    assert answer["content"][0]["text"] == content(same)
    used = answer["usage"]
    count = used["input_tokens"] + used["cache_read_input_tokens"]
    assert count == same["usage"]["prompt_tokens"]
    counted = post(running, "/v1/messages/count_tokens", messages=user(*parts)).json()
    assert counted["input_tokens"] == count


def test_messages_with_results_of_tools(running: Running) -> None:
    """Screenshots of agents are images in results."""

    def tokens(result: Any, **more: Any) -> int:
        messages = [
            {"role": "user", "content": "See."},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "a", "name": "see", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": result, **more},
                text("What is it?")]},
        ]  # fmt: skip
        found: int = post(running, "/v1/messages/count_tokens", messages=messages).json()[
            "input_tokens"
        ]
        return found

    picture = {"type": "image", "source": base64_source(CODED[0])}
    assert tokens([text("seen"), picture]) > tokens([text("seen")]) + 20
    assert tokens([picture], is_error=True) > tokens([], is_error=True) + 20


def test_messages_by_url_and_other_sources(running: Running) -> None:
    def error(source: Any) -> str:
        messages = user({"type": "image", "source": source})
        return refusal(post(running, "/v1/messages", messages=messages, max_tokens=3))

    assert "--image-hosts" in error({"type": "url", "url": "https://elsewhere.test/a.png"})
    assert "send the image in base64" in error({"type": "file", "file_id": "f"})
    assert "base64 or url" in error({"type": "base64"})
    assert "base64 or url" in error("https://elsewhere.test/a.png")
    assert "base64" in error(base64_source("@"))


def test_ollama(running: Running) -> None:
    options = {"temperature": 0, "num_predict": 9, "repeat_penalty": 1.0}
    asked = {"options": options, "stream": False}
    messages = [{"role": "user", "content": "what is it?", "images": CODED[:1]}]
    answer = post(running, "/api/chat", messages=messages, **asked).json()
    same = chat(running, user(image(URLS[0]), text("what is it?")))
    assert answer["message"]["content"] == content(same)
    assert answer["prompt_eval_count"] == same["usage"]["prompt_tokens"]
    generated = post(running, "/api/generate", prompt="what is it?", images=CODED[:1], **asked)
    assert generated.json()["response"] == content(same)
    assert "context" not in generated.json()
    alone = post(running, "/api/generate", images=CODED[:1], **asked).json()
    assert alone["response"]
    streamed = post(running, "/api/chat", messages=messages, options=options).text
    pieces = [json.loads(line)["message"]["content"] for line in streamed.splitlines()]
    assert "".join(pieces) == content(same)


def test_wrong_images_of_ollama(running: Running) -> None:
    for given, reason in [(URLS[0], "base64 alone"), ("https://a.test/b", "base64 alone"),
                          ("@", "base64"), ("", "empty")]:  # fmt: skip
        messages = [{"role": "user", "content": "Look", "images": [given]}]
        assert reason in refusal(post(running, "/api/chat", messages=messages))
    raw = post(running, "/api/generate", prompt="Look", images=CODED[:1], raw=True)
    assert "images" in refusal(raw)


def test_llamacpp_completion(running: Running) -> None:
    def answers(prompt: Any) -> list[str]:
        response = post(running, "/completion", prompt=prompt, temperature=0, n_predict=9)
        assert response.status_code == 200, response.text
        found = response.json()
        return [each["content"] for each in (found if isinstance(found, list) else [found])]

    whole = "<|im_start|>user: Look at <__media__> what is it?<end_of_utterance>\nAssistant:"
    (one,) = answers(marked(whole, CODED[:1]))
    assert one == content(chat(running, ONE))
    two = "One <__media__> and two <__media__>"
    texts = ["Say", marked(whole, CODED[:1]), marked(two, CODED), marked("Say", [])]
    several = answers(texts)
    assert several[1] == one
    assert several[0] == several[3] == answers("Say")[0]
    assert several[2] == answers(marked(two, CODED))[0] != answers(marked(two, CODED[::-1]))[0]


def test_wrong_data_of_llamacpp(running: Running) -> None:
    for prompt in (marked("none", CODED[:1]), marked("<__media__>" * 2, CODED[:1])):
        assert "<__media__>" in refusal(post(running, "/completion", prompt=prompt))
    for data in ("@", "", "malformed"):
        refusal(post(running, "/completion", prompt=marked("<__media__>", [data])))
    three = marked("<__media__>" * 3, [*CODED, CODED[0]])
    assert "--limit-images" in refusal(post(running, "/completion", prompt=three))
    embedded = post(running, "/embeddings", content=marked("<__media__>", CODED[:1]))
    assert "images have no embeddings here" in refusal(embedded)


def test_placeholders_in_raw_prompts_are_refused(running: Running) -> None:
    """They would be tokens without an image."""
    for body in ({"prompt": "an <image> here"}, {"prompt": [5, 290, 6]}):
        assert "image" in refusal(post(running, "/v1/completions", **body))


def test_what_models_can_do(running: Running) -> None:
    listed = httpx.get(f"{running.url}/v1/models").json()["data"]
    capabilities = {each["id"]: each["capabilities"] for each in listed}
    assert "multimodal" in capabilities["sees"]
    assert "multimodal" not in capabilities["reads"]
    for name, sees in (("sees", True), ("reads", False)):
        props = httpx.get(f"{running.url}/props?model={name}").json()
        assert props["modalities"] == {"vision": sees, "audio": False}
        assert props["media_marker"] == "<__media__>"
        shown = post(running, "/api/show", model=name).json()
        assert ("vision" in shown["capabilities"]) == sees


def test_rendering_and_counting(running: Running) -> None:
    rendered = post(running, "/apply-template", messages=ONE).json()["prompt"]
    assert rendered.count("<image>") == 1
    counted = post(running, "/tokenize", messages=ONE).json()
    assert counted["count"] == chat(running, ONE)["usage"]["prompt_tokens"]
