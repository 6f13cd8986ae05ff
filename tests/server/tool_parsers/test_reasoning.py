"""Thoughts before an answer, streamed or not, begun by the prompt or by the model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse
from jinfer.server.tool_parsers.json_formats import HERMES
from jinfer.server.tool_parsers.output_deltas import DeltaCollector, ToolCallParser
from jinfer.server.tool_parsers.parser_registry import REASONING_FORMATS, ReasoningState
from tests.server.tool_parsers.reading import TOOLS, pieces, read

THINK = REASONING_FORMATS[0]
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'

# State, text -> reasoning, content, calls.
CASES: list[tuple[ReasoningState, str, str, str, list[tuple[str, str]]]] = [
    ("free", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes.", []),
    ("free", "Yes. <think>no</think>", "", "Yes. <think>no</think>", []),
    ("free", "\n <think></think>Yes.", "", "Yes.", []),
    ("free", "\n Yes.", "", "\n Yes.", []),
    ("open", "Hm.\n</think>\nYes.\n", "Hm.", "Yes.\n", []),
    ("open", "<think>Hm.</think>Yes.", "Hm.", "Yes.", []),
    ("open", "Hm. </thin", "Hm. </thin", "", []),
    ("closed", "Yes.</think>", "", "Yes.</think>", []),
    ("open", f"Hm, {CALL}?</think>{CALL}", f"Hm, {CALL}?", "", [("now", "{}")]),
    ("free", f"<think>Hm.</think>\n\n{CALL}", "Hm.", "", [("now", "{}")]),
]


def parser(state: ReasoningState) -> ToolCallParser:
    def reading(reader: IncrementalReader, out: DeltaCollector) -> Parse[None]:
        yield from THINK.parse(reader, out, state)
        yield from HERMES.parse(reader, out, TOOLS)

    return ToolCallParser(reading, DeltaCollector(lambda: "id"))


@pytest.mark.parametrize(("state", "text", "reasoning", "content", "calls"), CASES)
def test_a_thought(
    state: ReasoningState, text: str, reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for cut in ([text], text):
        found = read(parser(state), cut)
        assert (found.reasoning, found.content, found.calls) == (reasoning, content, calls)


@given(st.sampled_from(("open", "closed", "free")), pieces([text for _, text, *_ in CASES]))
def test_any_cutting_gives_the_same(state: ReasoningState, text: tuple[str, list[str]]) -> None:
    assert read(parser(state), text[1]) == read(parser(state), [text[0]])


def test_where_a_prompt_leaves_the_model() -> None:
    assert THINK.state("<|im_start|>assistant\n<think>\n") == "open"
    assert THINK.state("<think>\n\n</think>\n\n") == "closed"
    assert THINK.state("What is <think>?<|im_end|>\n<|im_start|>assistant\n") == "free"


def test_a_thought_streams() -> None:
    machine = parser("free")
    assert machine.push("<think>Well").reasoning == "Well"
    assert machine.push(", let me").reasoning == ", let me"
    assert machine.push(" see</th").reasoning == " see"
    assert machine.push("ink>Yes").content == "Yes"
