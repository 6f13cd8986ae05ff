"""A thought that is at its budget gets its end; what comes before, and others' answers, stay."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from jinfer import LLM, Completion, RequestError, SamplingParams
from jinfer.engine.thinking_budget import ThinkingLimit, Thought
from jinfer.template.thinking_marks import HARMONY_MARKS, THINKING_MARKS, thinking_switches
from tests.engine.test_schedules import STORIES
from tests.speculate.drafts import RandomTrees, speculating

END = "</think>"
HARMONY = "<|end|><|start|>assistant<|channel|>final<|message|>"
THINK: dict[str, Any] = {"prompt.reasoning": "think"}
WORDS = str(STORIES.parent / "tok_llama2c" / "tokenizer.bin")
OPEN, OTHER = "Once upon a time<think>\n", "The cat"
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True, skip_special=False)


def thought(budget: int, *, opened: bool = True, message: str = "", **more: Any) -> Thought:
    """Where each letter is a token, but for the marks that `more` calls special."""
    marks = more.get("marks", THINKING_MARKS[0])
    special: dict[str, int] = more.get("special", {})
    names = {id: name for name, id in special.items()}
    parts = re.compile("|".join([*map(re.escape, special), "."]), re.DOTALL)

    def encode(text: str) -> list[int]:
        return [special.get(one) or ord(one) for one in parts.findall(text)]

    def decode(ids: Sequence[int]) -> str:
        return "".join(names.get(id) or chr(id) for id in ids)

    return Thought(ThinkingLimit(budget, marks, opened, encode, decode, message))


def push(one: Thought, text: str) -> None:
    for letter in text:
        one.push(ord(letter))


def due(one: Thought) -> str:
    return "".join(map(chr, one.due))


def test_a_thought_is_counted() -> None:
    one = thought(3)
    assert one.allowed == 3
    push(one, "ab")
    assert (one.allowed, due(one)) == (1, "")
    push(one, "c")
    assert (one.allowed, due(one)) == (0, END)
    push(one, END)
    assert (one.state, one.allowed) == ("over", None)
    push(one, "<think>abcdef")  # an answer has one thought
    assert one.allowed is None


def test_ends_of_its_own() -> None:
    one = thought(20)
    push(one, f"ab{END}")
    assert (one.state, one.due) == ("over", [])
    # At the budget the mark had begun.
    one = thought(4)
    push(one, "ab</")
    assert due(one) == "think>"
    one = thought(4, special={END: 999})
    push(one, "ab</")
    assert one.due == [999]
    one = thought(2, message=" Enough.")
    push(one, "ab")
    assert due(one) == f" Enough.{END}"


def test_a_thought_that_may_begin() -> None:
    one = thought(2, opened=False)
    assert one.allowed == 3
    push(one, " \n<think>")
    assert (one.state, one.allowed) == ("open", 2)
    one = thought(0, opened=False)
    push(one, "<think>")
    assert due(one) == END
    one = thought(2, opened=False)
    push(one, "<b>")
    assert one.allowed is None
    one = thought(0)
    one.push(5)  # the end cannot come: nothing else is forced
    assert (one.state, one.due) == ("over", [])


def test_thoughts_in_channels() -> None:
    """gpt-oss thinks in several messages, which have one budget; then it is led to its answer."""
    special = {name: 999 + i for i, name in enumerate(re.findall(r"<\S+?>", HARMONY))}
    one = thought(5, opened=False, marks=HARMONY_MARKS, special=special)

    def say(text: str) -> None:
        for id in one.limit.encode(text):
            one.push(id)

    say(f"{HARMONY_MARKS.begin}abc{HARMONY_MARKS.end}")
    assert (one.state, one.allowed) == ("free", 3)
    say(f"<|start|>assistant{HARMONY_MARKS.begin}ab")
    assert one.due == [special["<|end|>"]]
    say("<|end|>")
    say(f"<|start|>assistant{HARMONY_MARKS.begin}")
    assert one.limit.decode(one.due) == HARMONY
    say(HARMONY)
    assert one.state == "free"
    say("Y")
    assert one.state == "over"


def test_variables_of_templates() -> None:
    text = "{# thinking #} thinking {{ m.thinking }}{% if 'thinking' in m %}{% endif %}"
    assert thinking_switches(text) == []
    assert thinking_switches(text + "{% if thinking is defined %}{% endif %}") == ["thinking"]
    assert thinking_switches("{% set x = not enable_thinking %}") == ["enable_thinking"]


@pytest.fixture(scope="module")
def llm(shared_programs: None) -> Iterator[LLM]:
    keys: dict[str, Any] = {"engine.slots": 3, "engine.context": 256, "tokenizer": WORDS}
    with LLM(STORIES, **keys, **THINK) as llm:
        yield llm


def end_of(llm: LLM, text: str = END) -> list[int]:
    """Tokens that go on, without the space that the tokenizer puts before a text."""
    before = llm.session.tokenizer.encode("\n", special=False)
    return llm.session.tokenizer.encode(f"\n{text}", special=False)[len(before) :]


def bounded(llm: LLM, budget: int, plain: Completion) -> list[int]:
    """What a budget makes of a greedy answer: two answers with the end between them."""
    ids = llm.encode(OPEN)
    begun = [*plain.token_ids[:budget], *end_of(llm)]
    params = replace(GREEDY, max_tokens=40 - len(begun))
    return [*begun, *llm.generate([[*ids, *begun]], params)[0].token_ids]


def test_an_answer_goes_on(llm: LLM) -> None:
    plain, other = llm.generate([OPEN, OTHER], GREEDY)
    for budget in (0, 5):
        params = replace(GREEDY, thinking_token_budget=budget)
        expected = bounded(llm, budget, plain)
        # In company, whose tokens stay.
        one, two = llm.generate([OPEN, OTHER], [params, GREEDY])
        assert (one.token_ids, two.token_ids) == (expected, other.token_ids)
        slow = llm.generate([OPEN], replace(params, logprobs=1))[0]
        assert slow.token_ids == expected
        assert len(slow.logprobs or ()) == 40
        drafts = RandomTrees({tuple(llm.encode(OPEN)): expected}, llm.spec.dims["vocab"], 7, 7)
        with speculating(llm, drafts) as drafted:
            assert llm.generate([OPEN], params)[0].token_ids == expected
        assert drafted.accepted
    assert llm.stats().blocks_held == 0
    # A thought without a budget, or none at all.
    assert llm.generate([OTHER], params)[0].token_ids == other.token_ids
    assert llm.generate([OPEN], replace(params, thinking_token_budget=90))[0].token_ids == (
        plain.token_ids
    )


def test_drawn_tokens(llm: LLM) -> None:
    drawn = replace(GREEDY, temperature=1.0, seed=3)
    plain = llm.generate([OPEN], drawn)[0].token_ids
    params = replace(drawn, thinking_token_budget=6, thinking_budget_message=" Well.")
    pieces = list(llm.stream(OPEN, params))
    (one,) = llm.generate([OPEN], params)
    assert [id for piece in pieces for id in piece.token_ids] == one.token_ids
    assert one.token_ids[:6] == plain[:6]
    end = end_of(llm, f" Well.{END}")
    assert one.token_ids[6 : 6 + len(end)] == end
    assert llm.generate([OPEN], replace(params, logprobs=0))[0].token_ids == one.token_ids
    short = llm.generate([OPEN], replace(params, max_tokens=8))[0]
    assert (short.token_ids, short.finish_reason) == (one.token_ids[:8], "length")


def test_grammars(llm: LLM) -> None:
    thinks = r'thought "yes"' + "\n" + r"thought[lazy]: /(.|\n)*<\/think>/"
    params = replace(GREEDY, thinking_token_budget=5, grammar=f"start: {thinks}")
    plain = llm.generate([OPEN], GREEDY)[0].token_ids
    for one in (params, replace(params, logprobs=0)):
        answer = llm.generate([OPEN], one)[0]
        assert answer.token_ids[:5] == plain[:5]
        assert answer.text.endswith(f"{END}yes")
    drafts = RandomTrees({tuple(llm.encode(OPEN)): answer.token_ids}, llm.spec.dims["vocab"], 7, 7)
    with speculating(llm, drafts):
        assert llm.generate([OPEN], params)[0].token_ids == answer.token_ids
    # It begins with the thought, or has no place for its end.
    begins = llm.generate([OTHER], replace(params, grammar=f'start: "<think>" {thinks}'))[0]
    assert begins.text.startswith("<think>")
    assert begins.text.endswith(f"{END}yes")
    chosen = replace(params, grammar=None, choice=("a small red house", "b"))
    assert llm.generate([OPEN], chosen)[0].text in ("a small red house", "b")


def test_what_cannot_be(llm: LLM) -> None:
    budget = SamplingParams(thinking_token_budget=5)
    with pytest.raises(RequestError, match="cannot be kept with strategy='beam'"):
        llm.generate([OPEN], replace(budget, strategy="beam"))
    end = end_of(llm)
    with pytest.raises(RequestError, match=f"banned_token_ids forbids token {end[-1]}, which"):
        llm.generate([OPEN], replace(budget, banned_token_ids=end[-1:]))
    short: dict[str, Any] = {"engine.context": 64, "tokenizer": WORDS}
    more: dict[str, Any] = {"generation.thinking_token_budget": 5}
    with LLM(STORIES, **short) as plain, pytest.raises(RequestError, match="no marks of thoughts"):
        plain.generate([OPEN], budget)
    with LLM(STORIES, **short, **more) as plain:
        assert plain.params().thinking_token_budget is None
