"""Thinking budget: after so many tokens of a thought its end is forced, and the answer goes on.

The host counts, as it alone knows what the tokens spell. It sets how far a sequence may go without
it (`RunningSequence.limit`), so that the device, which may be several steps ahead, stops at the end
of the budget; tokens before it are sampled as without a budget, and other sequences go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jinfer.template.thinking_marks import ThinkingMarks


@dataclass(frozen=True)
class ThinkingLimit:
    """The thinking budget of a request.

    Attributes:
        budget: tokens that the answer's thoughts may have together, without their marks.
        marks: the marks around a thought.
        opened: whether the answer begins inside a thought.
        encode, decode: tokens of a text, special ones included, and their text.
        message: text before an end that is forced.
    """

    budget: int
    marks: ThinkingMarks
    opened: bool
    encode: Callable[[str], Sequence[int]] = field(repr=False, compare=False)
    decode: Callable[[Sequence[int]], str] = field(repr=False, compare=False)
    message: str = ""

    def forced(self, times: int = 0, tail: str = "") -> list[int]:
        """The tokens that end a thought.

        Args:
            times: how often the end was forced before; then the model is led to its answer.
            tail: the thought's last words, of which some may be the beginning of the end mark.
        """
        marks = self.marks
        if times and marks.between:
            return [*self.encode(marks.end + marks.between + marks.answer)]
        if self.message:
            return [*self.encode(self.message + marks.end)]
        whole = [*self.encode(marks.end)]
        for begun in range(len(marks.end) - 1, 0, -1):
            if len(whole) > 1 and tail.endswith(marks.end[:begun]):
                return [*self.encode(marks.end[begun:])]
        return whole


@dataclass(eq=False)
class Thought:
    """How far a sequence's thought is.

    Attributes:
        limit: the request's budget.
        left: tokens of thought that may still come.
        state: before a thought, inside one, or after them all.
        due: tokens that have to come next.
    """

    limit: ThinkingLimit
    left: int = field(init=False)
    state: Literal["free", "open", "over"] = "free"
    due: list[int] = field(default_factory=list)
    _seen: list[int] = field(default_factory=list)
    _thoughts: int = 0
    _forced: int = 0

    def __post_init__(self) -> None:
        self.left = self.limit.budget
        if self.limit.opened:
            self._open()

    @property
    def allowed(self) -> int | None:
        """Tokens that may come before the host has to look; None: any number."""
        if self.due:
            return 0
        if self.state == "free":
            return self.left + 1  # a mark has at least one token
        return self.left if self.state == "open" else None

    def push(self, id: int) -> None:
        """Takes a token of the answer."""
        if self.due:
            if self.due.pop(0) != id:
                self.give_up()
            elif not self.due:
                self._end()
            return
        if self.state == "over":
            return
        self._seen.append(id)
        text = self.limit.decode(self._seen)
        if self.state == "free":
            self._begin(text)
            return
        self.left -= 1
        if self.limit.marks.end in text:
            self.left += self._of_the_end()
            self._end()
        elif self.left <= 0:
            self._force(text)
        # A token has at least one byte.
        self._seen = self._seen[-len(self.limit.marks.end.encode()) :]

    def give_up(self) -> None:
        """The end cannot be forced: a grammar does not allow it there."""
        self.state, self.due = "over", []

    def _begin(self, text: str) -> None:
        marks = self.limit.marks
        mark = (marks.between if self._thoughts else "") + marks.begin
        text = text.lstrip().rstrip("\ufffd")  # half a character
        if text.startswith(mark):
            self._open()
        elif not mark.startswith(text):
            self.state = "over"

    def _open(self) -> None:
        self.state, self._seen = "open", []
        if self.left <= 0:
            self._force("")

    def _force(self, tail: str) -> None:
        self.due = self.limit.forced(self._forced, tail)
        self._forced += 1

    def _of_the_end(self) -> int:
        """How many of the last tokens are the mark's, which do not count."""
        tails = (self._seen[-count:] for count in range(1, len(self._seen) + 1))
        of_mark = (len(one) for one in tails if self.limit.marks.end in self.limit.decode(one))
        return next(of_mark, 0)

    def _end(self) -> None:
        self._thoughts += 1
        self._seen = []
        self.state = "free" if self.limit.marks.between else "over"
