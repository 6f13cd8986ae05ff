"""Requests that are refused, closed, interrupted or fail, and what becomes of the others."""

import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from jinfer import LLM, EngineError, RequestError, SamplingParams
from jinfer.cpu import build_library
from jinfer.cpu import library_calls as cpu
from jinfer.engine.engine import Engine
from jinfer.engine.runner import sampler_output
from jinfer.engine.runner.forward_passes import Passes
from jinfer.engine.runner.step_key import StepKey
from tests.engine.tiny import GREEDY, PROMPTS, held, ids, open_model

pytestmark = pytest.mark.usefixtures("nothing_leaks")


def test_a_stream_that_is_closed_frees_its_slot(llm: LLM, alone: list[list[int]]) -> None:
    for prompt in PROMPTS:
        stream = llm.stream(prompt, GREEDY)
        next(stream)
        stream.close()
    assert held(llm) == 0
    assert not llm._engine.busy
    assert ids(llm.generate(PROMPTS, GREEDY)) == alone


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


@pytest.mark.skipif(not build_library.available(), reason="needs custom calls")
def test_interrupted_calls(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A raised flag ends a call before its first step; the next one makes up for it."""
    monkeypatch.setattr(sampler_output, "CALL_SECONDS", 1000.0)
    taken: list[int] = []
    decode, read = Engine._launch_decode, Engine._read_call

    def decoded(self: Engine, plan: Any) -> bool:
        self.interrupt.set(len(taken) % 2 == 0)
        return decode(self, plan)

    def watched(self: Engine, launched: Any) -> Any:
        if launched.decodes:
            taken.append(int((np.asarray(launched.output.tokens) >= 0).any(axis=1).sum()))
        return read(self, launched)

    monkeypatch.setattr(Engine, "_launch_decode", decoded)
    monkeypatch.setattr(Engine, "_read_call", watched)
    assert ids(llm.generate(PROMPTS, GREEDY)) == alone
    assert 0 in taken
    assert max(taken) > 1


@pytest.mark.skipif(not build_library.available(), reason="needs custom calls")
def test_a_request_does_not_interrupt_itself(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the flag is raised for what an idle engine has taken already."""
    steps: list[int] = []
    was_raised = threading.Event()
    raise_flag, decode, read = cpu.Flag.set, Engine._launch_decode, Engine._read_call

    def late(self: cpu.Flag, raised: bool) -> None:
        time.sleep(0.05 if raised else 0.0)
        raise_flag(self, raised)
        if raised:
            was_raised.set()

    def decoded(self: Engine, plan: Any) -> bool:
        assert was_raised.wait(60)
        return decode(self, plan)

    def watched(self: Engine, launched: Any) -> Any:
        steps.append(int((np.asarray(launched.output.tokens) >= 0).any(axis=1).sum()))
        return read(self, launched)

    monkeypatch.setattr(cpu.Flag, "set", late)
    monkeypatch.setattr(Engine, "_launch_decode", decoded)
    monkeypatch.setattr(Engine, "_read_call", watched)
    for _ in range(2):  # computed, and cached
        was_raised.clear()
        assert ids(llm.generate(PROMPTS[:1], GREEDY)) == alone[:1]
    assert 0 not in steps


def test_failed_steps_leave_nothing_behind(llm: LLM, alone: list[list[int]]) -> None:
    with pytest.raises(RequestError):
        llm.generate([PROMPTS[0], [999]], GREEDY)
    assert ids(llm.generate(PROMPTS[:1], GREEDY)) == alone[:1]


@pytest.mark.parametrize("kind", ["logits", "decode", "sample"])
def test_an_error_costs_the_requests_of_its_step_only(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The cache was given away to the step that failed; what waits is computed all the same."""
    get, failures = llm._engine.runner.programs.get, []

    def failing(shape: StepKey) -> Any:
        compiled = get(shape)

        def run(*arguments: Any) -> Any:
            failures.append(shape)
            compiled(*arguments)
            raise MemoryError("none left")

        return run if shape.kind == kind and not failures else compiled

    monkeypatch.setattr(llm._engine.runner.programs, "get", failing)
    results: list[Any] = []
    for prompt in PROMPTS:  # more than there are slots
        pieces: list[Any] = []
        results.append(pieces)
        (prepared,) = llm.session.prepare(prompt, GREEDY)
        llm.session.submit(prepared, pieces.append)
    llm.session.thread.run(lambda engine: None)
    while llm._engine.busy:
        llm.session.thread.run(lambda engine: None)
    llm.session.thread.run(lambda engine: None)  # what the last step gave has been told
    failed = [pieces for pieces in results if isinstance(pieces[-1], EngineError)]
    assert failed
    assert all("a step failed: MemoryError: none left" in str(pieces[-1]) for pieces in failed)
    for pieces, expected in zip(results, alone, strict=True):
        if pieces not in failed:
            assert [id for chunk in pieces[:-1] for id in chunk.token_ids] == expected
    assert len(failed) < len(results)
    monkeypatch.undo()
    assert ids(llm.generate(PROMPTS, GREEDY)) == alone


def test_ctrl_c_ends_the_requests_of_its_caller(llm: LLM, alone: list[list[int]]) -> None:
    other = llm.stream(PROMPTS[1], GREEDY)
    tokens = list(next(other).token_ids)
    stream = llm.stream(PROMPTS[2], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt)
    tokens += [id for chunk in other for id in chunk.token_ids]
    assert tokens == alone[1]


def test_ctrl_c_ends_the_passes_of_its_caller(llm: LLM, alone: list[list[int]]) -> None:
    """Those of a trace or a score, after the part that runs; the model can be used at once."""
    ended = threading.Event()

    def passes(engine: Engine) -> Passes[None]:
        again = 0.0
        try:
            while True:
                # Python does not notice a signal between its look for one and a wait for a lock.
                if time.monotonic() >= again:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                    again = time.monotonic() + 3
                yield "computed"
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        llm.session.thread.run(passes)
    assert ended.wait(60)
    assert ids(llm.generate(PROMPTS, GREEDY)) == alone


def test_a_closed_model_says_so() -> None:
    with open_model() as llm:
        llm.generate([PROMPTS[0]], GREEDY)
    with pytest.raises(RequestError, match="the model was closed"):
        llm.generate([PROMPTS[0]], GREEDY)
