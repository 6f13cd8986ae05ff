"""Earlier calls as templates want them, and tools for templates without them."""

import json
from typing import Any

import pytest

from jinfer.loader.open_model import open_model
from jinfer.modelspec.spec_errors import SpecError
from jinfer.server.serve_flags import model_sources_of, parse_options
from jinfer.server.tool_parsers.output_deltas import WholeCallsParser
from jinfer.server.tool_parsers.parser_registry import (
    TOOL_CALL_FORMATS,
    reasoning_format,
    special_token_ids,
    tool_call_format,
)
from jinfer.server.tool_parsers.template_shape import (
    CallShape,
    accepts_system,
    convert_messages,
    detect_shape,
    tools_as_text,
    tools_in_system,
)
from jinfer.template import ChatTemplate
from jinfer.tokenizer import Tokenizer
from tests.server.running import ROOT
from tests.server.tool_parsers.reading import parser
from tests.server.tool_parsers.test_grammar import tokenizer  # noqa: F401

LOOP = "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}CALLS{% else %}"
LOOP += "{{ m.content }}{% endif %}{% endfor %}"
CALLS = "{% for c in m.tool_calls %}{{ c.function.name }}WRITTEN{% endfor %}"


def template(written_: str) -> str:
    """A template that writes calls in some way."""
    return LOOP.replace("CALLS", CALLS.replace("WRITTEN", written_))


TO_JSON = template("{{ c.function.arguments | tojson }}")
AS_TEXT = template("{{ '```' + c.function.arguments + '```' }}")
AS_TAGS = template(
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>{{ v }}{% endfor %}"
)
WITHOUT_CONTENT = AS_TEXT.replace("{% if m.tool_calls %}", "{% if m.content is none %}")
EITHER = template(
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}"
)
WHOLE = LOOP.replace("CALLS", "{{ m.tool_calls | tojson }}")
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
SHORT_IDS = "{% for m in messages if m.tool_calls %}{% if m.tool_calls[0].id | length != 9 %}"
SHORT_IDS += "{{ raise_exception('ids') }}{% endif %}{% endfor %}" + TO_JSON


@pytest.mark.parametrize(
    ("source", "way"),
    [
        (TO_JSON, CallShape()),
        (AS_TEXT, CallShape(json_text=True)),
        (AS_TAGS, CallShape()),
        (WITHOUT_CONTENT, CallShape(json_text=True, null_content=True)),
        (EITHER, CallShape()),
        (WHOLE, CallShape()),
        (SHORT_IDS, CallShape()),
        (PLAIN, None),
        ("{{ raise_exception('never') }}", None),
    ],
)
def test_what_a_template_wants(source: str, way: CallShape | None) -> None:
    assert detect_shape(source) == way


def conversation() -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": {"city": "Köln"}}
    call = {"id": "call_1", "type": "function", "function": function}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]


@pytest.mark.parametrize("source", [TO_JSON, AS_TEXT, WITHOUT_CONTENT, EITHER, WHOLE])
def test_arguments_reach_the_prompt(source: str) -> None:
    way = detect_shape(source)
    assert way is not None
    text = ChatTemplate(source).render(convert_messages(conversation(), way))
    assert '{"city": "Köln"}' in text
    assert "Rain." in text


def test_ids_of_nine_letters() -> None:
    messages = convert_messages(conversation(), CallShape(), short_ids=True)
    (call,) = messages[1]["tool_calls"]
    assert len(call["id"]) == 9
    assert messages[2]["tool_call_id"] == call["id"]
    again = convert_messages(messages, CallShape(), short_ids=True)
    assert again == messages
    assert "'Köln'" not in ChatTemplate(SHORT_IDS).render(messages)


def test_tools_in_words() -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    messages = tools_as_text([*conversation(), conversation()[2]], [tool])
    assert [one["role"] for one in messages] == ["system", "user", "assistant", "user"]
    assert all(set(one) == {"role", "content"} for one in messages)
    assert json.dumps(tool) in messages[0]["content"]
    assert '{"name": "weather", "arguments": {"city": "Köln"}}' in messages[2]["content"]
    assert messages[3]["content"].count("<tool_response>\nRain.\n</tool_response>") == 2
    told = tools_as_text([{"role": "system", "content": "Be brief."}, *conversation()], [tool])
    assert told[0]["content"].startswith("Be brief.\n\n")
    assert tools_as_text(conversation(), [])[0]["role"] == "user"
    # Where a template takes no system message, the user tells of them.
    first, *rest = tools_as_text(conversation(), [tool], "user")
    assert first["role"] == "user"
    assert json.dumps(tool) in first["content"]
    assert first["content"].endswith("\n\nWeather?")
    assert rest == tools_as_text(conversation(), [])[1:]
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN
    assert (accepts_system(PLAIN), accepts_system(refuses)) == (True, False)


def test_tools_in_the_system_message() -> None:
    """Phi-4-mini's template shows other fields of that message than its content."""
    source = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    source += "{% if 'tools' in m %}<|tool|>{{ m['tools'] }}<|/tool|>{% endif %}{% endfor %}"
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    user = {"role": "user", "content": "Hi"}
    listed = '<|tool|>[{"name": "weather", "parameters": {}}]<|/tool|>'
    text = ChatTemplate(source).render(tools_in_system([user], [tool]))
    assert text == f"[system]{listed}[user]Hi"
    messages = [{"role": "system", "content": "Be brief."}, user]
    text = ChatTemplate(source).render(tools_in_system(messages, [tool]))
    assert text == f"[system]Be brief.{listed}[user]Hi"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("<tool_call>\n{{ x }}", "hermes"),
        ("<tool_call>\n<function=a>\n<parameter=b>", "qwen_coder"),
        ("<|python_tag|>", "llama"),
        ('respond with {"name": function name, "parameters": {}}', "llama"),
        ("[TOOL_CALLS] [", "mistral"),
        ("<\uff5ctool▁calls▁begin\uff5c>", "deepseek"),
        ("<\uff5cDSML\uff5cinvoke", "dsml"),
        ("<|tool_call|>[", "granite"),
        ("<|tool|>{{ message['tools'] }}<|/tool|>", "phi"),
        ("<|START_ACTION|>", "command"),
        ('Action: ```json\n[{"tool_name": …', "command"),
        ("<|channel|>analysis", "harmony"),
        ("", "hermes"),
    ],
)
def test_the_format_that_a_template_tells(text: str, name: str) -> None:
    assert tool_call_format(text).name == name
    assert tool_call_format(text, "llama").name == "llama"
    assert set(TOOL_CALL_FORMATS) == {
        "hermes", "qwen_coder", "llama", "mistral", "deepseek", "harmony",
        "dsml", "granite", "phi", "command",
    }  # fmt: skip


def test_thoughts_that_a_template_tells(tokenizer: Tokenizer) -> None:  # noqa: F811
    assert reasoning_format("", tokenizer) is None
    for text, name in (
        ("a</think>", "think"),
        ("[/THINK]", "mistral"),
        ("<|END_THINKING|>", "command"),
    ):
        found = reasoning_format(text, tokenizer)
        assert found is not None
        assert found.name == name
    assert reasoning_format("</think>", tokenizer, "none") is None
    chosen = reasoning_format("", tokenizer, "seed")
    assert chosen is not None
    assert chosen.begin == "<seed:think>"


def test_only_special_tokens_of_the_format_are_shown(tokenizer: Tokenizer) -> None:  # noqa: F811
    ids = special_token_ids(["<|im_start|>", "<tool_call>", "<|im_start|>"], tokenizer)
    assert ids == (tokenizer.id("<|im_start|>"),)
    detokenizer = tokenizer.detokenizer(shown=ids)
    end = tokenizer.id("<|im_end|>")
    assert end is not None
    text = "".join(detokenizer.push(id) for id in (*tokenizer.encode("Hi"), *ids, end))
    assert text == "Hi<|im_start|>"


def test_a_format_by_hand() -> None:
    given = ["model.gguf", "--tool-call-parser", "llama", "--reasoning-parser", "none"]
    (source,) = model_sources_of(parse_options(given, {"JINFER_PORT": "1"}))
    assert source.overrides["prompt"] == {"tool_calls": "llama", "reasoning": "none"}
    path = ROOT / "specs" / "smollm2_135m_instruct.toml"
    for key, word in (("tool_calls", "lama"), ("reasoning", "thin")):
        with pytest.raises(SpecError, match=f"prompt.{key}"):
            open_model(path, {"prompt": {key: word}})
    prompt = open_model(path, source.overrides).conversation.prompt
    assert (prompt.tool_calls, prompt.reasoning) == ("llama", "none")


def test_calls_that_are_shown_when_they_are_whole() -> None:
    good = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    bad = '<tool_call>{"name": "weather", "arguments": {"city": Rome}}</tool_call>'
    settled = WholeCallsParser(parser(TOOL_CALL_FORMATS["hermes"]))
    deltas = [settled.push(sign) for sign in good + bad + good]
    deltas.append(settled.finish())
    shown_ = [delta.calls for delta in deltas if delta.calls]
    assert [calls[-1].end for calls in shown_] == ["done", "done"]
    assert ["".join(call.arguments for call in calls) for calls in shown_] == [
        '{"city": "Rome"}'
    ] * 2
    assert "".join(delta.content for delta in deltas) == bad
