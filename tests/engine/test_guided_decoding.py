"""Answers under a grammar, through the engine: valid, the same in company, with others beside."""

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import jsonschema
import numpy as np
import pytest

from jinfer import LLM, RequestError, SamplingParams
from jinfer.engine.requests import EngineError, Failed, Request, Token
from jinfer.engine.runner.device_state import SamplingRow
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.engine.search import guided_decoding
from jinfer.engine.search.grammar_worker import MaskRequest, MaskResult, compute_mask
from jinfer.engine.search.guided_decoding import Guide, Guides
from jinfer.sampling.forbidden_tokens import ForbiddenTokens
from jinfer.sampling.request_errors import ConstraintError
from jinfer.sampling.structured import Matcher
from tests.sampling.schemas import random_schema
from tests.test_smollm2 import ROOT

SPEC = ROOT / "specs" / "smollm2_135m_instruct.toml"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = "A person as JSON:\n"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    keys: dict[str, Any] = {"engine.slots": 4, "engine.context": 1024}
    with LLM(SPEC, **keys) as llm:
        yield llm


def test_schema_regex_choice_and_grammar(llm: LLM) -> None:
    params = [
        SamplingParams(json_schema=PERSON, temperature=1.0, seed=1),
        SamplingParams(regex=r"\d{3}-[a-f]{2}", temperature=1.0, seed=2),
        SamplingParams(choice=("Paris", "Rome", "Oslo")),
        SamplingParams(grammar='start: "<" /[a-z]{1,8}/ ">"', temperature=1.0, seed=3),
        SamplingParams(max_tokens=12),
    ]
    prompts = [PROMPT, "A code: ", "The capital of Italy is ", "A tag: ", "Once upon a time"]
    answers = llm.generate(prompts, params)
    jsonschema.validate(json.loads(answers[0].text), PERSON)
    assert re.fullmatch(r"\d{3}-[a-f]{2}", answers[1].text)
    assert answers[2].text in ("Paris", "Rome", "Oslo")
    assert re.fullmatch("<[a-z]{1,8}>", answers[3].text)
    assert [answer.finish_reason for answer in answers[:4]] == ["stop"] * 4
    alone = [llm.generate([p], one)[0].token_ids for p, one in zip(prompts, params, strict=True)]
    assert alone == [answer.token_ids for answer in answers]
    llm.session.thread.run(lambda engine: None)
    assert llm.stats().blocks_held == 0


def test_log_probabilities_change_no_token(llm: LLM) -> None:
    """With them, forced tokens are computed one by one."""
    params = SamplingParams(json_schema=PERSON, temperature=1.0, seed=4)
    fast = llm.generate([PROMPT], params)[0]
    slow = llm.generate(
        [PROMPT], SamplingParams(json_schema=PERSON, temperature=1.0, seed=4, logprobs=0)
    )[0]
    assert fast.token_ids == slow.token_ids
    assert slow.logprobs is not None
    assert len(slow.logprobs) == len(slow.token_ids)


@pytest.mark.parametrize("logprobs", [None, 0])
def test_forced_tokens_obey_the_rules_of_the_request(llm: LLM, logprobs: int | None) -> None:
    (yes,) = llm.session.tokenizer.encode("yes")
    others = tuple(id for id in range(49152) if id != yes)
    rules: dict[str, dict[str, Any]] = {
        "banned_token_ids": {"banned_token_ids": [yes]},
        "logit_bias": {"logit_bias": {yes: float("-inf")}},
        "allowed_token_ids": {"allowed_token_ids": others},
        "bad_words": {"bad_words": ["yes"]},
    }
    for name, rule in rules.items():
        params = SamplingParams(choice=("yes", "no"), logprobs=logprobs, **rule)
        (answer,) = llm.generate([PROMPT], params)
        assert yes not in answer.token_ids
        assert answer.text in ("yes", "no")
        words = (
            f"choice: after 0 tokens nothing is left: {name} forbid what has to come next, 'yes'"
        )
        with pytest.raises(ConstraintError, match=words):
            llm.generate([PROMPT], replace(params, choice=("yes",)))
    # In the middle of an answer, where all before it was forced too.
    params = SamplingParams(choice=("no yes",), bad_words=("yes",), logprobs=logprobs)
    with pytest.raises(ConstraintError, match="after 1 tokens nothing is left: bad_words"):
        llm.generate([PROMPT], params)
    # What is whole ends; a bias that forbids nothing changes nothing where there is no choice.
    params = SamplingParams(choice=("yes",), logprobs=logprobs, logit_bias={yes: -100.0})
    (answer,) = llm.generate([PROMPT], replace(params, min_tokens=9))
    assert (answer.text, answer.finish_reason) == ("yes", "stop")
    llm.session.thread.run(lambda engine: None)
    assert llm.stats().blocks_held == 0


class Whole:
    """A matcher of an answer that is whole, of which only the end is left."""

    finished = True

    def nothing_left(self, ids: list[int], rules: list[str]) -> ConstraintError:
        return ConstraintError(f"{ids} {rules}")


def test_only_min_tokens_give_way_to_a_whole_answer() -> None:
    for banned, ends in ((), True), ((2,), False):
        params = SamplingParams(choice=("a",), min_tokens=9, banned_token_ids=banned)
        sequence = RunningSequence(Request(1, (5, 6), params, 99, (2,)), 0, [5, 6, 7], guided=True)
        rules = ForbiddenTokens.of(
            params, SamplingRow.from_params(params, (2,), 64, lambda text: [7]).sampler, None
        )
        mask = np.array([1 << 2, 0], np.uint32)
        guides = Guides({1: Guide(sequence, cast("Any", Whole()), rules, mask)})
        (event,) = guides._mask(sequence, np.zeros(2, np.uint32))
        assert sequence.ended
        if ends:
            assert event == Token(1, 2, last="stop")
            assert sequence.tokens == [5, 6, 7, 2]
        else:
            assert isinstance(event, Failed)
            assert str(event.error) == "[2] ['banned_token_ids', 'min_tokens']"


def test_a_limit_cuts_an_answer(llm: LLM) -> None:
    params = SamplingParams(json_schema=PERSON, max_tokens=3)
    answer = llm.generate([PROMPT], params)[0]
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 3


def test_a_slow_grammar_waits_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others go on; it is chosen from other logits than it would be, and has the same tokens."""
    slow = SamplingParams(regex=r"[a-f]{4}( and so it was: [a-f]{3})", temperature=1.0, seed=3)
    others = [
        SamplingParams(json_schema=PERSON, temperature=1.0, seed=5),
        SamplingParams(max_tokens=40, temperature=1.0, seed=6, ignore_eos=True),
    ]
    expected = [a.token_ids for a in llm.generate([PROMPT] * 3, [slow, *others])]
    held, taken = threading.Event(), compute_mask

    def waits(matcher: Matcher, rules: Any, at: MaskRequest, *given: Any) -> MaskResult:
        if matcher._kind == "regex" and at.drawn in (0, 2):
            held.wait(300)  # until the others are done
        return taken(matcher, rules, at, *given)

    monkeypatch.setattr(guided_decoding, "compute_mask", waits)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            held.clear()
            first = pool.submit(llm.generate, [PROMPT], slow)
            found = [a.token_ids for a in llm.generate([PROMPT] * 2, others)]
            assert found == expected[1:]
            assert not first.done()
            held.set()
            assert first.result()[0].token_ids == expected[0]


def test_a_grammar_that_fails_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = compute_mask

    def fails(matcher: Matcher, *given: Any) -> MaskResult:
        if matcher._kind == "regex":
            raise ZeroDivisionError("none")
        return taken(matcher, *given)

    monkeypatch.setattr(guided_decoding, "compute_mask", fails)
    with pytest.raises(EngineError, match="a grammar failed: ZeroDivisionError: none"):
        llm.generate([PROMPT], SamplingParams(regex="a+b"))
    assert llm.generate([PROMPT], SamplingParams(choice=("yes",)))[0].text == "yes"


def test_a_state_that_costs_too_much(llm: LLM) -> None:
    with pytest.raises(ConstraintError, match="regex: after 1 tokens: more than 16384 bytes"):
        llm.generate([PROMPT], SamplingParams(regex="[ab]c{30000000}"))


def test_what_cannot_be_kept(llm: LLM) -> None:
    with pytest.raises(ConstraintError, match="regex"):
        llm.generate(["x"], SamplingParams(regex="(unclosed"))
    with pytest.raises(RequestError, match="a grammar cannot be kept with strategy='beam'"):
        llm.generate(["x"], SamplingParams(regex="a+", strategy="beam"))


def schemas(llm: LLM, seeds: range) -> None:
    every = [random_schema(seed, ending=True) for seed in seeds]
    params = [
        SamplingParams(json_schema=schema, temperature=1.0, seed=seed, max_tokens=600)
        for seed, schema in zip(seeds, every, strict=True)
    ]
    answers = llm.generate([PROMPT] * len(every), params)
    for seed, schema, answer in zip(seeds, every, answers, strict=True):
        assert answer.finish_reason == "stop", (seed, answer.text[-200:])
        jsonschema.validate(json.loads(answer.text), schema)


def test_some_schemas(llm: LLM) -> None:
    schemas(llm, range(4))


@pytest.mark.soak
def test_two_hundred_schemas(llm: LLM) -> None:
    schemas(llm, range(200))
