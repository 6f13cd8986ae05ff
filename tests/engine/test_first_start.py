"""A first start: what compiles at a time, and what weights wait for."""

import threading
from pathlib import Path
from typing import Any

import pytest

from jinfer import LLM
from jinfer.api import build_engine, session
from jinfer.api.build_engine import load as read
from jinfer.disk_cache import DiskCache
from jinfer.engine.engine import Engine
from jinfer.engine.runner import compiled_programs
from jinfer.engine.runner.program_cache import compiled_apart

GOLDEN = Path(__file__).parents[1] / "goldens" / "llama2"


class Start:
    """A start of a tiny model, and what was seen of it.

    Attributes:
        compiled: programs so far; `at_once`: at most at a time.
        at_load: programs compiled by the time its weights were read, of how many in all.
    """

    def __init__(self, stored: DiskCache, patch: pytest.MonkeyPatch) -> None:
        self.compiled = self.running = self.at_once = 0
        self.at_load = (0, 0)
        lock = threading.Lock()

        def compile_one(lowered: Any) -> Any:
            with lock:
                self.running += 1
                self.at_once = max(self.at_once, self.running)
            try:
                return compiled_apart(lowered)
            finally:
                with lock:
                    self.running -= 1
                    self.compiled += 1

        def load(engine: Engine, *rest: Any, **keywords: Any) -> None:
            self.at_load = (self.compiled, engine.runner.programs.compilations)
            read(engine, *rest, **keywords)

        patch.setattr(compiled_programs, "compiled_apart", compile_one)
        patch.setattr(session, "load", load)
        patch.setattr(session, "use_persistent_cache", lambda: stored)
        keys: dict[str, Any] = {"engine.slots": 1, "engine.prefill_chunk": 8}
        with LLM(GOLDEN, first=lambda _: [1] * 12, **keys) as llm:
            self.answer = llm.generate([[1] * 12], max_tokens=4)[0].token_ids


@pytest.fixture
def stored(tmp_path: Path) -> DiskCache:
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    return DiskCache(folder, "a version")


def test_small_weights_wait_for_what_compiles(
    stored: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be in memory beside what compilers need. What is stored is not waited for."""
    monkeypatch.setattr(compiled_programs, "cores", lambda: 1)
    first = Start(stored, monkeypatch)
    assert first.at_load[0] == first.at_load[1] > 3
    assert first.at_once == 1
    monkeypatch.undo()
    waited: list[Any] = []
    monkeypatch.setattr(build_engine, "wait", waited.append)
    second = Start(stored, monkeypatch)
    assert second.compiled == 0
    assert not waited
    assert second.answer == first.answer


def test_large_weights_are_read_meanwhile(
    stored: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(build_engine, "wait", waited.append)
    monkeypatch.setattr(build_engine, "_SMALL_WEIGHTS", 1000)
    start = Start(stored, monkeypatch)
    assert start.compiled > 3
    assert not waited
