"""Schemas of forced tool calls: enforced keywords, and reported other keywords."""

import json
from typing import Any

import pytest

from jinfer.sampling.structured import ConstraintError, compile_constraint
from jinfer.server.core.tool_calls import OfferedTools
from jinfer.server.http.http_errors import ApiError
from jinfer.server.tool_parsers.call_format import LarkGrammar
from jinfer.server.tool_parsers.json_formats import HERMES
from jinfer.tokenizer import Tokenizer
from tests.server.running import ROOT, Running

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "What is the weather like in Rome?"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from jinfer.loader.open_model import open_model

    opened = open_model(ROOT / "specs" / "smollm2_135m_instruct.toml", {})
    assert opened.tokenizer is not None
    return opened.tokenizer


def bound(tokenizer: Tokenizer, schema: Any) -> tuple[Any, list[str]]:
    """Return the enforced schema of a tool's only argument, and the reported keywords."""
    told: list[str] = []

    def made(tools: Any) -> str:
        lark = LarkGrammar(tokenizer)
        lark.rule("start", HERMES.grammar(lark, tools, "", False))
        return str(lark)

    given = {"properties": {"a": schema, "b": {"type": "boolean"}}}
    offer = OfferedTools({"f": given}, {"f": "tools.0.function.parameters"}, required=True)
    tools, _ = offer.grammar(tokenizer, made, lambda field, why: told.append(field))
    assert tools["f"]["properties"]["b"] == {"type": "boolean"}
    return tools["f"]["properties"]["a"], told


LIST = {"type": "array", "items": {"type": "string"}}
TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "left", "keys"),
    [
        ({**LIST, "uniqueItems": True}, LIST, ["uniqueItems"]),
        ({**LIST, "uniqueItems": False}, LIST, []),
        ({"type": "object", "propertyNames": TEXT}, {"type": "object"}, ["propertyNames"]),
        ({**TEXT, "not": {"const": "a"}, "if": {}, "then": {}}, TEXT, ["not", "if", "then"]),
        ({"type": "object", "dependentRequired": {}}, {"type": "object"}, ["dependentRequired"]),
        ({**TEXT, "pattern": "^(?!a)b"}, TEXT, ["pattern"]),
        ({**TEXT, "pattern": r"\p{Nonsense}"}, TEXT, ["pattern"]),
        ({**TEXT, "format": "binary"}, TEXT, ["format"]),
        ({**TEXT, "format": "date"}, {**TEXT, "format": "date"}, []),
        ({"$ref": "https://a.b/c"}, {}, ["$ref"]),
        ({"oneOf": [TEXT, {**TEXT, "minLength": 3}]}, {"anyOf": [TEXT, {**TEXT, "minLength": 3}]},
         ["oneOf"]),
        ({"anyOf": [{**TEXT, "format": "path"}, {"type": "null"}]},
         {"anyOf": [TEXT, {"type": "null"}]}, ["anyOf/0/format"]),
    ],
)  # fmt: skip
def test_unsupported_schema_keywords(
    tokenizer: Tokenizer, schema: Any, left: Any, keys: list[str]
) -> None:
    found, told = bound(tokenizer, schema)
    assert found == left
    assert told == [f"tools.0.function.parameters/properties/a/{key}" for key in keys]


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "strange"}, "type cannot be"),
        ({"$ref": "#/$defs/none"}, r"\$ref to #/\$defs/none"),
        ({"enum": []}, "enum is empty"),
    ],
)
def test_what_is_no_schema_names_the_tool(tokenizer: Tokenizer, schema: Any, word: str) -> None:
    with pytest.raises(
        ApiError, match=f"the tool f: json_schema at /properties/a: {word}"
    ) as found:
        bound(tokenizer, schema)
    assert found.value.param == "tools.0.function.parameters"


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def test_a_call_of_a_tool_with_a_set(smol: Running) -> None:
    given = tool(properties={"a": {"enum": [1, 2]}}, required=["a"], uniqueItems=True)
    body = {"messages": ASKED, "tools": [given], "tool_choice": "required", "max_tokens": 60,
            "parallel_tool_calls": False, "temperature": 0}  # fmt: skip
    with smol.client() as http:
        answer = http.post(CHAT, json=body)
        assert answer.headers["x-jinfer-ignored"] == "tools.0.function.parameters/uniqueItems"
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
        # The answer is calls, whatever words would have to look like.
        more = {"response_format": {"type": "json_object"}, "tools": [tool()]}
        answer = http.post(CHAT, json=body | more)
        assert answer.headers["x-jinfer-ignored"] == "response_format"
        assert answer.json()["choices"][0]["message"]["tool_calls"]
        text = {
            "text": {"format": {"type": "json_object"}},
            "input": ASKED,
            "max_output_tokens": 60,
        }
        function = {"type": "function", "name": "f"}
        answer = http.post(
            "/v1/responses", json={**text, "tools": [function], "tool_choice": "required"}
        )
        assert answer.headers["x-jinfer-ignored"] == "text.format"
        assert answer.json()["output"][0]["type"] == "function_call"


def test_the_same_where_the_service_is_strict(strict: Running) -> None:
    body = {"messages": ASKED, "tool_choice": "required"}
    with strict.client() as http:
        for schema in ({"uniqueItems": True}, {"properties": {"a": {**TEXT, "pattern": "(?!a)"}}}):
            error = http.post(CHAT, json={**body, "tools": [tool(**schema)]}).json()["error"]
            assert error["param"].startswith("tools.0.function.parameters/")
            assert "the tool f: " in error["message"]


def accepted(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether a text is a whole answer that a grammar lets through."""
    matcher = compile_constraint(tokenizer, grammar=grammar).start()
    try:
        for id in tokenizer.encode(text, special=False):
            matcher.advance(id)
    except ConstraintError:
        return False
    return matcher.may_end


def test_a_call_or_json(smol: Running) -> None:
    """With a format and optional tools, an answer is a call or matches the format."""
    from jinfer.server.core.chat_schemas import ChatRequest
    from jinfer.server.core.tool_calls import output_parsing

    body = ChatRequest.model_validate({"messages": ASKED, "tools": [tool(properties={})]})
    llm = smol.model().llm
    ids = llm.encode_chat(ASKED)
    opened = llm.session.opened
    template = opened.conversation.for_tools()
    read = output_parsing(body, template, opened.tokenizer, ids, lambda field, why: None)
    assert read.param_changes == {}
    assert read.constrained is not None
    read = read.constrained({"type": "object", "properties": {"x": TEXT}, "required": ["x"]})
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    fits = [accepted(llm.session.tokenizer, read.param_changes["grammar"], text)
            for text in (call, '{"x": "y"}', "No.", '{"y": 1}')]  # fmt: skip
    assert fits == [True, True, False, False]
    parser = read.parser()
    delta = parser.push(call)
    assert [call.name for call in delta.calls if call.name] == ["f"]
    assert not delta.content
