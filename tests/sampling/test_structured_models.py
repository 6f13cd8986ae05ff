"""Whole answers of models under constraints, by a plain loop over all logits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM
from jinfer.sampling.structured import compile_constraint
from jinfer.tokenizer import Tokenizer
from jinfer.tokenizer.llama2c_tokenizer import load_llama2c
from tests.sampling.test_structured_schemas import check_valid
from tests.sampling.vocabularies import tokenizer

ROOT = Path(__file__).parents[2]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}


def answer(
    llm: LLM, found: Tokenizer, prompt: list[int], temperature: float, seed: int, **given: Any
) -> tuple[str, int]:
    """The answer's text, and how many tokens the model had to choose."""
    rng = np.random.default_rng(seed)
    matcher = compile_constraint(found, **given).start()
    words = np.zeros(-(-found.vocab_size // 32), np.uint32)
    chosen = 0
    while not matcher.finished and len(matcher.tokens) < 120:
        if forced := matcher.forced():
            for token in forced:
                matcher.advance(token)
            continue
        logits = llm.logits([[*prompt, *matcher.tokens]])[0][-1].astype(np.float64)
        matcher.mask(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(logits)]
        kept = np.where(bits == 1, logits[: len(bits)], -np.inf)
        if temperature:
            kept = kept / temperature - np.log(-np.log(rng.random(len(kept))))
        matcher.advance(int(np.argmax(kept)))
        chosen += 1
    assert matcher.finished
    tokens = [token for token in matcher.tokens if token not in found.eos_ids]
    text = found.decode([*prompt, *tokens]).removeprefix(found.decode(prompt))
    return text, chosen


@pytest.fixture(scope="module")
def smollm2() -> LLM:
    tokenizer("smollm2")  # or skip
    return LLM(ROOT / "specs" / "smollm2_135m_instruct.toml")


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.soak)])
def test_smollm2(smollm2: LLM, temperature: float) -> None:
    found = smollm2.tokenizer
    assert found is not None
    prompt = smollm2.encode_chat([{"role": "user", "content": "Describe Alice, aged 30, as JSON."}])
    text, chosen = answer(smollm2, found, prompt, temperature, 0, json_schema=PERSON)
    check_valid(text, PERSON)
    assert chosen < len(found.encode(text))  # names of properties came by themselves
    if not temperature:
        assert {"name": "Alice", "age": 30}.items() <= json.loads(text).items()
    question = [{"role": "user", "content": "Is the sky blue? Answer with one word."}]
    prompt = smollm2.encode_chat(question)
    choice = ["Yes", "No", "Maybe"]
    assert answer(smollm2, found, prompt, temperature, 0, choice=choice)[0] in choice
    regex = r"[A-Z][a-z]{2,9}( [a-z]{2,9}){1,2}\."
    assert re.fullmatch(regex, answer(smollm2, found, prompt, temperature, 1, regex=regex)[0])


def test_stories(goldens: Path) -> None:
    """A vocabulary of 512: pieces that begin texts with a space, and all single bytes."""
    found = load_llama2c(goldens / "tok_llama2c" / "tokenizer.bin", 512)
    llm = LLM(goldens / "stories260K" / "model.bin")
    regex = r"Once upon a time,( [a-z]{1,9}){2,5}\."
    for seed in range(3):
        text, _ = answer(llm, found, found.encode("Story:"), 1.0, seed, regex=regex)
        assert re.fullmatch(regex, text)
