"""The table of draft sources: a line is all that a new one takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jinfer import LLM
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.modelspec.speculation_table import DraftSpec
from jinfer.speculate import draft_sources
from jinfer.speculate.draft_sources import DRAFT_SOURCES, DraftSource, draft_source
from jinfer.speculate.drafter import Drafter
from jinfer.speculate.token_tree import TokenTree
from tests.engine.test_schedules import STORIES

PAGE = Path(__file__).parents[2] / "docs" / "speculation.md"


@dataclass
class Counting(Drafter):
    """Drafts the numbers from 0 on."""

    def draft(self, requested: Sequence[tuple[RunningSequence, int]]) -> list[TokenTree]:
        return [TokenTree.chain(list(range(levels)), "counting") for _, levels in requested]


def test_a_line_adds_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"counting": DraftSource(lambda _: Counting())}
    monkeypatch.setattr(draft_sources, "DRAFT_SOURCES", {**DRAFT_SOURCES, **line})
    settings: dict[str, Any] = {"speculation.draft": "counting", "speculation.nodes": 4}
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    with LLM(STORIES) as plain, LLM(STORIES, **settings) as drafted:
        (expected,) = plain.generate([[1, 9, 5]], **sampling)
        (answer,) = drafted.generate([[1, 9, 5]], **sampling)
    assert answer.token_ids == expected.token_ids
    assert answer.usage.drafted_tokens > 0
    assert answer.speculation is not None
    assert set(answer.speculation.tried()) == {"counting"}


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        (DraftSpec("ngram"), DRAFT_SOURCES["ngram"]),
        (DraftSpec(skip=(1,)), draft_sources.SKIPPED_LAYERS),
        (DraftSpec(weights="q3"), draft_sources.OTHER_MODEL),
        (DraftSpec("some/model", device=1), draft_sources.OTHER_MODEL),
    ],
)
def test_source_of_an_entry(entry: DraftSpec, source: DraftSource) -> None:
    assert draft_source(entry) is source
    assert source.check(entry) is None


@pytest.mark.parametrize(
    ("entry", "key"),
    [(DraftSpec("ngram", weights="q4"), "source"), (DraftSpec("suffix", device=0), "device")],
)
def test_options_that_a_source_does_not_take(entry: DraftSpec, key: str) -> None:
    wrong = draft_source(entry).check(entry)
    assert wrong is not None
    assert wrong[0] == key


@pytest.mark.parametrize("name", DRAFT_SOURCES)
def test_each_source_is_documented(name: str) -> None:
    assert f'`"{name}"`' in PAGE.read_text(encoding="utf-8")
