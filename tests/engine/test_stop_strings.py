"""Stop texts end an answer at the same place whatever pieces it comes in."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jinfer.engine.output.generation import StopStrings

LETTERS = st.text("ab€", max_size=12)  # few letters, so that stops occur, overlap and nest
STOPS = st.lists(st.text("ab€", min_size=1, max_size=4), max_size=4).map(tuple)


def answer(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """What is to be shown, by reading letter by letter: up to where the first stop text that is
    complete begins; of several complete at the same letter, the longest counts."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


@given(LETTERS, STOPS, st.lists(st.integers(0, 12)))
@example("abaab", ("aab", "b"), [])
@example("aaab", ("aab",), [1, 2, 3])
@example("abab€", ("abab€", "ba"), [])
def test_pieces_do_not_matter(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    expected, ends = answer(text, stops)
    stopping = StopStrings(stops)
    shown = ""
    for piece in pieces(text, cuts):
        shown += stopping.push(piece)
        assert expected.startswith(shown)  # nothing is taken back later
    assert bool(stopping.found) == ends
    assert text.startswith(expected + stopping.found)
    shown += stopping.flush()
    assert shown == expected
    assert not any(stop in shown for stop in stops)


@given(LETTERS, STOPS)
def test_no_more_is_held_back_than_needed(text: str, stops: tuple[str, ...]) -> None:
    """What is held back is the beginning of some stop text, and what is shown ends in none."""
    stopping = StopStrings(stops)
    shown = "".join(map(stopping.push, text))
    if not stopping.found:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@given(LETTERS, LETTERS, STOPS, st.lists(st.integers(0, 12)))
@example("ab", "c", ("ab", "bc"), [])
@example("aab", "b", ("aabb", "ab"), [])
def test_what_is_complete_early_does_not_stop(
    early: str, later: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    """A stop text counts that a later letter completes, though it may have begun before."""
    stopping = StopStrings(stops)
    shown = "".join(stopping.push(piece, True) for piece in pieces(early, cuts))
    assert not stopping.found
    shown += "".join(map(stopping.push, later)) + stopping.flush()
    text = early + later
    ends = [
        (end, min(begins))
        for end in range(len(early) + 1, len(text) + 1)
        if (begins := [end - len(stop) for stop in stops if text[:end].endswith(stop)])
    ]
    assert shown == (text[: ends[0][1]] if ends else text)


def test_nothing_comes_after_a_stop() -> None:
    stopping = StopStrings(("END",))
    assert stopping.push("one E") == "one "
    assert stopping.push("ND two") == ""
    assert stopping.found
    assert (stopping.push("three"), stopping.flush()) == ("", "")


def test_what_was_held_back_comes_at_the_end() -> None:
    stopping = StopStrings(("END",))
    assert stopping.push("the EN") == "the "
    assert (stopping.flush(), stopping.flush()) == ("EN", "")


@pytest.mark.parametrize(
    ("text", "shown"), [("xabcdy", "xa"), ("xbcd", "x"), ("abc", "a"), ("xab", "xab")]
)
def test_the_stop_that_is_complete_first_counts(text: str, shown: str) -> None:
    """ "bc" is complete before "abcd", though that begins earlier."""
    stopping = StopStrings(("abcd", "bc"))
    assert stopping.push(text) + stopping.flush() == shown
