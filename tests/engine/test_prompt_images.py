"""Images of a prompt by token: cache ids, positions on a grid, attention both ways, chunks."""

from __future__ import annotations

import numpy as np
import pytest

from jinfer.engine.prompt_images import ImageSpan, PromptImages
from jinfer.engine.requests import RequestError
from tests.engine.images import Drawn, span

TEXT = list(range(10, 40))


def test_cache_ids_depend_on_image_and_place_alone() -> None:
    a, b = Drawn(1, 6), Drawn(2, 6)
    first = PromptImages.of(TEXT, [span(4, a)])
    later = PromptImages.of(TEXT, [span(9, a), span(20, b)])
    other = PromptImages.of(TEXT, [span(4, b)])
    ids = first.cache_ids[4:10]
    assert first.cache_ids[:4] == tuple(TEXT[:4])
    assert first.cache_ids[10:] == tuple(TEXT[10:])
    assert all(id < 0 for id in ids)
    assert len(set(ids)) == 6
    assert later.cache_ids[9:15] == ids
    assert set(ids).isdisjoint(other.cache_ids)


def test_positions_on_a_grid() -> None:
    """As transformers' get_rope_index for text, an image of 2 x 3, text."""
    images = PromptImages.of(TEXT[:12], [span(2, Drawn(0, 6), columns=3)], "grid")
    positions = np.arange(12) + images.shifts
    assert positions[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8]
    assert positions[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8]
    assert positions[2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8]
    assert images.shift == images.shift_at(12) == images.shift_at(8) == -3
    assert images.shift_at(1) == 0


def test_chunks_cut_no_image_that_attends_both_ways() -> None:
    images = PromptImages.of(TEXT, [span(4, Drawn(0, 6)), span(12, Drawn(1, 4))], mask="image")
    assert images.longest == 6
    assert [images.whole_end(0, end) for end in (1, 4, 5, 9, 10, 11, 14, 30, 99)] == [
        *(1, 4, 4, 4, 10, 11, 12, 30, 99)
    ]
    assert images.whole_end(4, 5) == 10
    assert images.whole_end(6, 7) == 10
    assert [images.whole_begin(token) for token in (3, 4, 9, 10, 15, 29, 40)] == [
        *(3, 4, 4, 10, 12, 29, 40)
    ]
    causal = PromptImages.of(TEXT, [span(4, Drawn(0, 6))])
    assert causal.whole_end(0, 5) == 5
    assert causal.longest == 0


def test_a_prompt_that_attends_both_ways() -> None:
    images = PromptImages.of(TEXT, [span(4, Drawn(0, 6))], mask="prompt")
    other = PromptImages.of([*TEXT[:-1], 5], [span(4, Drawn(0, 6))], mask="prompt")
    assert images.whole_end(0, 3) == images.longest == 30
    assert images.seed != other.seed


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ([span(28, Drawn(0, 6))], "outside its prompt"),
        ([span(4, Drawn(0, 6)), span(8, Drawn(1, 6))], "two images have a placeholder at 8"),
        ([ImageSpan(((4, 3),), (1, 6), Drawn(0, 6))], "an image of 6 tokens has 3 placeholders"),
        ([ImageSpan((), (1, 6), Drawn(0, 6))], "outside its prompt"),
        ([ImageSpan(((4, 6),), (2, 2), Drawn(0, 6))], "an image of 2 x 2 features has 6"),
    ],
)
def test_images_that_do_not_fit(wrong: list[ImageSpan], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        PromptImages.of(TEXT, wrong, "grid")
