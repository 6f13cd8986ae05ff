"""Answers on a terminal: where lines are broken, and that nothing of a text is lost."""

import re

import pytest

from jinfer.cli.terminal.text_wrap import WrappingWriter


def shown(columns: int, *pieces: str) -> list[str]:
    """The lines that a terminal has in the end."""
    lines, screen = [""], WrappingWriter(columns)
    for piece in pieces:
        written = screen.wrapped(piece)
        for part in re.findall(r"\x1b\[\d+D|\x1b\[K|\n|.", written):
            if part == "\n":
                lines.append("")
            elif part.endswith("D"):
                lines[-1] = lines[-1][: -int(part[2:-1])]
            elif part != "\x1b[K":
                lines[-1] += part
    assert screen.column == sum(2 if letter > "\u3000" else 1 for letter in lines[-1])
    return lines


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (("The sky is blue",), ["The sky is", "blue"]),
        (("The sky", " is bl", "ue"), ["The sky is", "blue"]),
        (("The sky is", " ", "blue"), ["The sky is", "blue"]),
        (("one two\nthree",), ["one two", "three"]),
        (("a word\n\nafter",), ["a word", "", "after"]),
        (("incomprehensibilities",), ["incomprehe", "nsibilitie", "s"]),
        (("a incomprehensible",), ["a incompre", "hensible"]),
        (("天空是蓝色的吗",), ["天空是蓝色", "的吗"]),
        (("- x\n  y",), ["- x", "  y"]),
    ],
)
def test_lines_are_broken_between_words(pieces: tuple[str, ...], lines: list[str]) -> None:
    assert shown(11, *pieces) == lines
    whole = "".join(pieces)
    assert shown(11, *whole) == lines  # letter by letter


def test_elsewhere_a_text_stays_as_it_is() -> None:
    text = "a long line of many words\twith \x1b[31mcolours\x1b[0m"
    assert WrappingWriter(0).wrapped(text) == text
