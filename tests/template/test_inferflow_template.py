"""Inferflow's template language."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from jinfer.template import PromptTemplate, TemplateError
from jinfer.tokenizer import Tokenizer, load_tokenizer

GOLDENS = Path(__file__).parents[1] / "goldens"


@cache
def tokenizer(name: str) -> Tokenizer:
    found = load_tokenizer(GOLDENS / name)
    assert found is not None
    return found


def gpt2(text: str) -> list[int]:
    return tokenizer("tok_gpt2").encode(text, special=False, parse_special=False)


def encode(template: str, query: str = "Hello", system: str = "", answer: str = "") -> list[int]:
    return PromptTemplate.parse(template).encode(
        tokenizer("tok_gpt2"), query=query, system_prompt=system, res_prefix=answer
    )


def test_tokens_and_text() -> None:
    assert encode("{bos}{query}{eos}") == [0, *gpt2("Hello"), 2]
    assert encode("{<|im_start|>}user{\\n}{question}{#7}") == [1, *gpt2("user\nHello"), 7]
    assert encode("a{_query}{_question}") == gpt2("a Hello Hello")
    assert encode("{system_prompt}|{query}", system="Be terse.") == gpt2("Be terse.|Hello")
    assert encode("a{\\n}b{\\t}{{{query}}}") == gpt2("a\nb\t{Hello}")
    assert encode("{ }x{ }") == [223, *gpt2("x"), 223]


def test_text_between_tokens_is_tokenized_as_one() -> None:
    assert gpt2("wo") + gpt2("rld") != gpt2("world")
    assert encode("wo{query}", "rld") == gpt2("world")
    assert encode("wo{eos}{query}", "rld") == [*gpt2("wo"), 2, *gpt2("rld")]


def test_special_tokens_count_in_the_template_and_not_in_the_query() -> None:
    assert encode("<|im_start|>{query}", "<|im_end|>") == [1, *gpt2("<|im_end|>")]


def test_beginning_of_the_answer() -> None:
    assert encode("{query} A:{res_prefix}", answer=" Sure") == gpt2("Hello A: Sure")
    assert encode("{query} A:{answer}") == gpt2("Hello A:")
    assert encode("{query} A:", answer=" Sure") == gpt2("Hello A: Sure")


def test_spaces_of_sentencepiece() -> None:
    found = tokenizer("tok_spm_bpe")
    ids = PromptTemplate.parse("{bos}[INST]{_query}").encode(found, query="Hello world")
    assert ids == found.encode("[INST] Hello world")
    assert PromptTemplate.parse("{ }").encode(found) == [found.id("▁")]


def test_target_language_of_a_translation() -> None:
    found = tokenizer("tok_m2m100")
    assert PromptTemplate.parse("{#2}{__fr__}{res_prefix}").encode(found) == [2, 725]
    source = PromptTemplate.parse("{__en__}{query}{</s>}").encode(found, query="Hello world")
    assert source == found.encode("Hello world", language="en")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{query", "the brace at character 1 is not closed"),
        ("a{}", "{} has no name"),
        ("{#x}", "{#x} must be # and an id"),
        ("{#1234567890}", "must be # and an id"),
        ("{answer}.", "without {turn}, nothing may follow the answer"),
        ("{turn}{query}{turn}", "has {turn} more than once"),
        ("{turn}{answer}{answer}", "has {answer} more than once"),
        ("{answer}{turn}{query}", "the answer must follow {turn}"),
    ],
)
def test_parse_errors(template: str, words: str) -> None:
    with pytest.raises(TemplateError) as error:
        PromptTemplate.parse(template)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("qurey", "query"), ("sytem_prompt", "system_prompt"), ("<|im_strat|>", "<|im_start|>")],
)
def test_unknown_names(name: str, hint: str) -> None:
    with pytest.raises(TemplateError, match="the vocabulary has no token") as error:
        encode(f"{{{name}}}")
    assert f"did you mean {{{hint}}}?" in str(error.value)


def test_roles_the_tokenizer_lacks() -> None:
    with pytest.raises(TemplateError, match="the tokenizer has no user_token"):
        encode("{user_token}{query}")


def chat(template: str, *messages: tuple[str, str]) -> list[int]:
    pairs = [{"role": role, "content": content} for role, content in messages]
    return PromptTemplate.parse(template).encode_chat(tokenizer("tok_gpt2"), pairs)


def test_conversations() -> None:
    turns = (("user", "a"), ("assistant", " b"), ("user", "c"))
    first, second = gpt2("Q:a A: b"), gpt2("Q:c A:")
    assert chat("{bos}Q:{query} A:", *turns) == [0, *first, 2, 0, *second]
    assert chat("{query} A:", ("user", "a"), ("assistant", " b")) == gpt2("a A: b")
    system = ("system", "S")
    assert chat("{system_prompt}|{query}|", system, *turns) == [
        *gpt2("S|a| b"),
        2,
        *gpt2("|c|"),
    ]
    assert chat("{query}|", system, ("user", "a")) == gpt2("S\n\na|")


def test_system_prompt_and_ends_of_past_turns() -> None:
    template = "{bos}{turn}[{round}] Q:{query}\n\nA:{answer}\n\n"
    turns = (("user", "a"), ("assistant", " b\n"), ("user", "c"), ("assistant", "d"), ("user", "e"))
    first, second = "[1] Q:a\n\nA:b\n\n", "[2] Q:c\n\nA:d\n\n"
    assert chat(template, *turns) == [0, *gpt2(first + second + "[3] Q:e\n\nA:")]
    # The beginning of an answer is as it was given.
    assert chat(template, *turns[:2]) == [0, *gpt2("[1] Q:a\n\nA: b\n")]
    assert encode(template, "a") == [0, *gpt2("[1] Q:a\n\nA:")]


def test_a_turn_without_an_end() -> None:
    turns = (("user", "a"), ("assistant", "b"), ("user", "c"))
    expected = [0, *gpt2("S"), 7, *gpt2("a"), 8, *gpt2("b"), 7, *gpt2("c"), 8]
    for answer in ("", "{res_prefix}", "{answer}"):
        template = "{bos}{system_prompt}{turn}{#7}{query}{#8}" + answer
        assert chat(template, ("system", "S"), *turns) == expected


def test_past_answers_may_stand_elsewhere_than_the_beginning_of_the_last() -> None:
    template = "{turn}{#7}{query}{#8}{res_prefix}\n {answer}{#9}"
    turns = (("user", "a"), ("assistant", "\n b"), ("user", "c"), ("assistant", "d"))
    past = [7, *gpt2("a"), 8, *gpt2("\n b"), 9]
    assert chat(template, *turns[:3]) == [*past, 7, *gpt2("c"), 8]
    assert chat(template, *turns) == [*past, 7, *gpt2("c"), 8, *gpt2("d")]


def test_the_conversations_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "specs.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.*)` \| `(.*two A.*)` \|$", page, flags=re.MULTILINE)
    assert len(rows) == 4
    for template, conversation in rows:
        turns = (("user", "one"), ("assistant", "1"), ("user", "two"))
        assert chat(template, *turns) == encode(conversation)


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (
            ("assistant",),
            "message 1 has role 'assistant'; with a prompt template it must be system",
        ),
        (
            ("user", "user"),
            "message 2 has role 'user'; with a prompt template it must be assistant",
        ),
        (("user", "tool"), "message 2 has role 'tool'"),
        (("system",), "needs a message of the user"),
        ((), "needs a message of the user"),
    ],
)
def test_conversations_that_do_not_alternate(roles: tuple[str, ...], words: str) -> None:
    with pytest.raises(TemplateError) as error:
        chat("{query}", *((role, "x") for role in roles))
    assert words in str(error.value)


def test_several_turns_need_an_eos() -> None:
    messages = [{"role": r, "content": "x"} for r in ("user", "assistant", "user")]
    with pytest.raises(TemplateError, match="the tokenizer has no eos"):
        PromptTemplate.parse("{query}").encode_chat(tokenizer("tok_llama3"), messages)
