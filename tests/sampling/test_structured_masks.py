"""Masks of a small vocabulary against their definition: can the text still become a match?"""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jinfer.sampling.structured import ConstraintError, Matcher, compile_constraint, constraint
from tests.sampling.derivatives import (
    Nothing,
    Regex,
    after,
    after_all,
    complete,
    either,
    literal,
    random_regex,
)
from tests.sampling.vocabularies import ListTokenizer, tokenizer

TOKENS = [
    *(bytes([byte]) for byte in range(255)),
    *(text.encode() for text in ("ab", "abc", "bca", "aa", "cc", "aé", "日", "éa", "日a", "dd")),
    "é".encode()[1:] + b"a",  # half a character, and more
    "日".encode()[:2],
    b"ab",  # twice
    b"",
    b"",
    b"",
    b"",
]
SPECIAL = {"<|end|>": len(TOKENS) - 4, "<|stop|>": len(TOKENS) - 3, "<|tool|>": len(TOKENS) - 2}
EOS = (SPECIAL["<|end|>"], SPECIAL["<|stop|>"])
SMALL = ListTokenizer(TOKENS, SPECIAL, EOS)


def allowed(matcher: Matcher, size: int = len(TOKENS)) -> set[int]:
    words = np.zeros(-(-size // 32), np.uint32)
    matcher.mask(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def definition(regex: Regex) -> set[int]:
    text = {
        id
        for id, data in enumerate(TOKENS)
        if data and not isinstance(after_all(regex, data), Nothing)
    }
    return text | (set(EOS) if complete(regex) else set())


def forced_bytes(regex: Regex) -> bytes:
    """What every match goes on with."""
    found = b""
    while not complete(regex) and len(found) < 40:
        nexts = [byte for byte in range(256) if not isinstance(after(regex, byte), Nothing)]
        if len(nexts) != 1:
            break
        found += bytes(nexts)
        regex = after(regex, nexts[0])
    return found


def check_walk(matcher: Matcher, regex: Regex, rng: random.Random) -> None:
    """Masks along an answer. Where bytes are forced, their tokenization is too."""
    for _ in range(12):
        right, found, forced = definition(regex), allowed(matcher), matcher.forced()
        certain = forced_bytes(regex)
        assert matcher.may_end == complete(regex)
        assert found <= right
        assert found
        if forced:
            assert certain.startswith(b"".join(TOKENS[id] for id in forced))
            assert found == {forced[0]}
        elif not certain:
            assert found == right
        assert matcher.finished == (found <= set(EOS))
        if matcher.finished:
            return
        token = rng.choice(sorted(found - set(EOS)))
        matcher.advance(token)
        regex = after_all(regex, TOKENS[token])


@pytest.mark.parametrize("seed", range(150))
def test_regexes(seed: int) -> None:
    rng = random.Random(seed)
    text, regex = random_regex(rng, 4)
    compiled = compile_constraint(SMALL, regex=text)
    for _ in range(4):
        check_walk(compiled.start(), regex, rng)


@pytest.mark.parametrize("seed", range(40))
def test_choices(seed: int) -> None:
    rng = random.Random(seed)
    letters = ["a", "b", "c", "é", "日", "\n", '"', "\\", "/", ".", "|", "(", "{"]
    texts = ["".join(rng.choices(letters, k=rng.randrange(5))) for _ in range(rng.randint(1, 5))]
    compiled = compile_constraint(SMALL, choice=texts)
    for _ in range(4):
        check_walk(compiled.start(), either(*map(literal, texts)), rng)


def test_special_tokens_only_where_a_grammar_names_them() -> None:
    anything = compile_constraint(SMALL, regex="(?s).*").start()
    assert not allowed(anything) & {SPECIAL["<|tool|>"], len(TOKENS) - 1}
    matcher = compile_constraint(SMALL, grammar='start: "a" <|tool|> /b+/').start()
    matcher.advance(ord("a"))
    assert allowed(matcher) == {SPECIAL["<|tool|>"]}
    matcher.advance(SPECIAL["<|tool|>"])
    assert allowed(matcher) == {ord("b")}


def test_without_end_of_sequence() -> None:
    found = ListTokenizer(TOKENS[:-4], {}, ())
    matcher = compile_constraint(found, regex="ab?").start()
    ends = []
    for byte in b"ab":
        matcher.advance(byte)
        ends.append((matcher.may_end, matcher.finished, allowed(matcher, found.vocab_size)))
    assert ends == [(True, False, {ord("b")}), (True, True, set())]


def test_lark_and_gbnf() -> None:
    lark = compile_constraint(SMALL, grammar='start: "(" start ")" | /[ab]/')
    gbnf = compile_constraint(SMALL, grammar='root ::= "(" root ")" | [ab]')
    for compiled in (lark, gbnf):
        matcher = compiled.start()
        for byte in b"((a)":
            assert byte in allowed(matcher)
            matcher.advance(byte)
        assert not matcher.may_end
        matcher.advance(ord(")"))
        assert matcher.finished


def test_rollback_and_fork() -> None:
    rng = random.Random(5)
    matcher = compile_constraint(SMALL, regex="(ab|[cd]|日|a[bc])*").start()
    masks = [allowed(matcher)]
    for _ in range(30):
        matcher.advance(rng.choice(sorted(masks[-1] - set(EOS))))
        masks.append(allowed(matcher))
    other = matcher.fork()
    for back in (1, 7, 0, 12):
        matcher.rollback(back)
        assert allowed(matcher) == masks[len(matcher.tokens)]
    assert allowed(other) == masks[30]
    assert len(other.tokens) == 30
    other.advance(ord("c"))
    assert len(matcher.tokens) == 10
    with pytest.raises(ValueError, match="11 of 10 tokens"):
        matcher.rollback(11)


def test_rollback_over_the_end() -> None:
    matcher = compile_constraint(SMALL, choice=["ab", "c"]).start()
    matcher.advance(ord("c"))
    assert matcher.finished
    matcher.advance(EOS[0])
    matcher.advance(EOS[1])
    assert matcher.tokens == (ord("c"), *EOS)
    assert matcher.fork().finished
    matcher.rollback(2)
    assert matcher.finished
    matcher.rollback(1)
    assert ord("c") in allowed(matcher)
    longer = compile_constraint(SMALL, regex="c+").start()
    longer.advance(ord("c"))
    longer.advance(EOS[1])
    assert longer.finished
    longer.rollback(1)
    assert allowed(longer) == {ord("c"), TOKENS.index(b"cc"), *EOS}


@pytest.mark.parametrize("token", [ord("b"), -1, len(TOKENS), EOS[0], 2**40])
def test_rejected_token_changes_no_state(token: int) -> None:
    matcher = compile_constraint(SMALL, regex="a[ac]+").start()
    matcher.advance(ord("a"))
    before = allowed(matcher)
    with pytest.raises(ConstraintError, match=f"regex: token {token} is not allowed here"):
        matcher.advance(token)
    assert allowed(matcher) == before
    assert matcher.tokens == (ord("a"),)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.zeros(8, np.uint32), f"8 words is too short: {len(TOKENS)} tokens need 9"),
        (np.zeros(9, np.int32), "contiguous row of uint32"),
        (np.zeros((1, 9), np.uint32), "contiguous row of uint32"),
        (np.zeros(18, np.uint32)[::2], "contiguous row of uint32"),
    ],
)
def test_mask_buffer_is_checked(out: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile_constraint(SMALL, regex="a").start().mask(out)


def test_threads() -> None:
    found = tokenizer("tok_gpt2")

    def answer(seed: int) -> list[set[int]]:
        rng = random.Random(seed)
        matcher = compile_constraint(found, json_schema={"maxItems": 3, "type": "array"}).start()
        masks = []
        for _ in range(40):
            masks.append(allowed(matcher, found.vocab_size))
            matcher.advance(rng.choice(sorted(masks[-1])))
        return masks

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(answer, range(24))) == [answer(seed) for seed in range(24)]


def test_full_automaton_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers share an automaton, whose states are limited; more answers need more than that."""
    monkeypatch.setitem(constraint.LIMITS, "max_lexer_states", 40)
    regex = "(a|b|c)*a(a|b|c){5}"
    compiled = compile_constraint(SMALL, regex=regex)
    automata = []
    renew = compiled._renew

    def renewed() -> Any:
        automata.append(renew())
        return automata[-1]

    monkeypatch.setattr(compiled, "_renew", renewed)
    for seed in range(40):
        rng = random.Random(seed)
        matcher = compiled.start()
        for _ in range(8):
            matcher.advance(rng.choice([id for id in allowed(matcher) if id not in EOS]))
        text = b"".join(TOKENS[id] for id in matcher.tokens).decode()
        assert matcher.may_end == bool(re.fullmatch(regex, text))
    assert automata


def test_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_constraint(SMALL, json_schema={"type": "object"})
    assert compile_constraint(SMALL, json_schema=True) is first
    assert compile_constraint(SMALL, json_schema='{"type":"object"}') is first
    monkeypatch.setattr(constraint, "MAX_CACHED", 2)
    for number in range(3):
        compile_constraint(SMALL, regex=str(number))
    assert compile_constraint(SMALL, json_schema=True) is not first
