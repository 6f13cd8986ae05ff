"""The step loop: slots, queue, streams, reuse of what the cache holds, compilations."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jinfer import LLM, RequestError, SamplingParams
from jinfer.engine import engine
from jinfer.engine.engine import Engine
from jinfer.engine.programs import Programs, Shape
from jinfer.engine.steps import MAX_STEPS
from jinfer.ops.cache import nbytes
from jinfer.spec.errors import SpecError

GOLDEN = Path(__file__).parents[1] / "goldens" / "llama2"
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, 320, n).tolist() for n in (3, 16, 17, 40, 5, 29, 64, 11, 2)]
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)


def open_model(**overrides: Any) -> LLM:
    return LLM(GOLDEN, **{"dtype": "float32", "engine.slots": 4, **overrides})


@pytest.fixture(scope="module")
def llm() -> LLM:
    return open_model()


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """Greedy continuations computed from logits, without the decode loop."""
    return [continued(llm, prompt, 10) for prompt in PROMPTS]


def continued(llm: LLM, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(llm.logits([tokens])[0][-1])))
    return tokens[len(prompt) :]


def ids(answers: list) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def test_more_requests_than_slots(llm: LLM, alone: list[list[int]]) -> None:
    assert ids(llm.generate(PROMPTS, GREEDY)) == alone


def test_a_request_alone_and_in_company(llm: LLM, alone: list[list[int]]) -> None:
    assert [ids(llm.generate([prompt], GREEDY))[0] for prompt in PROMPTS] == alone


def test_drawn_tokens_do_not_depend_on_company(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.9, seed=s, max_tokens=10) for s in range(len(PROMPTS))]
    together = ids(llm.generate(PROMPTS, params))
    backwards = ids(llm.generate(PROMPTS[::-1], params[::-1]))[::-1]
    assert together == backwards
    other = [SamplingParams(temperature=0.9, seed=s + 99, max_tokens=10) for s in range(9)]
    assert ids(llm.generate(PROMPTS, other)) != together


def test_requests_of_different_lengths(llm: LLM, alone: list[list[int]]) -> None:
    lengths = [1, 10, 3, 7, 2, 10, 5, 1, 4]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    answers = ids(llm.generate(PROMPTS, params))
    assert answers == [tokens[:n] for tokens, n in zip(alone, lengths, strict=True)]


def test_prompts_are_computed_in_chunks(alone: list[list[int]]) -> None:
    assert ids(open_model(**{"engine.prefill_chunk": 16}).generate(PROMPTS, GREEDY)) == alone


def test_streams_that_take_turns(llm: LLM, alone: list[list[int]]) -> None:
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:6]]
    taken: list[list[int]] = [[] for _ in streams]
    for pieces in zip(*streams, strict=True):
        for tokens, piece in zip(taken, pieces, strict=True):
            tokens += piece.token_ids
    assert taken == alone[:6]


def test_a_stream_that_is_closed_frees_its_slot(llm: LLM, alone: list[list[int]]) -> None:
    for prompt in PROMPTS:
        stream = llm.stream(prompt, GREEDY)
        next(stream)
        stream.close()
    assert not llm._engine.busy
    assert ids(llm.generate(PROMPTS, GREEDY)) == alone


def test_what_the_cache_holds_is_reused(llm: LLM) -> None:
    prompt = PROMPTS[6]
    answer = llm.generate([prompt], GREEDY)[0].token_ids
    longer = [*prompt, *answer, 7, 8, 9]
    assert ids(llm.generate([longer], GREEDY)) == [continued(llm, longer, 10)]
    # The same again, and its beginning: everything but the last tokens is there already.
    assert ids(llm.generate([longer], GREEDY)) == [continued(llm, longer, 10)]
    assert ids(llm.generate([longer[:50]], GREEDY)) == [continued(llm, longer[:50], 10)]


def test_up_to_the_end_of_the_context(llm: LLM) -> None:
    assert llm.context == 256
    prompt = RNG.integers(3, 320, 250).tolist()
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    answer = llm.generate([prompt], params)[0]
    assert answer.finish_reason == "length"
    assert answer.token_ids == continued(llm, prompt, 6)
    full = llm.generate([prompt + answer.token_ids[:5]], params)[0]
    assert full.token_ids == answer.token_ids[5:]


def test_a_context_of_any_length() -> None:
    """The cache's length need not be a power of two."""
    llm = open_model(**{"engine.context": 150})
    prompt = PROMPTS[6] * 2 + PROMPTS[1]
    assert llm.generate([prompt], SamplingParams(max_tokens=None, ignore_eos=True))[
        0
    ].token_ids == continued(llm, prompt, 6)


def test_a_context_above_the_models() -> None:
    with pytest.raises(SpecError, match=r"engine.context: 512 is above the 256 tokens"):
        open_model(**{"engine.context": 512})
    longer = open_model(**{"engine.context": 512, "dims.context": 512})
    assert longer.context == 512


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], None, "prompt is empty"),
        ([1] * 256, None, "256 tokens, which leaves no room in a context of 256"),
        ([1, 320], None, "token 320 is outside the vocabulary of 320"),
        ([-1], None, "token -1 is outside"),
        ("text", None, "no tokenizer"),
        ([1], SamplingParams(stop="x"), "stop texts need a tokenizer"),
    ],
)
def test_requests_that_cannot_be_run(llm: LLM, prompt: Any, params: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate([prompt], params)
    assert not llm._engine.busy


def test_end_of_sequence_and_stop_ids(llm: LLM, alone: list[list[int]]) -> None:
    prompt, expected = PROMPTS[3], alone[3]
    stopped = llm.generate([prompt], SamplingParams(max_tokens=10, stop_token_ids=[expected[4]]))[0]
    first = expected.index(expected[4])
    assert stopped.token_ids == expected[: first + 1]
    assert stopped.finish_reason == "stop"
    forbidden = SamplingParams(max_tokens=10, min_tokens=8, stop_token_ids=[expected[4]])
    answer = llm.generate([prompt], forbidden)[0].token_ids
    assert expected[4] not in answer[:8]
    assert answer[:first] == expected[:first]


def test_the_first_token_does_not_wait_for_the_second_s_program(
    alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    came, compile_now = threading.Event(), Programs._compile

    def late(self: Programs, shape: Shape) -> Any:
        assert shape.kind != "decode" or came.wait(60)
        return compile_now(self, shape)

    monkeypatch.setattr(Programs, "_compile", late)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    with contextlib.closing(open_model().stream(PROMPTS[0], params)) as stream:
        tokens = list(next(stream).token_ids)
        came.set()
        tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tokens == alone[0][:5]


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_several_steps_a_call(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """The tokens are the same; a call ends with the last of its sequences."""
    monkeypatch.setattr(engine, "CALL_SECONDS", seconds)
    launched = []
    decode = Engine._decode

    def watched(self: Engine, slots: Any, *rest: Any) -> bool:
        begun = decode(self, slots, *rest)
        if begun:
            launched.append((self._launched[-1], slots.state.positions))
        return begun

    monkeypatch.setattr(Engine, "_decode", watched)
    limits = [9, 3, 10, 7, 1, 10, 2, 8, 4]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in limits]
    expected = [tokens[:n] for tokens, n in zip(alone, limits, strict=True)]
    assert ids(llm.generate(PROMPTS, params)) == expected
    assert max(call.steps for call, _ in launched) == (1 if seconds == 0 else MAX_STEPS)
    # The device alone finds a stop id; nothing is computed beyond it.
    launched.clear()
    prompt, stop = PROMPTS[3], alone[3][2]
    answer = llm.generate([prompt], SamplingParams(max_tokens=30, stop_token_ids=[stop]))[0]
    count = alone[3].index(stop) + 1
    assert answer.token_ids == alone[3][:count]
    (slot, _), positions = launched[-1][0].rows[0], launched[-1][1]
    assert positions[slot] == len(prompt) + count - 1
    drawn = [SamplingParams(temperature=1.5, seed=7, max_tokens=10, logprobs=2)] * 9
    answers = llm.generate(PROMPTS, drawn)
    assert [len(answer.logprobs or ()) for answer in answers] == [10] * 9
    monkeypatch.undo()
    again = llm.generate(PROMPTS, drawn)
    assert ids(again) == ids(answers)
    assert [a.logprobs for a in again] == [a.logprobs for a in answers]


def test_logprobs(llm: LLM, alone: list[list[int]]) -> None:
    prompt = PROMPTS[3]
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3)
    answers = llm.generate([prompt, PROMPTS[1]], [params, GREEDY])
    assert answers[1].logprobs is None
    assert answers[0].token_ids == alone[3][:6]
    logits = llm.logits([prompt + alone[3][:6]])[0][len(prompt) - 1 : -1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert answers[0].logprobs is not None
    for row, entry in zip(expected, answers[0].logprobs, strict=True):
        assert entry.logprob == pytest.approx(row[entry.id], abs=1e-4)
        assert [top.id for top in entry.top] == np.argsort(-row)[:3].tolist()
        np.testing.assert_allclose(
            [top.logprob for top in entry.top], np.sort(row)[::-1][:3], atol=1e-4
        )


def test_nothing_is_compiled_after_warm_up(llm: LLM) -> None:
    llm.generate(PROMPTS, GREEDY)
    llm.generate(PROMPTS[:1], GREEDY)
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    before = llm.compilations
    drawing = SamplingParams(temperature=0.5, top_k=5, top_p=0.9, min_p=0.1, max_tokens=7)
    for params in (GREEDY, drawing, SamplingParams(max_tokens=3, min_tokens=2)):
        llm.generate(PROMPTS, params)
        llm.generate(PROMPTS[:1], params)
    assert llm.compilations == before
    assert compiled == []


def test_the_cache_is_updated_in_place(llm: LLM) -> None:
    """Donation holds: the cache goes out in the memory it came in with, and is not copied."""
    programs = llm._engine.programs
    llm.generate(PROMPTS, GREEDY)
    slots = llm._engine._slots
    assert slots is not None
    for shape in [
        Shape("decode", slots.count, slots.length),
        Shape("prefill", slots.count, slots.length, tokens=64),
    ]:
        memory = programs.get(shape).memory_analysis()
        assert memory.alias_size_in_bytes >= nbytes(slots.cache)
        layer = nbytes(slots.cache) // len(slots.cache)
        text = programs.get(shape).as_text()
        shapes = {f"f32[{','.join(map(str, c.keys.shape))}]" for c in slots.cache.values()}
        copies = [line for line in text.splitlines() if " copy(" in line]
        assert not [line for line in copies if any(shape in line for shape in shapes)], layer


def test_failed_steps_leave_nothing_behind(llm: LLM, alone: list[list[int]]) -> None:
    with pytest.raises(RequestError):
        llm.generate([PROMPTS[0], [999]], GREEDY)
    assert ids(llm.generate(PROMPTS[:1], GREEDY)) == alone[:1]


@pytest.mark.parametrize("program", ["prefill", "decode"])
def test_an_interrupted_step_costs_its_requests_only(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """Ctrl-C between a program's launch and the keeping of its result: the cache is gone."""
    other = llm.stream(PROMPTS[1], GREEDY)
    next(other)
    get = llm._engine.programs.get

    def interrupted(shape: Shape) -> Any:
        compiled = get(shape)

        def run(*arguments: Any) -> Any:
            compiled(*arguments)
            raise KeyboardInterrupt

        return run if shape.kind == program else compiled

    monkeypatch.setattr(llm._engine.programs, "get", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[:3], GREEDY)
    monkeypatch.undo()
    with pytest.raises(RequestError, match="was lost when another one was interrupted"):
        list(other)
    assert ids(llm.generate(PROMPTS, GREEDY)) == alone
