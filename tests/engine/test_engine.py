"""The step loop: slots, queue, streams, reuse of what the cache holds, compilations."""

import contextlib
import threading
from typing import Any

import jax
import numpy as np
import pytest

from jinfer import LLM, RequestError, SamplingParams
from jinfer.engine.engine import Engine
from jinfer.engine.runner import sampler_output
from jinfer.engine.runner.compiled_programs import CompiledPrograms
from jinfer.engine.runner.sampler_output import MAX_STEPS
from jinfer.engine.runner.step_key import StepKey
from jinfer.modelspec.spec_errors import SpecError
from jinfer.ops.attention.kv_cache import nbytes
from jinfer.sampling.sampler_chain import sampler_sets
from tests.engine.tiny import GREEDY, PROMPTS, continued, held, ids, open_model

pytestmark = pytest.mark.usefixtures("nothing_leaks")
RNG = np.random.default_rng(6)


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


def test_what_the_cache_holds_is_reused(llm: LLM) -> None:
    prompt = RNG.integers(3, 320, 70).tolist()
    first = llm.generate([prompt], GREEDY)[0]
    longer = [*prompt, *first.token_ids, 7, 8, 9]
    second = llm.generate([longer], GREEDY)[0]
    assert second.token_ids == continued(llm, longer, 10)
    # All of the conversation but its last token, which was never computed, and what is new.
    assert second.usage.cached_tokens == len(prompt) + len(first.token_ids) - 1
    # The same again, and its beginning: everything but the last token is there already.
    again = llm.generate([longer], GREEDY)[0]
    assert again.token_ids == second.token_ids
    assert again.usage.cached_tokens == len(longer) - 1
    begin = llm.generate([longer[:50]], GREEDY)[0]
    assert begin.token_ids == continued(llm, longer[:50], 10)
    assert begin.usage.cached_tokens == 49


def test_the_last_token_of_an_answer_is_not_taken_from_the_cache(llm: LLM) -> None:
    """It was chosen, and never computed; its place in the cache holds something else."""
    prompt = RNG.integers(3, 320, 60).tolist()
    for count in (1, 2, 5):
        answer = llm.generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True))[0]
        longer = [*prompt, *answer.token_ids, 5]
        following = llm.generate([longer], GREEDY)[0]
        assert following.usage.cached_tokens == len(longer) - 2
        assert following.token_ids == continued(llm, longer, 10)


def test_one_beginning_is_computed_once(llm: LLM) -> None:
    begin = RNG.integers(3, 320, 150).tolist()
    prompts = [[*begin, *RNG.integers(3, 320, 5 + i).tolist()] for i in range(9)]
    before = llm.stats()
    answers = llm.generate(prompts, GREEDY)
    assert ids(answers) == [continued(llm, prompt, 10) for prompt in prompts]
    cached = [answer.usage.cached_tokens for answer in answers]
    assert cached[0] == 0
    assert all(count > 142 for count in cached[1:])  # a few more are computed anew
    after = llm.stats()
    assert after.cached_tokens - before.cached_tokens == sum(cached)
    assert after.prompt_tokens - before.prompt_tokens == sum(map(len, prompts))


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
    came, compile_now = threading.Event(), CompiledPrograms._compile

    def late(self: CompiledPrograms, shape: StepKey) -> Any:
        assert shape.kind != "decode" or came.wait(120)
        return compile_now(self, shape)

    monkeypatch.setattr(CompiledPrograms, "_compile", late)
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
    monkeypatch.setattr(sampler_output, "CALL_SECONDS", seconds)
    launched = []
    decode = Engine._launch_decode

    def watched(self: Engine, plan: Any) -> bool:
        begun = decode(self, plan)
        if begun:
            launched.append(self._in_flight[-1])
        return begun

    monkeypatch.setattr(Engine, "_launch_decode", watched)
    limits = [9, 3, 10, 7, 1, 10, 2, 8, 4]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in limits]
    expected = [tokens[:n] for tokens, n in zip(alone, limits, strict=True)]
    assert ids(llm.generate(PROMPTS, params)) == expected
    assert max(call.steps for call in launched) == (1 if seconds == 0 else MAX_STEPS)
    # The device alone finds a stop id; nothing is computed beyond it.
    launched.clear()
    prompt, stop = PROMPTS[3], alone[3][2]
    answer = llm.generate([prompt], SamplingParams(max_tokens=30, stop_token_ids=[stop]))[0]
    count = alone[3].index(stop) + 1
    assert answer.token_ids == alone[3][:count]
    computed = sum(int((np.asarray(call.output.tokens) >= 0).sum()) for call in launched)
    assert count - 1 <= computed <= count  # the first may have come with the prompt
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


@pytest.mark.parametrize("kind", ["logits", "decode", "copy_blocks", "forward"])
def test_the_cache_is_updated_in_place(llm: LLM, kind: Any) -> None:
    """Donation holds: the cache goes out in the memory it came in with, and is not copied."""
    programs = llm._engine.runner.programs
    size = 16 if kind in ("logits", "forward") else 4
    shape = StepKey(kind, size, 1, rows=1, stages=sampler_sets()[0])
    program = programs.get(shape)
    assert program.memory_analysis().alias_size_in_bytes >= nbytes(programs.allocate_kv_cache())
    pools = {f"f32[{','.join(map(str, c.keys.shape))}]" for c in programs.cache.values()}
    copies = [line for line in program.as_text().splitlines() if " copy(" in line]
    assert not [line for line in copies if any(pool in line for pool in pools)]


def test_threads_share_a_model(llm: LLM, alone: list[list[int]]) -> None:
    answers: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        for _ in range(3):
            answers[index] = llm.generate([PROMPTS[index]], GREEDY)[0].token_ids
            assert answers[index] == alone[index]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(len(PROMPTS))] == alone


def test_a_small_cache_preempts_and_changes_nothing() -> None:
    params = [
        SamplingParams(max_tokens=150, ignore_eos=True, seed=i, temperature=i % 2 * 0.8)
        for i in range(len(PROMPTS))
    ]
    with open_model() as large, open_model(**{"engine.kv_tokens": 384}) as small:
        expected = ids(large.generate(PROMPTS, params))
        assert ids(small.generate(PROMPTS, params)) == expected
        assert large.stats().preemptions == 0
        assert small.stats().preemptions > 0
        assert held(small) == held(large) == 0
        with pytest.raises(RequestError, match=r"256 tokens do not fit.* of 192; set engine"):
            open_model(**{"engine.kv_tokens": 192}).generate(
                [PROMPTS[0]], SamplingParams(max_tokens=None)
            )


def test_several_answers(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=8, ignore_eos=True)
    three = llm.generate([PROMPTS[3]], params)
    each = [
        SamplingParams(temperature=1.0, seed=5 + i, max_tokens=8, ignore_eos=True) for i in range(3)
    ]
    assert ids(three) == ids(llm.generate([PROMPTS[3]] * 3, each))
    assert three[0].logprobs is None
    best = SamplingParams(temperature=1.0, seed=5, n=1, best_of=3, max_tokens=8, ignore_eos=True)
    scored = llm.generate(
        [PROMPTS[3]] * 3,
        [
            SamplingParams(temperature=1.0, seed=5 + i, max_tokens=8, ignore_eos=True, logprobs=0)
            for i in range(3)
        ],
    )
    likeliest = max(scored, key=lambda a: sum(entry.logprob for entry in a.logprobs or ()))
    assert ids(llm.generate([PROMPTS[3]], best)) == [likeliest.token_ids]
    # Nothing is drawn: clients ask for several answers all the same, and get equal ones.
    (one,) = ids(llm.generate([PROMPTS[3]], SamplingParams(max_tokens=6)))
    for several in (
        SamplingParams(n=2, max_tokens=6),
        SamplingParams(n=2, best_of=3, max_tokens=6),
    ):
        assert ids(llm.generate([PROMPTS[3]], several)) == [one, one]


def test_all_programs_at_start() -> None:
    few = {"engine.slots": 2, "engine.prefill_chunk": 16}
    with open_model(**few, **{"engine.warm_up": True}) as llm:
        made = llm.compilations
        drawing = SamplingParams(temperature=0.5, top_k=5, max_tokens=7)
        rare = SamplingParams(temperature=0.5, mirostat=2, repetition_penalty=1.2, max_tokens=7)
        for params in (GREEDY, drawing, rare, SamplingParams(logprobs=3, max_tokens=3)):
            llm.generate(PROMPTS, params)
            llm.generate(PROMPTS[:1], params)
        assert llm.compilations == made
