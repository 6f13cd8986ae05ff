"""Each format of calls, as its models write it; whole, in pieces, and wrong."""

import json
import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfer.modelspec.model_spec import Reasoning, ToolCalls
from jinfer.server.tool_parsers.harmony import HARMONY
from jinfer.server.tool_parsers.json_formats import (
    COMMAND,
    DEEPSEEK,
    GRANITE,
    HERMES,
    LLAMA,
    MISTRAL,
    PHI,
)
from jinfer.server.tool_parsers.parser_registry import REASONING_FORMATS, TOOL_CALL_FORMATS
from jinfer.server.tool_parsers.tag_formats import DSML, QWEN_CODER
from tests.server.tool_parsers.reading import mixed, parser, pieces, read

PARIS = '{"city": "Paris"}'
BAR = "\uff5c"


def deepseek(text: str) -> str:
    """The marks of DeepSeek, written with plain bars and spaces."""
    for word in ("calls begin", "calls end", "call begin", "call end", "sep"):
        text = text.replace(f"<|tool {word}|>", f"<{BAR}tool▁{word.replace(' ', '▁')}{BAR}>")
    return text


def dsml(text: str) -> str:
    """The tags of DeepSeek V3.2, written with a plain bar for their mark."""
    return text.replace("<|", f"<{BAR}DSML{BAR}").replace("</|", f"</{BAR}DSML{BAR}")


# Format, text -> content, calls. Reasoning is harmony's alone.
RIGHT: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>', "",
     [("weather", PARIS)]),
    ("hermes", f'Let me see.\n\n<tool_call>{{"arguments": {PARIS}, "name": "weather"}}</tool_call>',
     "Let me see.", [("weather", PARIS)]),
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n'
     '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n', "",
     [("weather", PARIS), ("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call> Wait.', "Wait.", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}', "", [("now", "{}")]),
    ("hermes", f'<tool_call>[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now"}}]'
     "</tool_call>", "", [("weather", PARIS), ("now", "{}")]),
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(PARIS)}}}</tool_call>',
     "", [("weather", PARIS)]),
    # The last brace, or the closing tag, is forgotten now and then.
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {PARIS}</tool_call>', "",
     [("weather", PARIS)]),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {PARIS}}}', "",
     [("weather", PARIS)]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "a</tool_call>\\"}{"}}', "",
     [("weather", '{"city": "a</tool_call>\\"}{"}')]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "a\nb"}}</tool_call>', "",
     [("weather", '{"city": "a\\nb"}')]),
    ("hermes", '<tool_call>{"id": 7, "type": "function", "name": "now", "note": [1, {}],'
     ' "arguments": {"deep": [{"a": [1, 2, -3.5e7, true, null]}]}}</tool_call>', "",
     [("now", '{"deep": [{"a": [1, 2, -3.5e7, true, null]}]}')]),
    ("qwen_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
     "<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=tags>\n"
     '["a", "b"]\n</parameter>\n</function>\n</tool_call>', "",
     [("weather", '{"city": "Paris", "days": 3, "exact": true, "tags": ["a", "b"]}')]),
    ("qwen_coder", "I look.\n<function=weather>\n<parameter=city>\n12\n\n\"x\" {\n</parameter>\n"
     "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
     "I look.", [("weather", '{"city": "12\\n\\n\\"x\\" {"}'), ("now", "{}")]),
    ("qwen_coder", "<tool_call><function=weather><parameter=city>Paris</parameter>"
     "<parameter=days>soon</parameter></function></tool_call>", "",
     [("weather", '{"city": "Paris", "days": "soon"}')]),
    ("qwen_coder", f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>', "",
     [("weather", PARIS)]),
    ("llama", f'{{"name": "weather", "parameters": {PARIS}}}', "", [("weather", PARIS)]),
    ("llama", f'\n{{"type": "function", "name": "weather", "parameters": {PARIS}}}', "",
     [("weather", PARIS)]),
    ("llama", f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}; {{"name": "now"}}', "",
     [("weather", PARIS), ("now", "{}")]),
    ("llama", f'I look. <|python_tag|>{{"name": "weather", "parameters": {PARIS}}}', "I look.",
     [("weather", PARIS)]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now", '
     '"arguments": {}}]', "", [("weather", PARIS), ("now", "{}")]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}", "",
     [("weather", PARIS), ("now", "{}")]),
    ("mistral", f"Well.[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{PARIS}", "Well.",
     [("weather", PARIS)]),
    ("mistral", f"[TOOL_CALLS]weather{PARIS}", "", [("weather", PARIS)]),
    ("deepseek", deepseek("<|tool calls begin|><|tool call begin|>function<|tool sep|>weather\n"
     f"```json\n{PARIS}\n```<|tool call end|>\n<|tool call begin|>function<|tool sep|>now\n"
     "```json\n{}\n```<|tool call end|><|tool calls end|>"), "",
     [("weather", PARIS), ("now", "{}")]),
    ("deepseek", deepseek(f"Yes.<|tool calls begin|><|tool call begin|>weather<|tool sep|>{PARIS}"
     "<|tool call end|><|tool call begin|>now<|tool sep|>{}<|tool call end|><|tool calls end|>"),
     "Yes.", [("weather", PARIS), ("now", "{}")]),
    ("dsml", dsml('<|function_calls>\n<|invoke name="weather">\n<|parameter name="city" '
     'string="true">Paris, "x"\n</|parameter>\n<|parameter name="days" string="false">3'
     '</|parameter>\n</|invoke>\n<|invoke name="now">\n</|invoke>\n</|function_calls>'), "",
     [("weather", '{"city": "Paris, \\"x\\"\\n", "days": 3}'), ("now", "{}")]),
    ("dsml", dsml('Yes.\n\n<|function_calls>\n<|invoke name="weather">\n<|parameter name="city">5'
     '</|parameter>\n<|parameter name="tags" string="false">["a"]</|parameter>\n</|invoke>\n'
     '</|function_calls>'), "Yes.", [("weather", '{"city": "5", "tags": ["a"]}')]),
    ("granite", f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now", '
     '"arguments": {}}]', "", [("weather", PARIS), ("now", "{}")]),
    ("granite", f'I look.<|tool_call|> {{"name": "weather", "arguments": {PARIS}}}', "I look.",
     [("weather", PARIS)]),
    ("granite", f'<tool_call>[{{"name": "weather", "arguments": {PARIS}}}]</tool_call> So.', "So.",
     [("weather", PARIS)]),
    ("phi", f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}}}]<|/tool_call|>', "",
     [("weather", PARIS)]),
    ("phi", f'functools[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now"}}]', "",
     [("weather", PARIS), ("now", "{}")]),
    ("command", 'Action: ```json\n[\n    {\n        "tool_name": "weather",\n        '
     f'"parameters": {PARIS}\n    }}\n]\n```', "", [("weather", PARIS)]),
    ("command", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", '
     f'"parameters": {PARIS}}},\n    {{"tool_call_id": "1", "tool_name": "now", '
     '"parameters": {}}\n]<|END_ACTION|>', "", [("weather", PARIS), ("now", "{}")]),
    ("harmony", "<|channel|>final<|message|>It rains.<|return|>", "It rains.", []),
    ("harmony", "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
     f"{PARIS}<|call|>", "", [("weather", PARIS)]),
    ("harmony", f" to=functions.weather<|channel|>commentary json<|message|>{PARIS}", "",
     [("weather", PARIS)]),
    ("harmony", "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
     f"<|channel|>commentary to=functions.weather<|message|>{PARIS}<|call|>", "I look it up.",
     [("weather", PARIS)]),
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final"
     "<|message|>It rains.", "I look.\n\nIt rains.", []),
    ("harmony", "plain words <b>", "plain words <b>", []),
]  # fmt: skip

# Format, text: all of it is content.
WRONG = [
    ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {city: "Paris"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Pa'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": ]}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "no"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"n": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", "a < b <tool_call"),
    ("hermes", "Yes.\n\n<tool_call> weather </tool_call>\n"),
    ("hermes", "<tool_call></tool_call>  \n "),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {"[" * 5000}'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": ' + "9" * 5000 + "}}"),
    ("qwen_coder", "<tool_call>\n<function=nobody>\n</function>\n</tool_call>"),
    ("qwen_coder", "<function=weather>\n<parameter=city>\nParis"),
    ("qwen_coder", "<function=weather>\n<parameter=city>\na</parameter><parameter=city>b"),
    ("qwen_coder", "<function=weather>\nParis</function>"),
    ("qwen_coder", "<function=weather"),
    ("llama", '{"city": "Paris"}'),
    ("llama", '{"name": "Ada", "age": 3}'),
    ("llama", '  {"name": "weather", "parameters": 5}'),
    ("llama", f'The answer is {{"name": "weather", "parameters": {PARIS}}}'),
    ("llama", "<|python_tag|>print(1)"),
    ("llama", "{"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]nobody[ARGS]{}"),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {'),
    ("mistral", "[TOOL_CALLS]weather[CALL_ID]12"),
    ("mistral", "[TOOL_CALLS][]"),
    ("deepseek", deepseek("<|tool calls begin|>weather<|tool calls end|>")),
    ("deepseek", deepseek("<|tool calls begin|><|tool calls end|>")),
    ("deepseek", deepseek("<|tool call begin|>function<|tool sep|>nobody\n```json\n{}\n```")),
    ("deepseek", deepseek("<|tool call begin|>weather<|tool call end|>")),
    ("deepseek", deepseek("<|tool call begin|>weather<|tool sep|>{")),
    ("dsml", dsml('<|invoke name="nobody">\n</|invoke>')),
    ("dsml", dsml("<|function_calls>\nweather</|function_calls>")),
    ("dsml", dsml('<|invoke name="weather">\n<|parameter name="city" string="true">Par')),
    (
        "dsml",
        dsml('<|invoke name="weather">\n<|parameter name="city" string="maybe">a</|parameter>'),
    ),
    ("dsml", dsml('<|invoke name="weather')),
    ("granite", '<|tool_call|>[{"name": "nobody", "arguments": {}}]'),
    ("granite", "<|tool_call|>weather"),
    ("phi", "import functools\nfunctools[0]"),
    ("phi", '<|tool_call|>[{"name": "weather", "arguments": {"ci'),
    ("command", "Action: none."),
    ("command", '<|START_ACTION|>[{"tool_name": "nobody", "parameters": {}}]<|END_ACTION|>'),
    ("harmony", "<|channel|>commentary to=functions.nobody<|message|>{}"),
    ("harmony", "<|channel|>commentary to=functions.weather<|message|>{not json}"),
    ("harmony", "<|channel|>fin"),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), RIGHT)
def test_what_models_write(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for cut in ([text], text):
        found = read(parser(TOOL_CALL_FORMATS[name]), cut)
        assert (found.content, found.calls, found.void) == (content, calls, 0)
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in found.calls)


@pytest.mark.parametrize(("name", "text", "content", "calls"), RIGHT)
def test_streamed_deltas_at_every_cut(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for cut in range(1, len(text)):
        found = read(parser(TOOL_CALL_FORMATS[name]), [text[:cut], text[cut:]])
        assert (found.content, found.calls, found.void) == (content, calls, 0)


@pytest.mark.parametrize(("name", "text"), WRONG)
def test_what_is_no_call_stays_content(name: str, text: str) -> None:
    for cut in ([text], text):
        found = read(parser(TOOL_CALL_FORMATS[name]), cut)
        assert found.calls == []
        assert found.content == text


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize(("name", "text", "content", "calls"), RIGHT)
def test_a_call_that_the_limit_cuts(
    name: str, text: str, content: str, calls: list[tuple[str, str]], bound: bool
) -> None:
    """A cut call has a part of its arguments, after whole calls; its marks are not content."""
    for end in range(len(text)):
        found = read(parser(TOOL_CALL_FORMATS[name], bound=bound), [text[:end]], cut=True)
        if end % 9 == 0:
            assert found == read(parser(TOOL_CALL_FORMATS[name], bound=bound), text[:end], cut=True)
        assert found.void == 0
        assert found.calls == calls[: len(found.calls)]
        for tool, arguments in found.cut:
            (expected,) = calls[len(found.calls) :][:1]
            assert tool == expected[0]
            assert expected[1].startswith(arguments)
        shown = found.content.rstrip()
        if not bound:  # what may be an answer's own is shown
            shown = re.sub(r"(^\W?\{.*|Action:.*|\bA\w*|f\w*|to?|[<[{])$", "", shown, flags=re.S)
        assert content.startswith(shown.rstrip()), text[:end]


def test_names_that_the_limit_cuts() -> None:
    """They are no calls, and no answer either."""
    for text in ('{"name": "weat', '<|python_tag|>{"name": "weat', '<|python_tag|>{"par'):
        assert read(parser(LLAMA), [text], cut=True) == read(parser(LLAMA), [], cut=True)
    for text in ('{"name": "Ada", "age": 3', '{"city": "Par'):
        assert read(parser(LLAMA), [text], cut=True).content == text
    found = read(parser(LLAMA), ['{"name": "weather"'], cut=True)
    assert (found.cut, found.content) == ([("weather", "")], "")
    text = '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"P\\u00e'
    assert read(parser(HERMES), [text], cut=True).cut == [("weather", '{"city": "P')]


def test_what_was_wrong_before_the_limit_stays_content() -> None:
    for name, text in WRONG:
        if text.rstrip().endswith(("</tool_call>", "</function>", "|>", "]", "5", ")", ".")):
            found = read(parser(TOOL_CALL_FORMATS[name]), [text], cut=True)
            assert found.cut == []
            assert found.content in (text, text.rstrip(), ""), text


def test_the_channels_of_harmony() -> None:
    text = (
        "<|channel|>analysis<|message|>The user wants the weather. <|end|><|start|>assistant"
        "<|channel|>analysis<|message|>Of Paris.<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}<|call|>"
    )
    for cut in ([text], text):
        found = read(parser(HARMONY), cut)
        assert found.reasoning == "The user wants the weather.\n\nOf Paris."
        assert (found.content, found.calls) == ("", [("weather", PARIS)])


def test_a_wrong_call_between_right_ones() -> None:
    right = f'<tool_call>{{"name": "weather", "arguments": {PARIS}}}</tool_call>'
    wrong = '<tool_call>{"name": "weather", "arguments": {1}}</tool_call>'
    found = read(parser(HERMES), [right + wrong + right])
    assert found.calls == [("weather", PARIS)] * 2
    assert (found.content, found.void) == (wrong, 1)
    calls = deepseek("<|tool calls begin|><|tool call begin|>now<|tool sep|>{}<|tool call end|>")
    other = deepseek("<|tool call begin|>nobody<|tool sep|>{}<|tool call end|>")
    found = read(parser(DEEPSEEK), [calls + other])
    assert (found.content, found.calls) == (other, [("now", "{}")])
    listed = '[TOOL_CALLS] [{"name": "now"}, {"name": "nobody"}, 5]'
    found = read(parser(MISTRAL), [listed])
    assert (found.content, found.calls) == (', {"name": "nobody"}, 5]', [("now", "{}")])


def test_arguments_come_as_they_are_written() -> None:
    texts = {
        HERMES: '<tool_call>{"name": "weather", "arguments": {"city": "Pa',
        MISTRAL: '[TOOL_CALLS]weather[ARGS]{"city": "Pa',
        QWEN_CODER: "<function=weather>\n<parameter=city>\nPa",
        LLAMA: '{"name": "weather", "parameters": {"city": "Pa',
        DSML: dsml('<|invoke name="weather">\n<|parameter name="city" string="true">Pa'),
        GRANITE: '<|tool_call|>[{"name": "weather", "arguments": {"city": "Pa',
        PHI: 'functools[{"name": "weather", "arguments": {"city": "Pa',
        COMMAND: '<|START_ACTION|>[{"tool_name": "weather", "parameters": {"city": "Pa',
        DEEPSEEK: deepseek('<|tool call begin|>weather<|tool sep|>{"city": "Pa'),
        HARMONY: '<|channel|>commentary to=functions.weather<|message|>{"city": "Pa',
    }
    for format, text in texts.items():
        reading = parser(format)
        deltas = [reading.push(sign) for sign in text]
        pieces = [call for delta in deltas for call in delta.calls]
        assert pieces[0].name == "weather"
        assert pieces[0].arguments in ("", "{")
        assert len(pieces) > 3
        assert "".join(piece.arguments for piece in pieces) == '{"city": "Pa'


def test_only_the_first_call_without_parallel_calls() -> None:
    call = f'<tool_call>{{"name": "weather", "arguments": {PARIS}}}</tool_call>'
    found = read(parser(HERMES, most=1), [f"Yes. {call}\n{call}\n{call}"])
    assert (found.content, found.calls) == ("Yes.", [("weather", PARIS)])


TEXTS = {name: [t for n, t, *_ in RIGHT if n == name] for name in TOOL_CALL_FORMATS}
for wrong_name, wrong_text in WRONG:
    if len(wrong_text) < 1000:
        TEXTS[wrong_name] += [wrong_text, wrong_text + TEXTS[wrong_name][0]]


def test_each_name_of_a_specification_has_a_parser() -> None:
    assert set(get_args(ToolCalls)) == {"auto", *TOOL_CALL_FORMATS}
    assert set(get_args(Reasoning)) == {"auto", "none", *(item.name for item in REASONING_FORMATS)}


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
@given(data=st.data())
def test_any_cutting_gives_the_same(name: str, data: st.DataObject) -> None:
    text, cut = data.draw(pieces(TEXTS[name]))
    assert read(parser(TOOL_CALL_FORMATS[name]), cut) == read(
        parser(TOOL_CALL_FORMATS[name]), [text]
    )


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
@given(data=st.data())
def test_any_text_is_read_and_nothing_is_lost(name: str, data: st.DataObject) -> None:
    text = data.draw(mixed(TOOL_CALL_FORMATS[name].marks))
    whole = read(parser(TOOL_CALL_FORMATS[name]), [text])
    assert read(parser(TOOL_CALL_FORMATS[name]), text) == whole
    for _, arguments in whole.calls:
        assert isinstance(json.loads(arguments), dict)
    if not whole.calls and not TOOL_CALL_FORMATS[name].has_reasoning:
        assert whole.content == text
