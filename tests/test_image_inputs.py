"""Images in Python: what message parts take, what other methods say, and asyncio."""

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jinfer import LLM, AsyncLLM, RequestError
from jinfer.api.image_inputs import (
    MAX_IMAGE_BYTES,
    EncodedPrompt,
    decode_base64,
    read_image,
    take_images,
)

GOLDENS = Path(__file__).parent / "goldens"
GOLDEN, IMAGES = GOLDENS / "vlm_smolvlm", GOLDENS / "vlm_images"
FILE = IMAGES / "img0.png"
pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(GOLDEN, dtype="float32", progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def golden() -> Any:
    """The arrays of transformers: ids of the prompts, and greedy answers."""
    return np.load(GOLDEN / "expected.npz")


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def image(given: Any) -> dict[str, Any]:
    return {"type": "image", "image": given}


def one(given: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [text("Look at "), image(given), text(" what is it?")]}]


GREEDY: dict[str, Any] = {"strategy": "greedy", "max_tokens": 12, "ignore_eos": True}
URL = "data:image/png;base64," + base64.b64encode(FILE.read_bytes()).decode()
SOURCES: dict[str, Any] = {
    "a path's text": str(FILE),
    "a path": FILE,
    "bytes": FILE.read_bytes(),
    "a bytearray": bytearray(FILE.read_bytes()),
    "a view": memoryview(FILE.read_bytes()),
    "a data URL": URL,
    "Pillow": Image.open(FILE),
    "an array": np.asarray(Image.open(FILE).convert("RGB")),
    "a strided array": np.asarray(Image.open(FILE).convert("RGB"))[::-1].copy()[::-1],
    "an array of JAX": jnp.asarray(np.asarray(Image.open(FILE).convert("RGB"))),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_all_forms_give_the_answer_of_transformers(kind: str, llm: LLM, golden: Any) -> None:
    answer = llm.chat(one(SOURCES[kind]), **GREEDY)
    assert answer.token_ids == golden["greedy_a"].tolist()
    assert answer.usage.prompt_tokens == golden["input_ids_a"].size


def test_the_form_of_requests(llm: LLM, golden: Any) -> None:
    messages = one(None)
    messages[0]["content"][1] = {"type": "image_url", "image_url": {"url": URL}}
    assert llm.chat(messages, **GREEDY).token_ids == golden["greedy_a"].tolist()


def test_generate_and_stream_of_several_prompts(llm: LLM, golden: Any) -> None:
    other = np.asarray(Image.open(IMAGES / "img1.png").convert("RGB"))
    parts = [text("One "), image(FILE), text(" and two "), image(other), text(" compare.")]
    two = [{"role": "user", "content": parts}]
    none = [{"role": "user", "content": "Say yes."}]
    found = llm.generate([one(FILE), two, none], **GREEDY)
    assert [each.token_ids for each in found] == [golden[f"greedy_{n}"].tolist() for n in "abc"]
    streamed = [id for chunk in llm.stream(two, **GREEDY) for id in chunk.token_ids]
    assert streamed == golden["greedy_b"].tolist()


def test_asyncio(llm: LLM, golden: Any) -> None:
    async def answers() -> list[Any]:
        model = AsyncLLM(llm)
        return await asyncio.gather(*(model.chat(one(FILE), **GREEDY) for _ in range(3)))

    assert [each.token_ids for each in asyncio.run(answers())] == [golden["greedy_a"].tolist()] * 3


@pytest.mark.parametrize("method", ["encode", "encode_chat", "logits", "hidden", "embed", "tokens"])
def test_other_methods_do_not_read_images(method: str, llm: LLM) -> None:
    given = one(FILE) if method in ("encode", "encode_chat", "tokens") else [one(FILE)]
    with pytest.raises(RequestError, match="generate, stream and chat"):
        getattr(llm, method)(given)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "an image is None"),
        (3, "an image is 3"),
        ({"path": "a.png"}, "an image is None"),
        ("none.png", "none.png: cannot be read"),
        (IMAGES, "is not a regular file"),
        ("https://elsewhere.test/a.png", "not downloaded here"),
        ("data:image/png;base64,@", "not valid base64"),
        ("data:image/png,a", "is written data:image/png;base64,"),
        (b"", "the image is empty"),
        (b"no image", "is not one of PNG"),
        (np.zeros((4, 4), np.float32), "an array of float32 4x4 is not an image"),
        (np.zeros((4, 4, 2), np.uint8), "an array of uint8 4x4x2 is not an image"),
    ],
)
def test_wrong_images(given: Any, reason: str, llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(one(given))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_parts_are_named(llm: LLM) -> None:
    for part in ({"type": "audio"}, {"type": "text"}, 3):
        with pytest.raises(RequestError, match="message 0 has a part of type"):
            llm.chat([{"role": "user", "content": [image(FILE), part]}])


def test_a_checkpoint_of_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        LLM("smollm2_135m_instruct", progress=False) as llm,
        pytest.raises(ValueError, match="cannot see images"),
    ):
        llm.chat(one(FILE))


def test_base64_is_checked_before_it_is_decoded() -> None:
    with pytest.raises(RequestError, match="larger than"):
        decode_base64("A" * (MAX_IMAGE_BYTES // 3 * 4 + 8))
    padding = ("A", "AA", "AA=", "AAA==", "AAAA=", "AAAA====", "AA==AA==", "====")
    for wrong in (*padding, "AAAA\n", " AAAA", "AA-_", "Aé=="):
        with pytest.raises(RequestError, match="base64"):
            decode_base64(wrong)
    assert decode_base64("AAECAw==") == bytes(range(4))


def test_images_are_taken_out_of_messages_in_order() -> None:
    first, second = np.zeros((2, 2), np.uint8), np.ones((2, 2), np.uint8)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [image(first), text("a"), image(b"bytes")]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [image(second)]},
    ]
    taken, images = take_images(messages)
    assert [images[0] is first, images[1] == b"bytes", images[2] is second] == [True] * 3
    assert taken[0]["content"] == [{"type": "image"}, text("a"), {"type": "image"}]
    assert taken[1] is messages[1]
    assert messages[0]["content"][0]["image"] is first


def test_a_prompt_moves_behind_other_tokens(llm: LLM) -> None:
    prompt = llm.session.encode_conversation(one(FILE))
    moved = prompt.after([1, 2, 3], skip=1)
    assert moved.ids == [1, 2, 3, *prompt.ids[1:]]
    for before, after in zip(prompt.images[0].runs, moved.images[0].runs, strict=True):
        assert after == (before[0] + 2, before[1])
    assert len(EncodedPrompt([1, 2])) == 2


def test_arrays_without_a_copy() -> None:
    array = np.zeros((2, 2), np.uint8)
    assert read_image(array) is array
