"""Stop texts: where an answer ends, found while it streams."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StopTexts:
    """Lets a text through up to the first of some stop texts.

    The first is the one that is complete first, and the longest of those that are complete at
    once, so that the result does not depend on the pieces a text comes in. What could be the
    beginning of a stop text is held back until it is known not to be one.

    Attributes:
        stops: the texts.
        included: whether the one that ends the answer belongs to it.
        found: whether one has come.
    """

    stops: tuple[str, ...]
    included: bool = False
    found: bool = False
    _held: str = ""

    def push(self, text: str, early: bool = False) -> str:
        """What of the text so far is now known to belong to the answer.

        Args:
            early: a stop text that this completes does not end the answer.
        """
        if self.found or not self.stops:
            return "" if self.found else text
        old, text = len(self._held), self._held + text
        found = ((text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self.stops)
        ends = [(at + len(stop), at) for at, stop in found if at >= 0]
        if ends and not early:
            self.found, self._held = True, ""
            end, at = min(ends)
            return text[: end if self.included else at]
        keep = max(_overlap(text, stop) for stop in self.stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
