"""What a reader of a format has found, as the deltas that a client gets."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from jinfer.server.output_deltas import CallDelta, Delta
from jinfer.server.tool_parsers.incremental_reader import Reader, Reading


def call_id() -> str:
    """A new name of a call, as OpenAI's look."""
    return f"call_{uuid.uuid4().hex[:24]}"


class Output:
    """Collects what is found. White space around calls and thoughts belongs to neither side."""

    def __init__(self, new_id: Callable[[], str] = call_id, most: int | None = None) -> None:
        """Begins an answer.

        Args:
            new_id: names calls.
            most: calls that the client wants; further ones are left out.
        """
        self._new_id = new_id
        self._most = most
        self._content, self._reasoning = "", ""
        self._calls: list[CallDelta] = []
        self._index, self._whole = -1, 0
        self._gap = self._dropped = self._thought_gap = ""
        self._trim, self._trim_thought = False, True
        self._parted = ""  # between two thoughts

    def content(self, text: str) -> None:
        """A piece of the answer."""
        text = self._gap + (text.lstrip() if self._trim else text)
        self._trim = self._trim and not text
        shown = text.rstrip()
        self._content += shown
        self._gap = text[len(shown) :]

    def reasoning(self, text: str) -> None:
        """A piece of a thought."""
        if self._trim_thought:
            text = text.lstrip()
            if not text:
                return
            text, self._trim_thought, self._parted = self._parted + text, False, ""
        text = self._thought_gap + text
        shown = text.rstrip()
        self._reasoning += shown
        self._thought_gap = text[len(shown) :]

    def thought(self) -> None:
        """A thought has ended."""
        self._thought_gap = ""
        self._parted = "" if self._trim_thought else "\n\n"
        self._trim = self._trim_thought = True

    def open(self, name: str) -> None:
        """A call begins."""
        self._dropped, self._gap = self._gap, ""
        self._index += 1
        self._add(CallDelta(self._index, self._new_id(), name))

    def arguments(self, text: str) -> None:
        """More of the call's arguments."""
        if text:
            self._add(CallDelta(self._index, arguments=text))

    def done(self) -> None:
        """The call is whole."""
        self._add(CallDelta(self._index, end="done"))
        self._whole += 1
        self._dropped, self._trim = "", True

    def failed(self, reader: Reader) -> None:
        """The call is not whole: the limit cut it, or it is none, and its text will be content."""
        if reader.cut:
            self._add(CallDelta(self._index, end="cut"))
            reader.drop()
            return
        self._add(CallDelta(self._index, end="void"))
        self._gap, self._dropped = self._dropped, ""

    def rejected(self, reader: Reader, *, sure: bool = True) -> None:
        """What was read since the reader's mark is no call: it is content.

        What the limit cut is not shown: it was going to be one.

        Args:
            sure: nothing else begins as it does.
        """
        if reader.cut and (sure or reader.bound):
            reader.drop()
        self.content(reader.raw())

    def end(self) -> None:
        """The answer has ended: white space at its end is its own."""
        self._content += self._gap
        self._reasoning += self._thought_gap
        self._gap = self._thought_gap = ""

    def take(self) -> Delta:
        """What was found since the last time."""
        delta = Delta(self._content, self._reasoning, tuple(_joined(self._calls)))
        self._content, self._reasoning, self._calls = "", "", []
        return delta

    def _add(self, one: CallDelta) -> None:
        if self._most is None or self._whole < self._most:
            self._calls.append(one)


def _joined(calls: list[CallDelta]) -> list[CallDelta]:
    """The same with the pieces of each call's arguments in one."""
    found: list[CallDelta] = []
    for one in calls:
        last = found[-1] if found else None
        if last is not None and last.index == one.index and not last.end:
            arguments = last.arguments + one.arguments
            found[-1] = CallDelta(last.index, last.id, last.name, arguments, one.end)
        else:
            found.append(one)
    return found


class Machine:
    """Runs a reader of a format over an answer."""

    def __init__(
        self,
        read: Callable[[Reader, Output], Reading[None]],
        output: Output,
        *,
        bound: bool = False,
    ) -> None:
        """Begins an answer; `bound`: a grammar lets nothing but calls come."""
        self._reader, self._output = Reader(bound=bound), output
        self._reading = read(self._reader, output)

    def push(self, text: str) -> Delta:
        """What is certain once this text is known."""
        self._reader.feed(text)
        next(self._reading, None)
        return self._output.take()

    def finish(self, cut: bool = False) -> Delta:
        """The rest, at the answer's end."""
        self._reader.ended, self._reader.cut = True, cut
        next(self._reading, None)
        self._output.end()
        return self._output.take()
