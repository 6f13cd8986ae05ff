"""Fill-in-the-middle over HTTP and in Python, by tokens that stand for those of other models."""

from collections.abc import Iterator
from dataclasses import replace

import openai
import pytest

from jinfer import SamplingParams
from jinfer.tokenizer.fill_in_middle import infill_prompt
from jinfer.tokenizer.fim_tokens import FimTokens
from tests.server.running import Running

BEFORE, AFTER = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
SHORT = SamplingParams(max_tokens=8)


@pytest.fixture
def fim(smol: Running) -> Iterator[FimTokens]:
    """The model has no such tokens; any three will do to see where they stand."""
    tokenizer = smol.model().session.tokenizer
    names = ("<repo_name>", "<file_sep>", "<filename>", "<jupyter_start>")
    pre, suf, mid, end = map(tokenizer.id, names)
    assert pre is not None
    assert suf is not None
    tokens = FimTokens(pre, suf, mid, "psm", ends=(pre, suf, end or 0))
    tokenizer.__dict__["fim"] = tokens
    yield tokens
    del tokenizer.__dict__["fim"]


def test_python(smol: Running, fim: FimTokens) -> None:
    llm = smol.model().llm
    ids = infill_prompt(smol.model().session.tokenizer, BEFORE, AFTER)
    (expected,) = llm.generate(ids, SHORT)
    (found,) = llm.generate(BEFORE, SHORT, suffix=AFTER)
    assert found.text == expected.text
    assert "".join(one.text for one in llm.stream(BEFORE, SHORT, suffix=AFTER)) == expected.text
    # What the tokens say ends the text, as here its first token would.
    first = expected.token_ids[0]
    smol.model().session.tokenizer.__dict__["fim"] = FimTokens(
        fim.prefix, fim.suffix, fim.middle, "psm", ends=(first,)
    )
    assert llm.generate(BEFORE, SHORT, suffix=AFTER)[0].text == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_suffix(smol: Running, client: openai.OpenAI, fim: FimTokens, stream: bool) -> None:
    (expected,) = smol.model().llm.generate(BEFORE, SHORT, suffix=AFTER)
    asked = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 8, "temperature": 0}
    if stream:
        pieces = client.completions.create(model="smol", stream=True, **asked)  # type: ignore[call-overload]
        assert "".join(piece.choices[0].text for piece in pieces) == expected.text
        return
    answer = client.completions.create(model="smol", **asked)  # type: ignore[call-overload]
    assert answer.choices[0].text == expected.text
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens


def test_infill(smol: Running, fim: FimTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = smol.model().session.tokenizer
    files = [("a.py", "x = 1\n")]
    ids = infill_prompt(tokenizer, BEFORE, AFTER, files)
    (expected,) = smol.model().llm.generate(ids, SHORT)
    head, end = BEFORE[:-7], BEFORE[-7:]
    body = {
        "input_prefix": head,
        "input_suffix": AFTER,
        "prompt": end,
        "input_extra": [{"filename": "a.py", "text": "x = 1\n"}],
        "n_predict": 8,
        "temperature": 0,
    }
    with smol.client() as http:
        answer = http.post("/infill", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert (found["content"], found["tokens_evaluated"]) == (expected.text, len(ids))
        assert found["stop_type"] == "limit"
        lines = http.post("/infill", json=body | {"stream": True}).text.splitlines()
        assert sum('"stop":true' in line for line in lines) == 1
        # A whole file is cut to what the context has room for.
        session = smol.model().session
        monkeypatch.setattr(session, "opened", replace(session.opened, context=128))
        long = http.post("/infill", json=body | {"input_prefix": "x = 1\n" * 500})
        assert long.json()["tokens_evaluated"] == 128 - 8


def test_what_is_refused(smol: Running) -> None:
    with smol.client() as http:
        answer = http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
        assert answer.status_code == 400
        assert "no tokens for fill-in-the-middle" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "input_suffix"
        for change, param in (
            ({"input_prefix": None}, "input_prefix"),
            ({"prompt": [1]}, "prompt"),
            ({"input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
        ):
            answer = http.post("/infill", json={"input_prefix": "a", "input_suffix": "", **change})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        body = {"prompt": "a", "suffix": "b", "echo": True}
        assert http.post("/v1/completions", json=body).json()["error"]["param"] == "echo"
