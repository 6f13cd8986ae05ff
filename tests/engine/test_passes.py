"""Passes over whole texts, in pieces between which those that stream have their steps."""

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from jinfer import LLM, RequestError, SamplingParams
from jinfer.engine.output.completion import Usage
from jinfer.engine.runner.step_key import StepKey

GOLDEN = Path(__file__).parents[1] / "goldens" / "llama2"
PIECE = 16
TEXT = np.random.default_rng(1).integers(3, 320, 200).tolist()
ENDLESS = SamplingParams(max_tokens=250, ignore_eos=True)
STEPS = {"decode", "logits"}
KEYS: dict[str, Any] = {"dtype": "float32", "engine.slots": 4, "engine.mixed_chunk": PIECE}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(GOLDEN, **KEYS) as llm:
        llm.generate([[5, 6]], max_tokens=2)
        yield llm


class Streams:
    """Some answers on their way, and the programs that ran meanwhile."""

    def __init__(self, llm: LLM, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.llm, self.ran = llm, []
        self.prepared = [llm.session.prepare([3 + i, 4], ENDLESS)[0] for i in range(count)]
        self.pieces: list[SimpleQueue[Any]] = [SimpleQueue() for _ in self.prepared]
        programs = llm.session.engine.runner.programs
        get = programs.get

        def noted(shape: StepKey) -> Any:
            self.ran.append((shape.kind, len(llm.session.engine.scheduler.running)))
            return get(shape)

        monkeypatch.setattr(programs, "get", noted)

    ran: list[tuple[str, int]]

    def __enter__(self) -> "Streams":
        for one, queue in zip(self.prepared, self.pieces, strict=True):
            self.llm.session.submit(one, queue.put)
        for queue in self.pieces:
            queue.get(timeout=60)
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.prepared:
            self.llm.session.thread.cancel(one.request.id)
        self.llm.session.thread.run(lambda engine: None)

    def beside(self, kind: str) -> list[str]:
        """The passes of a kind, and the steps that ran while all streams did."""
        count = len(self.prepared)
        return [one for one, running in self.ran if running == count and one in {kind, *STEPS}]


@pytest.mark.parametrize(
    ("ask", "kind"),
    [(LLM.score, "score"), (LLM.logits, "forward"), (LLM.embed, "forward")],
    ids=["score", "logits", "embed"],
)
def test_streams_have_a_step_after_each_piece(
    llm: LLM, ask: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(llm, [TEXT[:PIECE]])  # its program is there before the streams are
    expected = ask(llm, [TEXT])
    with Streams(llm, 4, monkeypatch) as streams:
        found = ask(llm, [TEXT])
        assert all(queue.qsize() for queue in streams.pieces)
    np.testing.assert_array_equal(found[0], expected[0])
    ran = streams.beside(kind)
    assert ran.count(kind) >= len(TEXT) // PIECE
    assert (kind, kind) not in pairwise(ran)


def test_many_short_texts_have_steps_between_them(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.score([TEXT[:9]])
    with Streams(llm, 4, monkeypatch) as streams:
        asking = [threading.Thread(target=llm.score, args=([TEXT[i : i + 9]],)) for i in range(12)]
        for one in asking:
            one.start()
        for one in asking:
            one.join()
    ran = streams.beside("score")
    assert ran.count("score") == 12
    assert ("score", "score") not in pairwise(ran)


def test_a_failed_step_begins_a_pass_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is lost with the step, and what the pass had written to it."""
    expected = llm.score([TEXT])
    engine = llm.session.engine
    step = engine.step
    failed: list[bool] = []

    def broken() -> Any:
        if engine.scheduler.slotless and not failed:
            failed.append(True)
            engine.runner.set_cache(engine.runner.programs.allocate_kv_cache())
            raise FloatingPointError("a step that fails")
        return step()

    with Streams(llm, 1, monkeypatch) as streams:
        monkeypatch.setattr(engine, "step", broken)
        found = llm.score([TEXT])
        end = None
        while not isinstance(end, (Exception, Usage)):
            end = streams.pieces[0].get(timeout=60)
    assert failed
    assert "a step that fails" in str(end)
    np.testing.assert_array_equal(found[0], expected[0])


@pytest.mark.parametrize(
    ("room", "asked"),
    [(256, {"max_tokens": 150}), (448, {"max_tokens": 60, "strategy": "beam", "beams": 2})],
)
def test_a_small_cache_is_shared_with_passes(room: int, asked: dict[str, Any]) -> None:
    """Neither the text nor the answer that leave no room for each other fail."""
    with LLM(GOLDEN, **(KEYS | {"engine.kv_tokens": room})) as llm:
        how = SamplingParams(ignore_eos=True, **asked)
        expected, scores = llm.generate([TEXT[:40]], how), llm.score([TEXT])
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.extend(llm.generate([TEXT[:40]], how)))
        asking.start()
        for _ in range(20):
            np.testing.assert_array_equal(llm.score([TEXT])[0], scores[0])
        asking.join()
        assert found[0].token_ids == expected[0].token_ids
        assert llm.stats().blocks_held == 0


def test_what_never_fits_is_refused() -> None:
    with LLM(GOLDEN, **(KEYS | {"engine.kv_tokens": 128})) as llm:
        with pytest.raises(RequestError, match="the cache is too small for this; set engine"):
            llm.score([TEXT])
        assert llm.stats().blocks_held == 0


def test_a_failed_step_ends_a_request_that_nobody_listens_to(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a job submitted to the engine itself, as measuring drafts does."""
    engine = llm.session.engine
    prepared = llm.session.prepare([5, 6], ENDLESS)[0]
    request, choice = prepared.request, prepared.choice
    failed = threading.Event()

    def broken() -> Any:
        if any(one.request.id == request.id for one in engine.scheduler.running):
            failed.set()
            raise FloatingPointError("a step that fails")
        return step()

    step = engine.step
    with monkeypatch.context() as patched:
        patched.setattr(engine, "step", broken)
        llm.session.thread.run(lambda engine: engine.submit(request, choice))
        assert failed.wait(60)
        llm.session.thread.run(lambda engine: None)
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.blocks_held) == (0, 0, 0)
