"""What users ask with: every form is taken, or refused in one line that says what to give."""

import asyncio
import inspect
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import jax.numpy as jnp
import numpy as np
import pytest

from jinfer import LLM, AsyncLLM, RequestError, SamplingParams, TokenLogprob
from jinfer.api.prompt_inputs import (
    Prompt,
    parse_messages,
    parse_params,
    parse_prompt,
    parse_prompts,
)
from jinfer.sampling.sampling_keywords import SamplingKeywords
from jinfer.sampling.sampling_params import PARAMETERS

ROOT = Path(__file__).parents[1]
SPEC = ROOT / "specs" / "smollm2_135m_instruct.toml"
IDS = [1, 504, 3575]
HELLO = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(SPEC) as llm:
        yield llm


@pytest.mark.parametrize(
    "given",
    [IDS, tuple(IDS), np.array(IDS), np.array([5, 6], np.uint8), jnp.array(IDS), range(3)],
    ids=["list", "tuple", "numpy", "uint8", "jax", "range"],
)
def test_ids_however_they_are_held(given: Any) -> None:
    found = parse_prompt(given)
    assert found == [int(id) for id in given]
    assert all(type(id) is int for id in found)
    assert parse_prompts(given) == [found]
    assert parse_prompts([given, "text"]) == [found, "text"]


def test_members_of_arrays_are_ids() -> None:
    assert parse_prompt(list(np.array(IDS))) == IDS
    assert parse_prompts(list(jnp.array(IDS))) == [IDS]
    assert parse_prompts(list(np.array([IDS, IDS]))) == [IDS, IDS]


def test_one_or_several() -> None:
    assert parse_prompts("a") == ["a"]
    assert parse_prompts(["a", "b"]) == ["a", "b"]
    assert parse_prompts([HELLO]) == [[HELLO]]
    assert parse_prompts([[HELLO], "a", IDS]) == [[HELLO], "a", IDS]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "a prompt is None; give a text, a list of token ids, or a list of messages"),
        (5, "a prompt is 5; give a text"),
        (5.0, "a prompt is 5.0; give a text"),
        (True, "a prompt is True; give a text"),
        (np.int32(5), "a prompt is .*5.*; give a text"),
        (b"Hello", r"a prompt is bytes; give a text: prompt.decode\(\)"),
        ([b"Hello"], "a prompt is bytes"),
        (HELLO, r"a prompt is a dictionary; give a list of messages: \[{...}\]"),
        ({1, 2}, "a prompt is a set; give a text"),
        (iter(IDS), "a prompt is a list_iterator; give a text"),
        ([], "there is no prompt; give a text"),
        ((), "there is no prompt"),
        (np.array([], np.int32), "there is no prompt"),
        ([None], "a prompt is None"),
        ([1.0, 2.0], r"1.0 is no token id; they are whole numbers, as in \[1, 15043\]"),
        ([1, 2.5], "2.5 is no token id"),
        ([True, False], "True is no token id"),
        ([1, None], "None is no token id"),
        ([1, "a"], "'a' is no token id"),
        (["a", 1], "a prompt is 1; give a text"),
        ([["a", "b"]], "a list of 2 prompts is given where one belongs; generate, logits, embed"),
        (np.array([IDS, IDS]), "an array of token ids has 2 dimensions, where a prompt has one"),
        (jnp.array([IDS]), "an array of token ids has 2 dimensions"),
        (np.array(5), "a prompt is .*5"),
        (np.array([1.0]), "token ids are whole numbers, not an array of float64"),
        (jnp.array([1.0]), "token ids are whole numbers, not an array of float32"),
        (np.array([True]), "token ids are whole numbers, not an array of bool"),
        (np.array(["a"]), "token ids are whole numbers, not an array of"),
        ([HELLO, 1], "message 1 is a int; write"),
    ],
)
def test_what_is_no_prompt(given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}") as caught:
        parse_prompts(given)
    assert "\n" not in str(caught.value)


def test_messages_of_parts_and_texts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, "three"]
    assert parse_messages("Hello") == [HELLO]
    assert parse_messages((HELLO,)) == [HELLO]
    assert parse_messages([{**HELLO, "content": parts}]) == [
        {**HELLO, "content": "one\ntwo\nthree"}
    ]
    calls: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
    assert parse_messages([HELLO, calls]) == [HELLO, calls]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "the conversation is empty; give a message: write {'role': 'user'"),
        (None, "a conversation is a list of messages, not a NoneType; write"),
        (HELLO, "a conversation is a list of messages, not a dict; write"),
        (5, "a conversation is a list of messages, not a int"),
        (["Hello"], "message 0 is a str; write"),
        ([HELLO, {"content": "x"}], "message 1 has no role; write"),
        ([{"role": 5, "content": "x"}], "message 0 has no role"),
        ([{"role": "user"}], "message 0 has no content; write"),
        ([{"role": "user", "content": 5}], "message 0 has content that is 5; write"),
        ([{"role": "user", "content": b"x"}], "message 0 has content that is b'x'"),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
            "message 0 has a part of type 'input_audio', which is not read; give parts like",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0 has a part of type 'text'"),
        ([{"role": "user", "content": [5]}], "message 0 has a part of type 'int'"),
    ],
)
def test_what_is_no_conversation(given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}") as caught:
        parse_messages(given)
    assert "\n" not in str(caught.value)


def test_keywords_lie_over_parameters_and_these_over_defaults() -> None:
    defaults: dict[str, Any] = {"temperature": 0.5, "top_k": 5, "max_tokens": 9}
    assert parse_params(defaults, None, {}) == SamplingParams(**defaults)
    changed = parse_params(defaults, None, {"top_k": 7})
    assert changed == SamplingParams(temperature=0.5, top_k=7, max_tokens=9)
    of_both = parse_params(defaults, {"top_k": 7, "top_p": 0.5}, {"top_p": 0.6})
    assert of_both == SamplingParams(temperature=0.5, top_k=7, top_p=0.6, max_tokens=9)
    own = parse_params(defaults, SamplingParams(seed=1), {"max_tokens": 3})
    assert own == SamplingParams(seed=1, max_tokens=3)
    # Other engines' names are names of the same parameter.
    assert parse_params({"max_new_tokens": 9}, None, {"max_tokens": 3}).max_tokens == 3
    assert parse_params(defaults, {"repeat_penalty": 1.5}, {}).repetition_penalty == 1.5
    # A strategy brings its own filter, and not that of the one it takes the place of.
    assert parse_params({"strategy": "top_p"}, None, {"strategy": "min_p"}).top_p == 1.0


@pytest.mark.parametrize(
    ("params", "changes", "message"),
    [
        (None, {"max_tokns": 5}, "there is no parameter 'max_tokns'; did you mean 'max_tokens'?"),
        ({"temprature": 1}, {}, "there is no parameter 'temprature'; did you mean 'temperature'?"),
        (SamplingParams(), {"topp": 1}, "there is no parameter 'topp'; did you mean 'top_p'?"),
        (None, {"top_p": 2}, "top_p must be a number from 0 to 1, not 2"),
        ({"top_p": 2}, {}, "top_p must be a number from 0 to 1"),
        (SamplingParams(), {"n": 0}, "n must be a whole number from 1"),
        (None, {"stop": 5}, "stop must be a list, not 5"),
        (None, {"max_tokens": 5, "n_predict": 6}, "n_predict: max_tokens is given twice"),
        ("greedy", {}, "params is 'greedy'; give SamplingParams(...), a dictionary of its fields"),
        (5, {}, "params is 5; give SamplingParams"),
    ],
)
def test_wrong_parameters(params: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_params({}, params, changes)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_generate_takes_keywords_and_every_prompt(llm: LLM) -> None:
    ids = llm.encode("The capital of France is")
    (expected,) = llm.generate("The capital of France is", SamplingParams(max_tokens=4))
    for given in (ids, tuple(ids), np.array(ids), jnp.array(ids)):
        (answer,) = llm.generate(given, max_tokens=4)
        assert answer.token_ids == expected.token_ids
        assert "".join(c.text for c in llm.stream(given, max_tokens=4)) == expected.text
    both: list[Prompt] = ["a", ids]
    several = llm.generate(both, [{"max_tokens": 2}, SamplingParams(max_tokens=3)])
    assert [len(answer.token_ids) for answer in several] == [2, 3]
    assert len(llm.generate(ids, SamplingParams(max_tokens=9), max_tokens=2)[0].token_ids) == 2
    with pytest.raises(RequestError, match="2 prompts, but 1 sampling parameters"):
        llm.generate(["a", "b"], [{"max_tokens": 2}])
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate([[]])
    with pytest.raises(RequestError, match="did you mean 'max_tokens'"):
        llm.stream("a", max_tokns=5)  # type: ignore[call-arg]


def test_conversations_and_texts_are_answered_alike(llm: LLM) -> None:
    expected = llm.chat([HELLO], max_tokens=6).text
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert llm.chat("Hello", max_tokens=6).text == expected
    assert llm.chat(parts, {"max_tokens": 6}).text == expected
    assert llm.generate([HELLO], max_tokens=6)[0].text == expected
    both: list[Prompt] = [[HELLO], parts]
    assert [a.text for a in llm.generate(both, max_tokens=6)] == [expected, expected]
    assert "".join(c.text for c in llm.stream([HELLO], max_tokens=6)) == expected


def test_keywords_of_chat(llm: LLM) -> None:
    """Some are of sampling, some of the template; one that nobody knows is refused."""
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(RequestError, match=r"neither .* knows 'max_tokns'; did you mean 'max_tok"):
        llm.chat("Hello", max_tokns=5)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match=r"neither .* knows 'tools'"):
        llm.chat("Hello", tools=[tool])
    with pytest.raises(RequestError, match="variables is 5"):
        llm.chat("Hello", variables=5)  # type: ignore[arg-type]
    short = llm.chat("Hello", max_tokens=2, add_generation_prompt=True, variables={"tools": []})
    assert len(short.token_ids) == 2
    begun = [HELLO, {"role": "assistant", "content": "Well, "}]
    going_on = llm.chat(begun, max_tokens=2, continue_final_message=True)
    ids = llm.encode_chat(begun, continue_final_message=True)
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(ids).endswith("Well, ")
    assert going_on.token_ids == llm.generate([ids], max_tokens=2)[0].token_ids


def test_the_asynchronous_model_takes_the_same(llm: LLM) -> None:
    async def run() -> None:
        model = AsyncLLM(llm)
        (answer,) = await model.generate(np.array(IDS), max_tokens=3)
        assert len(answer.token_ids) == 3
        streamed = [id async for c in model.stream([HELLO], max_tokens=3) for id in c.token_ids]
        assert streamed == (await model.chat("Hello", max_tokens=3)).token_ids
        assert (await model.chat("Hello", choice=["yes"])).text == "yes"
        with pytest.raises(RequestError, match="did you mean 'max_tokens'"):
            await model.generate(IDS, max_tokns=5)  # type: ignore[call-arg]
        with pytest.raises(RequestError, match="params is 'greedy'"):
            await model.generate(IDS, "greedy")  # type: ignore[arg-type]

    asyncio.run(run())


def public(kind: type) -> dict[str, Any]:
    return {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}


def test_the_asynchronous_model_has_every_method_with_every_parameter() -> None:
    plain, other = public(LLM), public(AsyncLLM)
    assert plain.keys() == other.keys()
    for name in (name for name, method in plain.items() if callable(method)):
        wanted, found = (inspect.signature(each[name]).parameters for each in (plain, other))
        for one, same in zip(wanted.values(), found.values(), strict=True):
            assert (one.name, one.kind, one.default) == (same.name, same.kind, same.default), name


def test_the_page_names_every_method() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert [name for name in public(LLM) if not re.search(rf"`{name}\b", page)] == []


def test_priority_and_timeout(llm: LLM) -> None:
    with pytest.raises(RequestError, match="deadline has passed"):
        llm.generate(IDS, timeout=0.0)
    with pytest.raises(RequestError, match="deadline has passed"):
        llm.chat("Hello", timeout=0.0)
    with pytest.raises(RequestError, match="deadline has passed"):
        next(llm.stream(IDS, timeout=0.0))
    assert len(llm.generate(IDS, max_tokens=2, timeout=100, priority=-1)[0].token_ids) == 2
    for given in ({"timeout": "x"}, {"timeout": -1}, {"priority": 0.5}):
        with pytest.raises(RequestError, match=f"{next(iter(given))} is"):
            llm.generate(IDS, **given)


def test_arguments_that_this_model_does_not_read(llm: LLM) -> None:
    """They would be left out without a word."""
    with pytest.raises(RequestError, match="encoder_ids are for a model with an encoder and a dec"):
        llm.logits(IDS, encoder_ids=[1])
    with pytest.raises(RequestError, match="token_type_ids are for an encoder"):
        llm.hidden([IDS], token_type_ids=[[0, 0, 0]])
    with pytest.raises(RequestError, match="decoder_prefix and language are for a model with"):
        llm.generate(IDS, decoder_prefix=[1])
    with pytest.raises(RequestError, match="decoder_prefix and language are for a model with"):
        llm.stream(IDS, language="de")
    with pytest.raises(RequestError, match=r"the model is open already; give dtype to LLM\(...\)"):
        AsyncLLM(llm, dtype="float32")


def test_several_prompts_are_no_stream(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts is given where one belongs; generate"):
        llm.stream(["a", "b"])  # type: ignore[arg-type]


def test_text_of_tokens_and_tokens_of_text(llm: LLM) -> None:
    ids = llm.encode("The capital 😀")
    assert llm.decode(ids) == "The capital 😀"
    assert llm.decode(np.array(ids[:2])) == "The capital"
    found = llm.tokens("The capital 😀")
    assert found[:2] == ["The", " capital"]
    assert len(found) == len(ids)
    assert not any("\ufffd" in text for text in found)
    assert llm.tokens([HELLO])[0] == "<|im_start|>"
    assert llm.decode(llm.encode([HELLO])[:1]) == ""
    assert llm.decode(llm.encode([HELLO])[:1], skip_special=False) == "<|im_start|>"
    with pytest.raises(RequestError, match="outside the vocabulary"):
        llm.decode([-1])
    assert "49152 tokens, " in repr(llm.tokenizer)
    assert "eos 2 '<|im_end|>'" in repr(llm.tokenizer)


def test_the_last_logits(llm: LLM) -> None:
    texts = ["The capital", "Hello"]
    whole, last = llm.logits(texts), llm.logits(texts, last=True)
    for one, other in zip(whole, last, strict=True):
        np.testing.assert_array_equal(one[-1], other)


def test_answers_in_a_notebook(llm: LLM) -> None:
    answers = llm.generate(IDS, max_tokens=3, logprobs=2)
    assert pickle.loads(pickle.dumps(answers)) == answers
    shown = answers._repr_html_()  # type: ignore[attr-defined]
    assert shown == answers[0]._repr_html_()
    assert shown.count("<span") == 3
    assert all(f"{math.exp(e.logprob):6.1%}" in shown for e in answers[0].logprobs or ())
    entry = TokenLogprob(1, "<b>", math.log(0.25), (TokenLogprob(2, "x\n", math.log(0.5)),))
    made = replace(answers[0], logprobs=[entry], text="<b>", token_ids=[1])
    (span,) = re.findall(r"<span ([^>]*)>([^<]*)<", made._repr_html_())
    said = " 25.0%  &lt;b&gt;  1\n 50.0%  x↵  2"
    assert span == (f'class="token" style="--s:.75" tabindex="0" title="{said}"', "&lt;b&gt;")
    plain = replace(made, logprobs=None)._repr_html_()
    assert ">&lt;b&gt;</div>" in plain
    assert "1 token, length; logprobs=5 shades its tokens" in plain
    assert "1, 2, 3" in replace(made, logprobs=None, text="", token_ids=[1, 2, 3])._repr_html_()


def test_tab_completes_sampling() -> None:
    for function in (LLM.generate, LLM.stream, AsyncLLM.generate, AsyncLLM.stream):
        assert set(PARAMETERS) < inspect.signature(function).parameters.keys()
    assert {*PARAMETERS, "tools", "special"} < inspect.signature(LLM.chat).parameters.keys()


def test_a_model_stays_in_its_process(llm: LLM) -> None:
    for each in (llm, AsyncLLM(llm)):
        with pytest.raises(TypeError, match=r"LLM\(smollm2_135m_instruct, .* cannot be pickled"):
            pickle.dumps(each)


def test_keywords_are_the_fields() -> None:
    """One definition for mypy, one for Python: names, types and order are the same."""
    assert list(get_type_hints(SamplingKeywords).items()) == list(
        get_type_hints(SamplingParams).items()
    )


PLANTED = """
import numpy as np
from jinfer import LLM, AsyncLLM, SamplingParams

llm = LLM("x")
llm.generate("Hello", max_tokens=5)
llm.generate(np.array([1, 2]), {"top_k": 5})
llm.generate([[{"role": "user", "content": "Hello"}]], [SamplingParams(), {"n": 2}])
llm.chat("Hello", seed=1, tools=[{}])
SamplingParams(temprature=1)  # wrong
llm.generate(5)  # wrong
llm.generate("Hello", max_tokns=5)  # wrong
llm.generate("Hello", max_tokens="5")  # wrong
llm.generate("Hello", {"top_j": 5})  # wrong
llm.stream("Hello", temprature=1)  # wrong
llm.chat("Hello", temprature=1)  # wrong
llm.generate("Hello")[0].txt  # wrong
llm.tokens("Hello")[0].upper()
llm.logits("Hello")[0].argmax(-1).tolist()
llm.logits("Hello")[0].argmx()  # wrong
llm.embed("Hello").spahe  # wrong
text: str = llm.score("Hello")[0]  # wrong
model = AsyncLLM(llm)
model.encode("Hello")[0].bit_length()
model.encode("Hello")[0].bits()  # wrong
model.genrate("Hello")  # wrong
"""


def test_mypy_finds_mistakes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PLANTED)
    command = [sys.executable, "-m", "mypy"]  # what it knows of the modules is that of `make lint`
    config = ["--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, *config, str(script)], capture_output=True, text=True, cwd=ROOT
    )
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    lines = PLANTED.splitlines()
    assert found == {n for n, line in enumerate(lines, 1) if "# wrong" in line}, done.stdout
