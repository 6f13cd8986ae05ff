"""What lm-eval 0.4.13 sent for a task of each kind, and what it reads of the answers.

lm_eval.json was recorded from its `local-completions` and `local-chat-completions`; the request
with `max_tokens: 0` is its older form.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import SamplingParams
from tests.server.running import Running

RECORDED = json.loads(Path(__file__).with_name("lm_eval.json").read_text())
SCORED = [item for item in RECORDED if "contexts" in item]
TEXTS = [item for item in RECORDED if "contexts" not in item and "prompt" in item["body"]]
CHATS = [item for item in RECORDED if "messages" in item["body"]]


def answered(smol: Running, item: dict[str, Any]) -> list[dict[str, Any]]:
    with smol.client() as http:
        answer = http.post(item["path"], json=item["body"])
    assert answer.status_code == 200, answer.text
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    assert [choice["index"] for choice in choices] == [*range(len(choices))]
    return choices


@pytest.mark.parametrize("item", SCORED)
def test_how_likely_the_ends_of_prompts_are(smol: Running, item: dict[str, Any]) -> None:
    llm = smol.model().llm
    prompts, limit = item["body"]["prompt"], item["body"]["max_tokens"]
    choices = answered(smol, item)
    greedy = []
    for ids, context, choice in zip(prompts, item["contexts"], choices, strict=True):
        found = choice["logprobs"]
        end = -1 if limit else None
        logprobs = found["token_logprobs"][context:end]
        tops = found["top_logprobs"][context:end]
        assert len(logprobs) == len(tops) == len(ids) - context
        # It sums them up, and takes the end for greedy where each is the highest of its place.
        expected = llm.score([ids])[0][context - 1 :]
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)
        best = np.argmax(llm.logits([ids])[0][context - 1 : -1], axis=-1)
        likeliest = [own == max(top.values()) for own, top in zip(logprobs, tops, strict=True)]
        assert likeliest == (best == ids[context:]).tolist()
        greedy += likeliest
        assert len(found["tokens"]) == len(found["text_offset"]) == len(ids) + limit
        assert choice["text"].startswith(llm.session.tokenizer.decode(ids))
    assert len(prompts) == 1 or set(greedy) == {True, False}


def test_parts_of_characters_differ(smol: Running) -> None:
    """Tokens that are bytes of a character look alike as texts, and the likeliest would be lost."""
    ids = smol.model().llm.encode("\u6f22\U0001f600\u5b57\U0001f431")
    body = {"prompt": [ids], "max_tokens": 0, "echo": True, "logprobs": 20}
    (choice,) = answered(smol, {"path": "/v1/completions", "body": body})
    tops = choice["logprobs"]["top_logprobs"][1:]
    assert all(len(top) in (20, 21) for top in tops)
    assert any(key.startswith("bytes:\\x") for top in tops for key in top)


@pytest.mark.parametrize("item", TEXTS)
def test_continued_texts(smol: Running, item: dict[str, Any]) -> None:
    body = item["body"]
    how = SamplingParams(max_tokens=body["max_tokens"], stop=tuple(body["stop"]), temperature=0.0)
    expected = smol.model().llm.generate(body["prompt"], how)
    assert [choice["text"] for choice in answered(smol, item)] == [item.text for item in expected]


@pytest.mark.parametrize("item", CHATS)
def test_answered_messages(smol: Running, item: dict[str, Any]) -> None:
    body = item["body"]
    how = SamplingParams(max_tokens=body["max_tokens"], stop=tuple(body["stop"]), temperature=0.0)
    expected = smol.model().llm.chat(body["messages"], how)
    assert [choice["message"]["content"] for choice in answered(smol, item)] == [expected.text]
