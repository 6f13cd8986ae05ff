"""What a grammar of calls lets through is read as calls that keep to their tools' schemas."""

import json
from typing import Any

import numpy as np
import pytest

from jinfer.sampling.structured import compile_constraint
from jinfer.server.tool_parsers.call_format import MAX_CALLS, LarkGrammar, strict_parameters
from jinfer.server.tool_parsers.parser_registry import REASONING_FORMATS, TOOL_CALL_FORMATS
from jinfer.tokenizer import Tokenizer
from tests.server.running import ROOT
from tests.server.tool_parsers.reading import TOOLS, parser, read

_WORDS = {"type": "string", "enum": ["a b", 'c "', "d\nef"]}
SOME: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": _WORDS,
            "days": {"type": "integer", "minimum": 0, "maximum": 20},
            "exact": {"$ref": "#/$defs/flag"},
            "unit": {"const": "C"},
        },
        "required": ["city", "exact"],
        "$defs": {"flag": {"type": "boolean"}},
    },
    "now": {"type": "object", "properties": {}},
    "any.thing-1": {"properties": {"city": {**_WORDS, "description": "which"}}},
}
TEMPLATES = {
    "mistral": ["", "[ARGS]"],
    "deepseek": ["", "```json"],
    "command": ["", "<|START_ACTION|>"],
}
BEGUN = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from jinfer.loader.open_model import open_model

    opened = open_model(ROOT / "specs" / "smollm2_135m_instruct.toml", {})
    assert opened.tokenizer is not None
    return opened.tokenizer


def walked(tokenizer: Tokenizer, grammar: str, chance: np.random.Generator, begun: str = "") -> str:
    """A text that the grammar lets through, chosen by chance among all tokens that may follow."""
    matcher = compile_constraint(tokenizer, grammar=grammar).start()
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    ids: list[int] = tokenizer.encode(begun, special=False)
    for id in ids:
        matcher.advance(id)
    while not matcher.finished and len(ids) < 2000:
        matcher.mask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        choice = int(chance.choice(np.flatnonzero(bits)))
        if choice in tokenizer.eos_ids:
            break
        matcher.advance(choice)
        ids.append(choice)
    assert matcher.may_end
    return tokenizer.decode(ids, skip_special=False)


def check(name: str, arguments: str) -> None:
    found, schema = json.loads(arguments), strict_parameters(SOME[name])
    assert found.keys() <= schema["properties"].keys()
    assert set(schema.get("required", ())) <= found.keys()
    for key, value in found.items():
        match key:
            case "city":
                assert value in _WORDS["enum"]
            case "days":
                assert 0 <= value <= 20
            case "exact":
                assert value in (True, False)
            case _:
                assert value == "C"


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("name", "template"), [(n, t) for n in TOOL_CALL_FORMATS for t in TEMPLATES.get(n, [""])]
)
def test_a_call_comes(tokenizer: Tokenizer, name: str, template: str, several: bool) -> None:
    chance = np.random.default_rng(0)
    counts = set()
    for _ in range(16):
        lark = LarkGrammar(tokenizer)
        lark.rule("start", TOOL_CALL_FORMATS[name].grammar(lark, SOME, template, several))
        # By chance a thought would hardly ever end.
        text = walked(
            tokenizer, str(lark), chance, BEGUN if TOOL_CALL_FORMATS[name].has_reasoning else ""
        )
        found = read(parser(TOOL_CALL_FORMATS[name], SOME), [text])
        assert found.content == ""
        assert found.void == 0
        for call in found.calls:
            check(*call)
        counts.add(len(found.calls))
    assert min(counts) >= 1
    assert max(counts) <= (MAX_CALLS if several else 1)
    if several and name not in ("llama", "harmony"):
        assert max(counts) > 1


def test_marks_are_the_tokens_that_a_vocabulary_has(tokenizer: Tokenizer) -> None:
    lark = LarkGrammar(tokenizer)
    assert lark.text("a<|im_start|>b") == '"a" <[1]> "b"'
    lark.rule("start", f'"x" {lark.upto("<|im_start|>")} "y"')
    matcher = compile_constraint(tokenizer, grammar=str(lark)).start()
    for id in (tokenizer.id("x"), tokenizer.id("z"), 1, tokenizer.id("y")):
        assert id is not None
        matcher.advance(id)
    assert matcher.finished


@pytest.mark.parametrize("thinking", REASONING_FORMATS)
def test_a_thought_before_a_call(tokenizer: Tokenizer, thinking: Any) -> None:
    def accepts(state: Any, text: str) -> bool:
        lark = LarkGrammar(tokenizer)
        thought = thinking.grammar(lark, state)
        calls = TOOL_CALL_FORMATS["llama"].grammar(lark, {"now": {}}, "", False)
        lark.rule("start", f"{thought} {calls}")
        matcher = compile_constraint(tokenizer, grammar=str(lark)).start()
        try:
            for id in tokenizer.encode(text, special=False):
                matcher.advance(id)
        except ValueError:
            return False
        return matcher.finished

    call = '{"name": "now", "parameters": {}}'
    assert accepts("closed", call)
    assert not accepts("closed", f"{thinking.begin}x{thinking.end}{call}")
    assert accepts("free", call)
    assert accepts("free", f"{thinking.begin}\nx < y\n{thinking.end}\n\n{call}")
    assert accepts("open", f"x{thinking.end}\n\n{call}")
    assert not accepts("open", call)


def test_json_after_the_thoughts_of_harmony(tokenizer: Tokenizer) -> None:
    harmony = TOOL_CALL_FORMATS["harmony"]
    lark = LarkGrammar(tokenizer)
    assert harmony.answer is not None
    lark.rule("start", harmony.answer(lark, lark.json({"enum": [1, 22]})))
    text = walked(tokenizer, str(lark), np.random.default_rng(0), BEGUN)
    found = read(parser(harmony), [text])
    assert found.reasoning == "Hm."
    assert found.content in ("1", "22")


def test_the_schema_of_arguments() -> None:
    assert strict_parameters(None) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
    assert strict_parameters(TOOLS["weather"])["additionalProperties"] is False
    assert "additionalProperties" not in strict_parameters({"type": "object"})
    free = {"type": "object", "properties": {}, "additionalProperties": True}
    assert strict_parameters(free) == free
